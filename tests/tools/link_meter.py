"""One end of an emulated link that emulation_check.py measures.

`python link_meter.py` and one of

    serve HOST                       receives
    echo HOST PORT COUNT             times small messages
    send HOST PORT CONNECTIONS       sends until it is killed
    datagrams HOST PORT COUNT PER_S  sends so many

A command prints one JSON object when it is up, or when it is done. `serve` prints the received
counts for each line of its stdin, and ends with it.

Threads, not an event loop: they sleep in the kernel, and the GIL is not held while bytes are
copied. Only the standard library, for it starts inside namespaces many times.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import sys
import threading
import time

ECHO, SINK = b"e", b"s"
"""First byte of a connection: its purpose."""
ECHO_BYTES = 32
PIECE_BYTES = 256 << 10
DATAGRAM = b"\0" * 100
WAIT_S = 20.0
"""Timeout: a few round trips of any usable link, even when full."""
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with 0 s: buffered data of a killed sender would otherwise cross the link for
seconds."""
_BURST_S = 0.002
_BUFFER_BYTES = 8 << 20


class Receiver:
    """Receives and counts data."""

    def __init__(self, host: str) -> None:
        self.num_datagrams = 0
        self.received_bytes: list[int] = []
        """Bytes per connection; each entry is written by one thread."""
        self.listener = socket.create_server((host, 0), backlog=64)
        self.datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.datagrams.bind((host, 0))
        # A datagram that waits too long here would count as lost on the link.
        self.datagrams.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        # Daemons: the process ends with its stdin, whatever they wait for.
        for target in (self._accept, self._count_datagrams):
            threading.Thread(target=target, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self.listener.accept()
            threading.Thread(target=self._receive, args=(connection,), daemon=True).start()

    def _receive(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            if connection.recv(1) == ECHO:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while data := connection.recv(ECHO_BYTES):
                    connection.sendall(data)
                return
            index = len(self.received_bytes)
            self.received_bytes.append(0)
            buffer = bytearray(PIECE_BYTES)
            while num_bytes := connection.recv_into(buffer):
                self.received_bytes[index] += num_bytes

    def _count_datagrams(self) -> None:
        buffer = bytearray(2048)
        while True:
            self.datagrams.recv_into(buffer)
            self.num_datagrams += 1


def serve(host: str) -> None:
    """Receive until stdin ends, and print the counts for each of its lines."""
    receiver = Receiver(host)
    port, datagram_port = (
        each.getsockname()[1] for each in (receiver.listener, receiver.datagrams)
    )
    _say(port=port, datagram_port=datagram_port)
    for _ in sys.stdin:
        num_bytes = sum(receiver.received_bytes)
        _say(bytes=num_bytes, datagrams=receiver.num_datagrams, now_s=time.monotonic())


def echo(host: str, port: int, count: int) -> None:
    """Print the round-trip times of `count` small messages, sent one at a time."""
    times_s = []
    with _dialled(host, port, ECHO) as connection, connection.makefile("rb") as answers:
        connection.settimeout(WAIT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(count):
            began_s = time.perf_counter()
            connection.sendall(b"\0" * ECHO_BYTES)
            if len(answers.read(ECHO_BYTES)) < ECHO_BYTES:
                raise ConnectionResetError("the other end has closed the connection")
            times_s.append(time.perf_counter() - began_s)
    _say(times_s=times_s)


def send(host: str, port: int, num_connections: int) -> None:
    """Send over `num_connections` connections until this process is killed."""
    connections = [_dialled(host, port, SINK) for _ in range(num_connections)]
    _say()
    for connection in connections:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        threading.Thread(target=_send_until_closed, args=(connection,)).start()


def send_datagrams(host: str, port: int, count: int, per_s: float) -> None:
    """Send datagrams at a steady rate, and print how many the kernel took."""
    began_s = time.monotonic()
    sent = 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        datagrams.connect((host, port))
        while sent < count:
            due = min(count, int((time.monotonic() - began_s) * per_s) + 1)
            # Far behind schedule it would send a burst that no queue holds: skip the backlog.
            if due - sent > per_s * _BURST_S * 8:
                began_s += (due - sent) / per_s
                continue
            for _ in range(due - sent):
                datagrams.send(DATAGRAM)
            sent = due
            time.sleep(_BURST_S)
    _say(sent=sent)


def main(words: list[str]) -> int:
    """Run the command; print an `error` object if the network does not allow it."""
    try:
        match words:
            case ["serve", host]:
                serve(host)
            case ["echo", host, port, count]:
                echo(host, int(port), int(count))
            case ["send", host, port, num_connections]:
                send(host, int(port), int(num_connections))
            case ["datagrams", host, port, count, per_s]:
                send_datagrams(host, int(port), int(count), float(per_s))
            case _:
                raise ValueError(f"unknown command line {words}")
    except OSError as error:
        _say(error=str(error))
    return 0


def _dialled(host: str, port: int, kind: bytes) -> socket.socket:
    connection = socket.create_connection((host, port), timeout=WAIT_S)
    connection.settimeout(None)
    # CUBIC, whatever the host's default: it fills a link that has a queue of one BDP.
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    connection.sendall(kind)
    return connection


def _send_until_closed(connection: socket.socket) -> None:
    piece = memoryview(bytes(PIECE_BYTES))
    with contextlib.suppress(OSError):
        while True:
            connection.sendall(piece)


def _say(**values: object) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
