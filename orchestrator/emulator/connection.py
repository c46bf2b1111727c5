"""One connection through the relay: the dialler's socket, the gateway's, and a flow each way.

How it ends travels like its bytes: a half-close or a reset at one end is seen at the other one
link delay later, and behind everything that was sent before it.

**Half-open**: one end is reset and forgotten, with what was in flight both ways; the other is not
told. What it goes on sending is taken, up to about what a TCP window would hold, and goes nowhere;
after that it is no longer read, as where no acknowledgement comes, and not noticed when it closes:
it then lasts until the connection is reset, or the relay ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import struct
from collections.abc import Callable

from orchestrator.emulator.flow import Flow, Mark
from orchestrator.emulator.shared_link import SharedLink

DIAL_WITHIN_S = 10.0
"""A gateway that has not accepted by then counts as gone."""
Address = tuple[socket.AddressFamily, tuple[object, ...]]
_VOID_BYTES = 4 << 20
"""What an end may send to nobody: the most that Linux buffers for a sender by default."""
_VOID_READ_BYTES = 64 << 10
_ABORT = struct.pack("ii", 1, 0)
"""SO_LINGER with 0 s: closing sends a reset."""


class Connection:
    """One connection; it owns both sockets, and ends by itself or by `close`.

    Args:
        dialler: Accepted; becomes the connection's own.
        address: The gateway's family and socket address.
        there: The link from the dialler's site to the gateway's.
        back: The opposite link.
        on_closed: Called once, when nothing of it is left.
    """

    def __init__(
        self,
        dialler: socket.socket,
        address: Address,
        there: SharedLink,
        back: SharedLink,
        on_closed: Callable[[Connection], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_closed = on_closed
        self._dialler = dialler
        family, self._address = address
        self._gateway = socket.socket(family, socket.SOCK_STREAM)
        for end in (dialler, self._gateway):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._there = Flow(there, back, dialler, self._gateway, self._lost, self._arrived)
        self._back = Flow(back, there, self._gateway, dialler, self._lost, self._arrived)
        self._sites = (there.shape.source, there.shape.target)
        self._num_open = 2
        self._closed = False
        self._dialling: asyncio.TimerHandle | None = None
        self._untold: socket.socket | None = None
        """The end that still believes in a half-open connection."""
        self._void_bytes = 0

    def dial(self) -> None:
        """Reach for the gateway; the dialler is read once that has succeeded."""
        status = self._gateway.connect_ex(self._address)
        if status == 0:
            self._start()
        elif status == errno.EINPROGRESS:
            self._loop.add_writer(self._gateway, self._dialled)
            self._dialling = self._loop.call_later(DIAL_WITHIN_S, self._lost, self._gateway)
        else:
            self._lost(self._gateway)

    def joins(self, one: str, other: str) -> bool:
        """Say whether it is a connection between two sites, whichever of them has dialled."""
        return {one, other} == set(self._sites)

    def close(self) -> None:
        """Reset both ends now and let go of them. Idempotent."""
        for end in (self._dialler, self._gateway):
            _reset_when_closed(end)
        self._release()

    def half_open(self, site: str) -> None:
        """Reset the end at `site`; the other one is not told."""
        gone, untold = self._dialler, self._gateway
        if site != self._sites[0]:
            gone, untold = untold, gone
        if self._untold is untold:
            return
        if self._untold is gone or self._dialling is not None:
            self.close()  # no end is left that believes in a connection, or none does yet
            return
        self._untold = untold
        self._there.close()
        self._back.close()
        _reset_when_closed(gone)
        gone.close()
        self._loop.add_reader(untold, self._read_void)

    def _read_void(self) -> None:
        assert self._untold is not None
        try:
            num_read = len(self._untold.recv(_VOID_READ_BYTES))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            num_read = 0
        self._void_bytes += num_read
        if num_read == 0:
            self._release()
        elif self._void_bytes >= _VOID_BYTES:
            self._loop.remove_reader(self._untold)

    def _dialled(self) -> None:
        self._stop_dialling()
        if self._gateway.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._lost(self._gateway)
        else:
            self._start()

    def _start(self) -> None:
        self._there.start()
        self._back.start()

    def _stop_dialling(self) -> None:
        if self._dialling is not None:
            self._dialling.cancel()
            self._dialling = None
            self._loop.remove_writer(self._gateway)

    def _lost(self, end: socket.socket) -> None:
        """One end is broken: what it sent still arrives, then the reset."""
        self._stop_dialling()
        from_it, to_it = self._there, self._back
        if end is self._gateway:
            from_it, to_it = to_it, from_it
        to_it.close()
        if from_it.is_closed:  # so is the other end: nobody is left to tell
            self.close()
        else:
            from_it.reset()

    def _arrived(self, flow: Flow, mark: Mark) -> None:
        """A half-close or a reset has crossed the link."""
        if mark is Mark.RESET:
            self.close()
            return
        sink = self._gateway if flow is self._there else self._dialler
        try:
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            self._lost(sink)
            return
        self._num_open -= 1
        if self._num_open == 0:
            self._release()

    def _release(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._stop_dialling()
        self._there.close()
        self._back.close()
        if self._untold is not None:
            self._loop.remove_reader(self._untold)
        self._dialler.close()
        self._gateway.close()
        self._on_closed(self)


def _reset_when_closed(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
