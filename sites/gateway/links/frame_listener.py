"""Accepts connections on a gateway's port, and admits calls at a bounded cost.

Anyone who reaches the port can connect, and so cause TLS handshakes and HTTP/2 parsing. A
connection is a *stranger* until its call is let in. This work runs on the loop that carries frames,
so it is rationed:

- Strangers have their own poll. A turn does some of their work, and all turns together have a share
  of the loop's processor time (`allowance.py`); beyond it, strangers wait.
- Their number is limited. A new one replaces the oldest. Addresses from which a call was let in
  before have priority, so a flood of connections does not keep out returning peers.
- A stranger has a deadline, a number of reads, and some KiB of HTTP/2 (`http2.py`) until its call.
- A refused stranger gets the reason, and nothing that it sends is read any more.

A call that is let in becomes a `FrameCall`, and a task of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from isthmus.protos.errors import IsthmusError, RemoteProtocolError
from isthmus.protos.failure import text_of
from isthmus.protos.limits import EXCHANGE_CHANNEL_BYTES, HANDSHAKE_S
from isthmus.protos.mutual_tls import CertificateError
from isthmus.protos.security import Security
from isthmus.sites.gateway.links.allowance import Allowance
from isthmus.sites.gateway.links.calls import serve_call
from isthmus.sites.gateway.links.frame_calls import FrameCall, last_words, tls_socket
from isthmus.sites.gateway.links.http2 import Headers, Http2
from isthmus.sites.gateway.links.keep_alive import Patience
from isthmus.sites.gateway.links.status import Status, status_of

_log = logging.getLogger(__name__)

_SHARE: Final = 0.1
"""Strangers' share of the loop's time; a handshake takes a millisecond or two."""
_SAVED_S: Final = 0.25
"""Time that strangers may save up: enough for a hundred peers that connect at the same time."""
_TURN_S: Final = 0.005
"""Longest turn of strangers' work, beside the last step in it."""
_STRANGERS_MAX: Final = 128
_KNOWN_MAX: Final = 256
_ACCEPTS_MAX: Final = 32
"""Connections accepted in one turn, at most."""
_EVENTS_MAX: Final = 32
_READS_MAX: Final = 64
"""Reads of a stranger until its call: a header may come in packets."""
_READS_A_STEP: Final = 4
_LINGER_S: Final = 2.0
"""Time for a refused stranger to read the reason."""
_SWEEP_S: Final = 0.25
_BACKLOG: Final = 256
_RETRY_S: Final = 0.1
_WARN_EVERY_S: Final = 10.0

Serve = Callable[[FrameCall], Awaitable[None]]
"""Serves a call until the peer ends it; raises IsthmusError to refuse it, or to end it."""


class FrameListener:
    """Accepts connections with one call each on a listening socket. `begin`, then `close`."""

    def __init__(
        self,
        listening: socket.socket,
        methods: Mapping[str, Serve],
        security: Security,
        patience: Patience,
        most: int,
    ) -> None:
        """`methods`: handlers by path. `most`: open connections at a time, strangers included.

        Beyond `most`, a new connection replaces the oldest stranger. Without any, it is closed at
        once.
        """
        self._listening = listening
        self._methods = methods
        self._security = security
        self._patience = patience
        self._most = most
        self._loop = asyncio.get_running_loop()
        self._calls: set[asyncio.Task[None]] = set()
        """Tasks of the calls that were let in."""
        self._strangers: dict[int, _Stranger] = {}
        """Strangers by file descriptor, oldest first."""
        self._known: dict[str, None] = {}
        """Addresses from which a call was let in, the latest last."""
        self._poll = select.epoll()
        self._allowance = Allowance(_SHARE, _SAVED_S, self._loop.time())
        self._resuming: asyncio.TimerHandle | None = None
        self._sweeping: asyncio.TimerHandle | None = None
        self._again: asyncio.TimerHandle | None = None
        self._full, self._refused, self._unready = (_Warner() for _ in range(3))
        self._is_closed = False

    def begin(self) -> None:
        """Accept from now on."""
        self._listening.setblocking(False)
        self._listening.listen(_BACKLOG)
        self._poll.register(self._listening, select.EPOLLIN)
        self._loop.add_reader(self._poll.fileno(), self._turn)

    async def close(self) -> None:
        """Stop accepting connections, and cancel all calls."""
        if self._is_closed:
            return
        self._is_closed = True
        for timer in (self._again, self._resuming, self._sweeping):
            if timer is not None:
                timer.cancel()
        self._loop.remove_reader(self._poll.fileno())
        self._poll.close()
        self._listening.close()
        for stranger in self._strangers.values():
            stranger.socket.close()
        self._strangers.clear()
        for task in self._calls:
            task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    # ---------------------------------------------------------------- strangers' work

    def _turn(self) -> None:
        """Do some of the strangers' work; pause if the allowance is used up."""
        began_s = time.thread_time()
        end_s = began_s + min(_TURN_S, self._allowance.left_s(self._loop.time()))
        ready = {}
        for descriptor, events in self._poll.poll(0, _EVENTS_MAX):
            if descriptor == self._listening.fileno():
                self._accept()
            else:
                ready[descriptor] = events
        for descriptor in sorted(ready, key=lambda it: not self._is_known(it)):
            stranger = self._strangers.get(descriptor)
            if stranger is not None:  # else its place was taken just now
                self._go_on(stranger, ready[descriptor])
            if time.thread_time() >= end_s:
                break
        self._allowance.spend(time.thread_time() - began_s)
        wait_s = self._allowance.wait_s(0.0, self._loop.time())
        if wait_s > 0:
            self._loop.remove_reader(self._poll.fileno())
            wait_s = self._allowance.wait_s(_TURN_S, self._loop.time())
            self._resuming = self._loop.call_later(wait_s, self._resume)

    def _resume(self) -> None:
        self._loop.add_reader(self._poll.fileno(), self._turn)

    def _is_known(self, descriptor: int) -> bool:
        stranger = self._strangers.get(descriptor)
        return stranger is not None and stranger.is_known

    def _accept(self) -> None:
        try:
            for _ in range(_ACCEPTS_MAX):
                connection, address = self._listening.accept()
                connection.setblocking(False)
                stranger = _Stranger(connection, address[0], self._loop.time())
                stranger.is_known = stranger.host in self._known
                if not self._has_room(stranger):
                    connection.close()
                    continue
                self._strangers[stranger.descriptor] = stranger
                self._poll.register(connection, select.EPOLLIN)
                if self._sweeping is None:
                    self._sweeping = self._loop.call_later(_SWEEP_S, self._sweep)
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:  # no descriptor is left, say: it would return at once
            _log.warning("cannot accept a connection: %s", error.strerror)
            self._poll.unregister(self._listening)
            self._again = self._loop.call_later(_RETRY_S, self._accept_again)

    def _accept_again(self) -> None:
        self._poll.register(self._listening, select.EPOLLIN)

    def _has_room(self, newcomer: _Stranger) -> bool:
        """Whether one more connection has room, after closing an old stranger if needed."""
        num_calls, num_strangers = len(self._calls), len(self._strangers)
        if num_calls + num_strangers < self._most and num_strangers < _STRANGERS_MAX:
            return True
        oldest = next(iter(self._strangers.values()), None)
        if oldest is None:
            why = f"more than {self._most} connections: one is closed"
            self._full.warn(why, self._loop.time())
            return False
        unknown = (each for each in self._strangers.values() if not each.is_known)
        victim = next(unknown, oldest if newcomer.is_known else None)
        if victim is None:
            return False
        self._close(victim)
        return True

    def _sweep(self) -> None:
        """Close strangers past their deadline."""
        now_s = self._loop.time()
        patience_s = min(HANDSHAKE_S, 2 * self._patience.connect_s)
        for stranger in list(self._strangers.values()):
            limit_s = _LINGER_S if stranger.is_refused else patience_s
            if now_s - stranger.since_s >= limit_s:
                self._close(stranger)
        self._sweeping = None
        if self._strangers:
            self._sweeping = self._loop.call_later(_SWEEP_S, self._sweep)

    def _close(self, stranger: _Stranger) -> None:
        del self._strangers[stranger.descriptor]
        stranger.socket.close()

    def _go_on(self, stranger: _Stranger, events: int) -> None:
        """Read from a stranger; let it in, refuse it, close it, or wait for more."""
        if stranger.is_refused:
            self._close(stranger)  # it has read the reason, and closed its end
            return
        try:
            header = stranger.go_on(self._security)
        except (OSError, RemoteProtocolError) as error:
            _log.debug("a connection from %s ended: %s", stranger.host, text_of(error))
            self._close(stranger)
            return
        except IsthmusError as error:  # our own certificate cannot be used
            why = f"a connection from {stranger.host} cannot be served: {error}"
            self._unready.warn(why, self._loop.time())
            self._close(stranger)
            return
        except Exception:
            self._close(stranger)
            raise
        if header is not None:
            self._decide(stranger, header)
        elif bool(events & select.EPOLLOUT) != stranger.wants_to_write:
            wanted = select.EPOLLOUT if stranger.wants_to_write else select.EPOLLIN
            self._poll.modify(stranger.socket, wanted)

    def _decide(self, stranger: _Stranger, header: Headers) -> None:
        """Let a call in, or refuse it."""
        assert stranger.http2 is not None, "a header was read"
        call = FrameCall(stranger.socket, is_client=False, begun=(stranger.http2, header))
        method = dict(header.fields).get(":path", "")
        serve = self._methods.get(method)
        try:
            if serve is None:
                why = f"no such method here: {method[:80]!r}"
                self._refuse(stranger, Status.UNIMPLEMENTED, why)
                return
            self._security.admit(method, call)
        except IsthmusError as error:
            name = method.rpartition("/")[2][:80]
            why = f"{name!r} was refused to {call.peer()}: {error}"
            self._refused.warn(why, self._loop.time())
            status = status_of(error)
            self._refuse(stranger, status, str(error))
            return
        del self._strangers[stranger.descriptor]
        self._poll.unregister(stranger.socket)
        self._known.pop(stranger.host, None)
        self._known[stranger.host] = None
        if len(self._known) > _KNOWN_MAX:
            del self._known[next(iter(self._known))]
        self._patience.set_up(call.socket)
        task = self._loop.create_task(self._serve(call, method, serve), name="frame-call")
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        # `_serve` cannot: a task that is cancelled before its first step never gets to its end.
        task.add_done_callback(lambda _: call.cancel())

    def _refuse(self, stranger: _Stranger, status: Status, why: str) -> None:
        """Send the reason of a refusal; close when the other end does, or at the deadline."""
        assert stranger.http2 is not None, "a header was read"
        try:
            stranger.say(last_words(stranger.http2, status, why, is_answered=False))
            # TLS's own shutdown would also end reading.
            socket.socket.shutdown(stranger.socket, socket.SHUT_WR)
        except OSError:
            self._close(stranger)
            return
        # If a connection is closed with unread bytes, TCP resets it, and the peer may never read
        # the reason. So let the peer close it; what it sends costs nothing here.
        stranger.is_refused, stranger.since_s = True, self._loop.time()
        self._poll.modify(stranger.socket, select.EPOLLRDHUP)

    # ---------------------------------------------------------------- calls

    async def _serve(self, call: FrameCall, method: str, serve: Serve) -> None:
        call.answer()
        call.keep_alive(self._patience, self._security)
        await serve_call(call, method, serve)


class _Stranger:
    """A connection whose call has not been let in yet."""

    def __init__(self, connection: socket.socket, host: str, now_s: float) -> None:
        self.socket = connection
        self.descriptor = connection.fileno()
        """File descriptor; keeps its value when the connection is closed."""
        self.host = host
        self.since_s = now_s
        """When the stranger connected, or was refused."""
        self.is_known = False
        self.is_refused = False
        self.wants_to_write = False
        """TLS waits for room to write, not for data."""
        self.http2: Http2 | None = None
        """None until the first bytes, or the TLS handshake, are complete."""
        self._num_steps = 0

    def go_on(self, security: Security) -> Headers | None:
        """Read; return the header of the stranger's call once it is complete, else None.

        Raises:
            CertificateError: this side's own files cannot be used.
            OSError: the connection has ended, or TLS refuses it.
            RemoteProtocolError: the bytes are not those of a valid client.
        """
        self._num_steps += 1
        if self._num_steps > _READS_MAX:
            raise RemoteProtocolError("it says little, often")
        if self.http2 is None:
            if not self._is_shaken(security):
                return None
            self.http2 = Http2(is_client=False, message_bytes_max=EXCHANGE_CHANNEL_BYTES)
            self.say([self.http2.opening()])
        for _ in range(_READS_A_STEP):
            try:
                count = self.socket.recv_into(self.http2.room())
            except (BlockingIOError, InterruptedError, ssl.SSLWantReadError):
                return None
            if not count:
                raise ConnectionAbortedError("it was closed")
            header = next(self.http2.filled(count), None)
            self.say(self.http2.take_control())
            if header is not None:
                assert isinstance(header, Headers), "a call begins with it"
                return header
        return None

    def say(self, pieces: list[bytes]) -> None:
        """Send a few bytes. A stranger that has gone is no error: its data may be unread.

        Raises:
            OSError: the stranger reads nothing.
        """
        said = b"".join(pieces)
        with contextlib.suppress(ConnectionError):
            if said and self.socket.send(said) < len(said):
                raise BlockingIOError("it reads no answers")

    def _is_shaken(self, security: Security) -> bool:
        """Go on with the TLS handshake, if there is TLS; return whether it is done.

        Raises:
            CertificateError: this side's own files cannot be used.
            OSError: the handshake failed.
        """
        if not isinstance(self.socket, ssl.SSLSocket):
            try:
                context = security.server_tls()
            except OSError as error:
                raise CertificateError(f"the own certificate: {text_of(error)}") from error
            if context is None:
                return True
            self.socket = tls_socket(context, self.socket)
        self.wants_to_write = False
        try:
            self.socket.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLWantWriteError:
            self.wants_to_write = True
            return False
        return True


class _Warner:
    """Rate-limits warnings, and counts those it drops, so that strangers cannot fill the disk."""

    def __init__(self) -> None:
        self._again_s = float("-inf")
        self._num_unsaid = 0

    def warn(self, why: str, now_s: float) -> None:
        if now_s < self._again_s:
            self._num_unsaid += 1
            _log.debug("%s", why)
            return
        more = f" ({self._num_unsaid} more since the last such line)" if self._num_unsaid else ""
        _log.warning("%s%s", why, more)
        self._again_s, self._num_unsaid = now_s + _WARN_EVERY_S, 0
