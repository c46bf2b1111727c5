"""Sends an all-reduce's bytes over plain TCP: benchmarks compare the exchange with it.

Usage: python -m isthmus.sites.bench.tcp --rank R --addresses A0 A1 .. --folder F --size-bytes N
       --count C --idle SECONDS --timeout SECONDS

One process a site; each sends to the next, the last to the first, over one connection that stays.
A repetition is 2 (S-1)/S of N bytes over each: what a ring all-reduce sends, and with two sites all
N bytes each way at once, as in a gather. Nothing is summed. Prints one line of JSON at the end, as
sites/bench/gloo.py does. The processes find each other's ports in F.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import threading
import time
from pathlib import Path

from isthmus.sites.bench.arguments import baseline_parser

PIECE_BYTES = 1 << 20
POLL_S = 0.02


class Neighbours:
    """The connection to the next site, and the one from the site before."""

    def __init__(self, out: socket.socket, back: socket.socket, world_size: int) -> None:
        self._out = out
        self._back = back
        self._world_size = world_size

    def meet(self) -> None:
        """Return when every site has come here: after S-1 times all have heard of all."""
        for _ in range(self._world_size - 1):
            self._out.sendall(b"x")
            self._take(1)

    def exchange(self, num_bytes: int) -> None:
        """Send so many bytes and take as many, at once; return when all have come."""
        sender = threading.Thread(target=self._send, args=(num_bytes,))
        sender.start()
        self._take(num_bytes)
        sender.join()

    def _send(self, num_bytes: int) -> None:
        piece = memoryview(bytes(PIECE_BYTES))
        for sent in range(0, num_bytes, PIECE_BYTES):
            self._out.sendall(piece[: num_bytes - sent])

    def _take(self, num_bytes: int) -> None:
        scratch = bytearray(min(num_bytes, PIECE_BYTES))
        while num_bytes:
            taken = self._back.recv_into(scratch, min(num_bytes, PIECE_BYTES))
            if not taken:
                raise ConnectionError("the site before has gone")
            num_bytes -= taken


def main(arguments: list[str]) -> int:
    """Send, and print what it took."""
    chosen = _parser().parse_args(arguments)
    world_size = len(chosen.addresses)
    num_bytes = 2 * (world_size - 1) * chosen.size_bytes // world_size
    out, back = _connected(chosen.rank, chosen.addresses, chosen.folder, chosen.timeout)
    neighbours, repeats = Neighbours(out, back, world_size), []
    with out, back:
        for _ in range(chosen.count):
            time.sleep(chosen.idle)
            neighbours.meet()
            cpu_s, begin_s = time.process_time(), time.time()
            neighbours.exchange(num_bytes)
            end_s = time.time()
            used_s = time.process_time() - cpu_s
            repeats.append({"begin_s": begin_s, "end_s": end_s, "cpu_s": used_s})
        sys.stdout.write(json.dumps({"repeats": repeats, "digest": ""}) + "\n")
        neighbours.meet()  # nobody goes while somebody still reads
    return 0


def _connected(
    rank: int, addresses: list[str], folder: Path, timeout_s: float
) -> tuple[socket.socket, socket.socket]:
    """Return the connections to the next site and from the one before; the caller's."""
    with socket.create_server((addresses[rank], 0)) as listener:
        listener.settimeout(timeout_s)
        written = folder / f"{rank}.new"
        written.write_text(str(listener.getsockname()[1]))
        written.rename(folder / f"{rank}.port")
        after = (rank + 1) % len(addresses)
        port = _port(folder / f"{after}.port", time.monotonic() + timeout_s)
        out = socket.create_connection((addresses[after], port), timeout_s)
        back, _ = listener.accept()
    back.settimeout(timeout_s)
    for each in (out, back):
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return out, back


def _port(path: Path, deadline_s: float) -> int:
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{path.stem} did not say where it listens")
        time.sleep(POLL_S)
    return int(path.read_text())


def _parser() -> argparse.ArgumentParser:
    parser = baseline_parser("isthmus.sites.bench.tcp", __doc__)
    parser.add_argument("--addresses", nargs="+", required=True, help="of all sites, by rank")
    parser.add_argument("--folder", type=Path, required=True, help="that all processes see")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
