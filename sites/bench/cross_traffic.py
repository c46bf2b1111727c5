"""Bulk TCP flows of somebody else, from and to one emulated site, until it is killed.

Usage: python -m isthmus.sites.bench.cross_traffic --address OWN --flows N --to ADDRESS..
       --from ADDRESS.. --congestion NAME --out FILE

Holds N flows to each of the sites `--to`, and takes those of the sites `--from`. A flow that ends
is dialled again. Each `SAMPLE_S` it appends a line of JSON to FILE: {"at_s", "received_bytes":
{address: total}}, the clock and the bytes that have come from each site by then. Without a name,
flows follow this host's congestion control, whatever the emulator gives others.

Only the standard library, for the emulator starts one of these for each site.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

PORT = 5201
SAMPLE_S = 0.05
DIAL_AGAIN_S = 0.05
BLOCK_BYTES = 256 << 10
_HOST_CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
"""This host's choice, in a network namespace too: no emulator sets it."""


class Received:
    """Takes flows and counts what comes."""

    def __init__(self, listener: socket.socket, senders: Iterable[str]) -> None:
        self.num_bytes = dict.fromkeys(senders, 0)
        """By the sender's address."""
        self._listener = listener
        self._lock = threading.Lock()

    def serve(self) -> None:
        """Take flows, each in a thread of its own, for ever."""
        while True:
            flow, (sender, _) = self._listener.accept()
            threading.Thread(target=self._take, args=(flow, sender), daemon=True).start()

    def _take(self, flow: socket.socket, sender: str) -> None:
        scratch = bytearray(BLOCK_BYTES)
        with flow, contextlib.suppress(OSError):
            # Nobody wants the bytes: MSG_TRUNC has the kernel count them without a copy.
            while num_bytes := flow.recv_into(scratch, BLOCK_BYTES, socket.MSG_TRUNC):
                with self._lock:
                    self.num_bytes[sender] += num_bytes


def send(own: str, other: str, congestion: str) -> None:
    """Hold one flow, for ever.

    Raises:
        PermissionError: this process may not choose that congestion control.
        FileNotFoundError: this kernel has none of that name.
    """
    block = bytes(BLOCK_BYTES)
    while True:
        with (
            socket.socket(socket.AF_INET, socket.SOCK_STREAM) as flow,
            contextlib.suppress(ConnectionError, TimeoutError),
        ):
            flow.bind((own, 0))
            flow.connect((other, PORT))
            # Not before: a route that names a congestion control has it chosen on connecting.
            flow.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
            while True:
                flow.sendall(block)
        time.sleep(DIAL_AGAIN_S)


def main(arguments: list[str]) -> int:
    """Send and take until killed; return only where that cannot begin."""
    chosen = _parser().parse_args(arguments)
    congestion = chosen.congestion or _HOST_CONGESTION.read_text().strip()
    failed: list[BaseException] = []
    with socket.create_server((chosen.address, PORT), backlog=256) as listener:
        received = Received(listener, chosen.senders)
        threading.Thread(target=received.serve, daemon=True).start()

        def flow(other: str) -> None:
            try:
                send(chosen.address, other, congestion)
            except OSError as error:
                failed.append(error)

        for other in chosen.to:
            for _ in range(chosen.flows):
                threading.Thread(target=flow, args=(other,), daemon=True).start()
        with chosen.out.open("w", buffering=1) as out:
            while not failed:
                line = {"at_s": time.time(), "received_bytes": received.num_bytes}
                out.write(json.dumps(line) + "\n")
                time.sleep(SAMPLE_S)
    sys.stderr.write(f"cross traffic: congestion control {congestion}: {failed[0]}\n")
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m isthmus.sites.bench.cross_traffic")
    parser.add_argument("--address", required=True, help="this site's")
    parser.add_argument("--flows", type=int, required=True, help="to each other site")
    parser.add_argument("--to", nargs="*", default=[], metavar="ADDRESS")
    parser.add_argument("--from", nargs="*", default=[], metavar="ADDRESS", dest="senders")
    parser.add_argument("--congestion", default="", help="else this host's")
    parser.add_argument("--out", type=Path, required=True, help="file of samples")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
