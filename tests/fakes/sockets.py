"""TCP sockets of tests, and both ends of a connection."""

import ctypes
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from isthmus.orchestrator.emulator.site_namespaces import CLONE_NEWNET


def receive(end: socket.socket, num_bytes: int) -> bytes:
    """Return exactly so many bytes."""
    data = bytearray()
    while len(data) < num_bytes:
        piece = end.recv(min(num_bytes - len(data), 1 << 20))
        assert piece, "the connection ended early"
        data += piece
    return bytes(data)


def round_trip_s(near: socket.socket, far: socket.socket) -> float:
    """Send a byte there, and back when it has come; return how long that took."""
    began_s = time.monotonic()
    near.sendall(b"x")
    far.sendall(receive(far, 1))
    receive(near, 1)
    return time.monotonic() - began_s


def open_socket(net: str, kind: int = socket.SOCK_STREAM) -> socket.socket:
    """Return a socket of the network namespace whose file is `net`, for who may enter it as root.

    This process stays where it is.
    """

    def opened() -> socket.socket:
        with Path(net).open("rb") as namespace:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code), net)
            return socket.socket(socket.AF_INET, kind)

    # A thread's sockets belong to its namespace for good, so the thread need not live on.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(opened).result()
