"""Whether TCP connections get through from one machine to another, and large packets with them."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading

from isthmus.protos.failure import text_of

ECHO_BYTES = 256 << 10
"""Many packets of full size: where those are lost on the way, none of them come back."""
_READ_BYTES = 1 << 16


class Echo:
    """A port that sends back what it gets, until it is closed. A thread for each connection."""

    def __init__(self, host: str, ports: tuple[int, int] = (0, 0)) -> None:
        """Listen on the first port of a range that is free; 0: on one that the system chooses.

        Raises:
            OSError: nothing can listen on that host, or no port is free.
        """
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        first, last = ports
        for port in range(first, last + 1):
            try:
                self._listening = socket.create_server((host, port), family=family)
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE or port == last:
                    raise
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, name="echo", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._listening.accept()
                threading.Thread(target=_echo, args=(connection,), daemon=True).start()


def _echo(connection: socket.socket) -> None:
    connection.settimeout(10.0)
    with connection, contextlib.suppress(OSError):
        while data := connection.recv(_READ_BYTES):
            connection.sendall(data)


def reach(source: str, host: str, port: int, within_s: float) -> str:
    """Connect to an `Echo`, and have many large packets come back; return why not, or nothing.

    Args:
        source: The address to come from.
        host: Where it listens.
        port: Where it listens.
        within_s: For connecting, and again for each wait after it.
    """
    try:
        connection = socket.create_connection((host, port), within_s, (source, 0))
    except OSError as error:
        return _reason(error, within_s)
    sending = threading.Thread(target=_send, args=(connection,), name="sender", daemon=True)
    with connection:
        sending.start()
        got = 0
        try:
            while got < ECHO_BYTES and (data := connection.recv(_READ_BYTES)):
                got += len(data)
        except OSError:
            pass
    if got < ECHO_BYTES:
        return f"a connection opens, but of {ECHO_BYTES} bytes only {got} came back"
    return ""


def _send(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the reader tells
        connection.sendall(b"\0" * ECHO_BYTES)


def _reason(error: OSError, within_s: float) -> str:
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return f"no answer within {within_s:g} s"
    return error.strerror or text_of(error)
