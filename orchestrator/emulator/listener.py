"""Where connections across one pair of links come in."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from orchestrator.emulator.flow import bound_receive_buffer
from orchestrator.emulator.shared_link import SharedLink

_BACKLOG = 256
_ACCEPT_AGAIN_S = 1.0
_LOG = logging.getLogger("relay")


class Listener:
    """Accepts while neither link is cut: a connection needs both to come about.

    Args:
        family: Of the address that it will bind.
        there: The link from the dialler's site to the gateway's.
        back: The opposite link.
        on_accepted: Called with each new connection, which becomes the callee's own.
    """

    def __init__(
        self,
        family: socket.AddressFamily,
        there: SharedLink,
        back: SharedLink,
        on_accepted: Callable[[socket.socket], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._there = there
        self._back = back
        self._on_accepted = on_accepted
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._is_accepting = False
        self._resting: asyncio.TimerHandle | None = None

    def open(self, address: tuple[object, ...]) -> int:
        """Bind and accept; return the port. OSError when the address cannot be bound."""
        bound_receive_buffer(self._socket, self._there.shape)
        self._socket.bind(address)
        self._socket.listen(_BACKLOG)
        self.update()
        return int(self._socket.getsockname()[1])

    def update(self) -> None:
        """The links may have been cut or healed, or have other figures."""
        bound_receive_buffer(self._socket, self._there.shape)
        wanted = not (self._there.is_cut or self._back.is_cut or self._resting)
        if wanted and not self._is_accepting:
            self._loop.add_reader(self._socket, self._accept)
        elif self._is_accepting and not wanted:
            self._loop.remove_reader(self._socket)
        self._is_accepting = wanted

    def close(self) -> None:
        """Let go of the port. Idempotent."""
        if self._resting is not None:
            self._resting.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()

    def _accept(self) -> None:
        try:
            dialler, _ = self._socket.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:  # out of descriptors: a ready listener would spin
            _LOG.warning("cannot accept: %s", error.strerror)
            self._resting = self._loop.call_later(_ACCEPT_AGAIN_S, self._go_on)
            self.update()
            return
        self._on_accepted(dialler)

    def _go_on(self) -> None:
        self._resting = None
        self.update()
