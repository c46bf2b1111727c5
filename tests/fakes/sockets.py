"""What tests do with both ends of a TCP connection."""

import socket
import time


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
