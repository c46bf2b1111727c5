"""The far end of measured connections: echoes what is timed, and counts the rest."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

DEADLINE_S = 60.0
"""How long each wait for a connection may last."""
PIECE = bytes(256 << 10)
"""What is sent where bytes are counted: it does not start with `p`."""


class EchoSink:
    """A server, of a thread a connection: echoes what starts with `p`, counts all else it reads."""

    def __init__(self, listener: socket.socket) -> None:
        """Accept connections from now on; the listener is the sink's to close."""
        self._listener = listener
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()
        self.num_bytes = 0

    def close(self) -> None:
        """End the server; its connections have ended with their clients."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(DEADLINE_S)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                client.settimeout(DEADLINE_S)
                thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, client: socket.socket) -> None:
        buffer = bytearray(1 << 20)
        with client, contextlib.suppress(OSError):
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while num_read := client.recv_into(buffer):
                if buffer[0] == ord("p"):
                    client.sendall(buffer[:num_read])
                else:
                    self.num_bytes += num_read


def ping_s(client: socket.socket, count: int) -> list[float]:
    """Return round-trip times of small messages."""
    times_s = []
    for _ in range(count):
        began_s = time.perf_counter()
        client.sendall(b"ping")
        client.recv(16)
        times_s.append(time.perf_counter() - began_s)
    return times_s
