"""What measures an emulated link, at one of its ends: `python -m orchestrator.emulator.link_meter`.

It is told on stdin, one JSON object a line, and answers each on stdout with another:

    {"op": "serve", "host"}                                     → {"port", "datagram_port"}
    {"op": "count"}                                             → {"bytes", "datagrams", "now_s"}
    {"op": "echo", "host", "port", "count"}                     → {"times_s": [..]}
    {"op": "send", "host", "port", "connections"}               → {}, and sends until `stop`
    {"op": "stop"}                                              → {}
    {"op": "datagrams", "host", "port", "count", "per_s"}       → {"sent"}

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
from collections.abc import Mapping
from typing import Any

ECHO, SINK = b"e", b"s"
"""The first byte of a connection says what it is for."""
ECHO_BYTES = 32
PIECE_BYTES = 256 << 10
DATAGRAM = b"\0" * 100
DIAL_S = 20.0
"""A few round trips of any link that can be worked with, also while it is full."""
_ECHO_S = 20.0
_BURST_S = 0.002
_BUFFER_BYTES = 8 << 20


class Probe:
    """One end of the links that are measured."""

    def __init__(self) -> None:
        self._received: list[int] = []
        """Bytes, one entry a connection: each is written by one thread only."""
        self._datagrams = 0
        self._sending: list[socket.socket] = []

    def handle(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Do what a message asks for; OSError when the network does not allow it."""
        match message["op"]:
            case "serve":
                return self._serve(message["host"])
            case "count":
                return {
                    "bytes": sum(self._received),
                    "datagrams": self._datagrams,
                    "now_s": time.monotonic(),
                }
            case "echo":
                return {"times_s": _echo(message["host"], message["port"], message["count"])}
            case "send":
                for _ in range(message["connections"]):
                    self._send(message["host"], message["port"])
                return {}
            case "stop":
                return self._stop()
            case "datagrams":
                address = (message["host"], message["port"])
                return {"sent": _send_datagrams(address, message["count"], message["per_s"])}
        raise ValueError(f"unknown op {message['op']!r}")

    def _serve(self, host: str) -> dict[str, Any]:
        listener = socket.create_server((host, 0), backlog=64)
        datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        datagrams.bind((host, 0))
        # A datagram that waits too long here would count as lost on the link.
        datagrams.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        _start(self._accept, listener)
        _start(self._receive_datagrams, datagrams)
        return {
            "port": listener.getsockname()[1],
            "datagram_port": datagrams.getsockname()[1],
        }

    def _accept(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            _start(self._receive, connection)

    def _receive(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            kind = connection.recv(1)
            if kind == ECHO:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while data := connection.recv(ECHO_BYTES):
                    connection.sendall(data)
            elif kind == SINK:
                self._sink(connection)

    def _sink(self, connection: socket.socket) -> None:
        index = len(self._received)
        self._received.append(0)
        buffer = bytearray(PIECE_BYTES)
        while num_bytes := connection.recv_into(buffer):
            self._received[index] += num_bytes

    def _receive_datagrams(self, datagrams: socket.socket) -> None:
        buffer = bytearray(2048)
        while True:
            datagrams.recv_into(buffer)
            self._datagrams += 1

    def _send(self, host: str, port: int) -> None:
        connection = _dial(host, port, SINK)
        self._sending.append(connection)
        _start(_send_until_closed, connection)

    def _stop(self) -> dict[str, Any]:
        for connection in self._sending:
            # Reset, or what is buffered would go on crossing the link for seconds.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RD)
            connection.close()
        self._sending.clear()
        return {}


def main() -> int:
    """Answer until stdin ends."""
    probe = Probe()
    for line in sys.stdin:
        try:
            answer = probe.handle(json.loads(line))
        except OSError as error:
            answer = {"error": str(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    return 0


def _start(target: Any, *arguments: Any) -> None:  # noqa: ANN401 - any function
    # Daemons: the process ends with its stdin, whatever they wait for.
    threading.Thread(target=target, args=arguments, daemon=True).start()


def _dial(host: str, port: int, kind: bytes) -> socket.socket:
    connection = socket.create_connection((host, port), timeout=DIAL_S)
    connection.settimeout(None)
    # It is the link that is measured: of what Linux has, this fills a path with one BDP of queue.
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    connection.sendall(kind)
    return connection


def _send_until_closed(connection: socket.socket) -> None:
    piece = memoryview(bytes(PIECE_BYTES))
    with contextlib.suppress(OSError):
        while True:
            connection.sendall(piece)


def _echo(host: str, port: int, count: int) -> list[float]:
    """Return how long each of `count` small messages took there and back; one at a time."""
    times_s = []
    with _dial(host, port, ECHO) as connection:
        connection.settimeout(_ECHO_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(count):
            began_s = time.perf_counter()
            connection.sendall(b"\0" * ECHO_BYTES)
            missing = ECHO_BYTES
            while missing:
                data = connection.recv(missing)
                if not data:
                    raise ConnectionResetError("the other end has closed the connection")
                missing -= len(data)
            times_s.append(time.perf_counter() - began_s)
    return times_s


def _send_datagrams(address: tuple[str, int], count: int, per_s: float) -> int:
    """Send datagrams at a steady rate; return how many the kernel took."""
    began_s = time.monotonic()
    sent = 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        datagrams.connect(address)
        while sent < count:
            due = min(count, int((time.monotonic() - began_s) * per_s) + 1)
            # Behind by much, it would send a burst that no queue holds: it goes on from here.
            if due - sent > per_s * _BURST_S * 8:
                began_s += (due - sent) / per_s
                continue
            for _ in range(due - sent):
                datagrams.send(DATAGRAM)
            sent = due
            time.sleep(_BURST_S)
    return sent


if __name__ == "__main__":
    sys.exit(main())
