"""gRPC calls between gateways, each on its own connection, dialled or accepted.

`http2.py` has the protocol, without I/O. This module has the sockets. Every call runs on the
process's event loop, reads straight into its message's memory, and writes without a copy. As the
sockets are our own, TCP can be configured and measured (`congestion/kernel.py`).

A gateway listens for them with `frame_listener.py`; `calls.py` has what is made of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import sys
import traceback
import urllib.parse
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final

import grpc

from isthmus.protos.errors import RemoteProtocolError
from isthmus.protos.failure import text_of
from isthmus.protos.limits import EXCHANGE_CHANNEL_BYTES
from isthmus.protos.mutual_tls import CertificateError
from isthmus.protos.private_files import UnsafeFileError
from isthmus.protos.security import Security
from isthmus.sites.gateway.links.congestion.kernel import traffic_of, unacknowledged_bytes
from isthmus.sites.gateway.links.http2 import (
    CANCEL,
    NO_ERROR,
    PREFIX_BYTES,
    REFUSED_STREAM,
    Ended,
    Fields,
    Headers,
    Http2,
    Message,
)
from isthmus.sites.gateway.links.progress import Progress, Traffic
from isthmus.sites.gateway.links.read_ahead import ReadAhead

_READS_MAX: Final = 4
"""Reads of one connection before others have their turn."""
_TLS_READS_MAX: Final = 16
"""The same with TLS, which gives one record at a time."""
_WAKE_BYTES: Final = 64 << 10
"""The kernel wakes the loop when this much of a message, or all of it, has arrived. It must fit a
new connection's receive buffer: Linux begins with 128 KiB, half of it for bookkeeping."""
_WAKE_MIN_BYTES: Final = 16 << 10
_WAKE_BYTES_MAX: Final = 1 << 20
_WAKE_SHARE: Final = 16
"""The kernel's receive buffer grows with what has come. So the loop is woken by up to this part of
it, and at most _WAKE_BYTES_MAX: a frame of 1 MiB wakes it once or twice then, and not 16 times."""
_PIECE_BYTES: Final = 16 << 10
"""Under a window, at least this much is written at a time, or all that is left."""
_TLS_BYTES: Final = 32 << 10
"""Upper limit on received bytes of a message that TLS has not deciphered yet."""
_MESSAGES_MAX: Final = 4
"""A connection with this many unread messages is read no further."""
_ANY_NUMBER: Final = sys.maxsize
_AHEAD_BYTES_MAX: Final = 64 << 20
"""Limit on bytes read ahead from a peer that makes no room for ours: its window update lies behind
the messages that it sent before."""
_READ_AHEAD: Final = ReadAhead()
"""Room for unread messages, shared by all calls; they run on one thread (`wire_loop.py`)."""
_MESSAGE_COST_BYTES: Final = 512
"""Memory of a message beside its bytes, a high estimate."""
_NO_ROOM: Final = "it sends, and makes no room for answers"
_CONTROL_MAX: Final = 1024
"""Control answers that may wait to be sent; a peer that causes more is cut off."""
_LINGER_S: Final = 2.0
"""Time for the peer to read the end of a call before its connection is closed."""
_DROPPED_BYTES: Final = 64 << 10
_WHY_BYTES_MAX: Final = 2000
"""Longest error text in a header; peers accept no longer ones."""
_ADDRESSES_MAX: Final = 4
_LOOKS: Final = 4
"""Checks for a silent peer in each `Patience.idle_s`."""
_STATUSES: Final = {str(each.value[0]): each for each in grpc.StatusCode}
_RESETS: Final = {
    CANCEL: grpc.StatusCode.CANCELLED,
    REFUSED_STREAM: grpc.StatusCode.UNAVAILABLE,
}
"""gRPC statuses of HTTP/2's error codes; all others: INTERNAL."""
_CONTENT_TYPE: Final = "application/grpc"
_USER_AGENT: Final = "isthmus"
_PSEUDO: Final = ":"


class CallError(grpc.RpcError):
    """A call was refused, or its connection broke."""

    def __init__(self, status: grpc.StatusCode, why: str) -> None:
        super().__init__(why)
        self._status, self._why = status, why

    def code(self) -> grpc.StatusCode:
        """Return gRPC's status."""
        return self._status

    def details(self) -> str:
        """Return the reason of the failure in one line."""
        return self._why


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a connection waits for a silent peer."""

    connect_s: float
    """Time to connect, TLS included."""
    idle_s: float
    """Silence after which the peer is pinged."""
    lost_s: float
    """Silence after which the connection is broken."""

    def set_up(self, connection: socket.socket) -> None:
        """Have the kernel break a connection whose peer is gone."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        idle_s = max(1, round(self.idle_s))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, idle_s)
        lost_ms = max(1, int(1000 * self.lost_s))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, lost_ms)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class FrameCall:
    """One call with streams of messages both ways. Use it on the event loop's thread only.

    Messages keep their order. One task may `read`, and one may `write`.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        is_client: bool,
        begun: tuple[Http2, Headers] | None = None,
    ) -> None:
        """Take ownership of a non-blocking connection after its TLS handshake.

        On the server, `begun` is the state after the header of the client's call; continue with
        `answer`. A client passes none; continue with `begin`.
        """
        self.socket = connection
        self._http2 = Http2(is_client=is_client, message_bytes_max=EXCHANGE_CHANNEL_BYTES)
        self._is_client = is_client
        self._is_tls = isinstance(connection, ssl.SSLSocket)
        self._reads_max = _TLS_READS_MAX if self._is_tls else _READS_MAX
        self._loop = asyncio.get_running_loop()
        self._peer = _name_of(connection)
        self._certificate = _certificate_of(connection)
        self._uris = _uris_of(connection)
        self.fields: Fields = ()
        """The fields of the peer's header."""
        self._messages: deque[memoryview] = deque()
        self._messages_max = _MESSAGES_MAX
        self._read_ahead = _READ_AHEAD
        self._ahead_bytes = 0
        """Bytes of the unread messages."""
        self._held_bytes = 0
        """Bytes that this call has taken of `_READ_AHEAD`."""
        self._awaited_bytes = 0
        """Bytes that this call waits for in `_READ_AHEAD`; 0: none."""
        self._reader: asyncio.Future[None] | None = None
        self._is_reading = False
        self._deciphered: asyncio.Handle | None = None
        self._wake_bytes = 1
        self._read_bytes = 0
        """Bytes of messages read so far, about."""
        self._out: deque[memoryview] = deque()
        self._writer: asyncio.Future[None] | None = None
        self._is_writing = False
        self._window_bytes = _ANY_NUMBER
        """Limit on bytes that the peer's TCP has not acknowledged."""
        self._look_s = 0.0
        """Interval at which it is looked whether the window has room."""
        self._next_look: asyncio.TimerHandle | None = None
        self._is_ending = False
        """The server has sent its trailers."""
        self._error: tuple[grpc.StatusCode, str] | None = None
        """Why the call broke or was refused. A stored exception would, once raised, keep this call
        and all that it has read in memory."""
        self.over = asyncio.Event()
        """Set once no more messages will come."""
        self._is_closed = False
        self._closed = asyncio.Event()
        self._patience: Patience
        self._security: Security
        self._progress: Progress
        self._looking: asyncio.TimerHandle | None = None
        self._is_asked = False
        """The peer was pinged, and nothing has come since."""
        if begun is not None:
            self._http2, header = begun
            self._take(header)

    def begin(self, fields: Iterable[tuple[str, str]] = ()) -> None:
        """Send the start of the connection, and begin to read."""
        self._push([self._http2.opening(fields)])
        self._read_on()

    async def wait_header(self) -> None:
        """Wait for the peer's header.

        Raises:
            CallError: the connection broke.
        """
        while not self.fields and not self.over.is_set():
            await self._wait_to_read()
        if not self.fields:
            raise CallError(*(self._error or (grpc.StatusCode.UNAVAILABLE, "no call was made")))

    async def read(self) -> memoryview | None:
        """Return the next message; None at the end.

        Raises:
            CallError: the call was refused, or broke.
        """
        while not self._messages:
            if self._error is not None:
                raise CallError(*self._error)
            if self.over.is_set():
                return None
            await self._wait_to_read()
        message = self._messages.popleft()
        self._ahead_bytes -= len(message) + _MESSAGE_COST_BYTES
        self._hold()
        self._read_on()
        return message

    async def write(self, message: bytes | memoryview) -> None:
        """Write a message; return when TCP has taken all of it.

        Raises:
            CallError: the call is over.
        """
        left = memoryview(message)
        assert left.itemsize == 1, "bytes"
        prefix_bytes = PREFIX_BYTES
        while True:
            self._check()
            room = self._http2.sendable_bytes - prefix_bytes
            if room <= 0:
                await self._wait_for_room()
                continue
            piece = left[:room]
            head = self._http2.data_head(len(piece), len(left) if prefix_bytes else None)
            self._push([head, piece])
            left, prefix_bytes = left[room:], 0
            while self._out:
                await self._wait_to_write()
                self._check()
            if not left:
                break
        self._check()

    def finish(self) -> None:
        """Say, as the client, that no more messages will come; the answers can still be read."""
        self._push([self._http2.finish()])

    def cancel(self) -> None:
        """End the call and its connection at once, and free unread messages."""
        if not self._is_closed and not self._is_ending and not self._out:
            farewell = b"" if self._is_client else self._http2.farewell()
            self._push([farewell, self._http2.reset(CANCEL)])
        self._close()
        self._drop_messages()

    def break_off(self, why: str) -> None:
        """End the connection at once, because the peer breaks the rules."""
        self._break_off(grpc.StatusCode.UNAVAILABLE, why)

    def keep_alive(self, patience: Patience, security: Security) -> None:
        """From now on ping the peer when it is silent; break off if it does not answer.

        The kernel's keepalive is not enough: a proxy may answer it. A peer whose certificate is
        revoked is broken off, too.
        """
        self._patience, self._security = patience, security
        self._progress = Progress(self._loop.time(), patience.lost_s)
        self._looking = self._loop.call_later(patience.idle_s / _LOOKS, self._look)

    def _look(self) -> None:
        patience, interval_s = self._patience, self._patience.idle_s / _LOOKS
        self._looking = self._loop.call_later(interval_s, self._look)
        if why := self._security.why_revoked(self):
            self.break_off(why)
            return
        now_s = self._loop.time()
        try:
            traffic = self.traffic()
        except OSError:
            return  # the reader or writer gets the error
        silent_s = self._progress.look(now_s, interval_s, traffic, traffic.received_bytes)
        if not self._is_reading:
            self._progress.begin_anew(now_s)  # its answers would not be read
        elif silent_s >= patience.lost_s and self._is_asked:
            self.break_off(f"the other end has been silent for {silent_s:.1f} s")
        elif silent_s < patience.idle_s:
            self._is_asked = False
        elif not self._is_asked:
            self._is_asked = True
            self._push([self._http2.ping()])

    def traffic(self) -> Traffic:
        """Return the bytes acknowledged and left on the connection.

        Raises:
            OSError: the connection has ended.
        """
        return traffic_of(self.socket, sum(map(len, self._out)))

    def answer(self) -> None:
        """Accept the call as its server, and begin to take its messages."""
        fields = ((":status", "200"), ("content-type", _CONTENT_TYPE))
        # GOAWAY this early makes gRPC's library open another connection for its next call.
        self._push([self._http2.farewell(), self._http2.header(fields, is_last=False)])
        self._messages_max = _MESSAGES_MAX
        try:
            for event in self._http2.let_in():
                self._take(event)
            self._hold()
        except RemoteProtocolError as error:
            self._break_off(grpc.StatusCode.INTERNAL, str(error))
            return
        self._go_on()

    async def end(self, status: grpc.StatusCode, why: str) -> None:
        """Send the end of a call that was answered, and give the peer time to read it."""
        if self._is_closed:
            return
        self._is_ending = True
        self._error = self._error or (grpc.StatusCode.CANCELLED, "it has ended")
        self.over.set()
        self._push(last_words(self._http2, status, why, is_answered=True))
        self._wake_reader()
        # Read and drop what the peer has sent meanwhile. If a connection is closed with unread
        # bytes, TCP resets it, and the peer never reads the trailers.
        self._drop_messages()
        self._messages_max = _ANY_NUMBER
        self._wake_for(1)
        self._read_on()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                await self._closed.wait()

    # ---------------------------------------------------------------- as gRPC's contexts have it

    def invocation_metadata(self) -> Fields:
        """Return the metadata of the call."""
        return tuple(each for each in self.fields if not each[0].startswith(_PSEUDO))

    def auth_context(self) -> Mapping[str, Collection[bytes]]:
        """Return the other end's certificate, and the identities in it."""
        if not self._certificate:
            return {}
        shown = ssl.DER_cert_to_PEM_cert(self._certificate).encode()
        return {"peer_uri": self._uris, "x509_pem_cert": (shown,)}

    def peer(self) -> str:
        """Return the address of the other end."""
        return self._peer

    # ---------------------------------------------------------------- reading

    def _read_on(self) -> None:
        """Watch for data to read, unless too many messages wait already."""
        wants = (
            not self._is_closed
            and not self._awaited_bytes
            and len(self._messages) < self._messages_max
        )
        if wants == self._is_reading:
            return
        self._is_reading = wants
        if wants:
            self._loop.add_reader(self.socket.fileno(), self._readable)
            self._read_deciphered()
        else:
            self._loop.remove_reader(self.socket.fileno())

    def _read_deciphered(self) -> None:
        """Read the data that TLS has buffered: the kernel gives no event for it."""
        if not isinstance(self.socket, ssl.SSLSocket) or self._deciphered is not None:
            return
        if self.socket.pending():
            self._deciphered = self._loop.call_soon(self._readable_deciphered)

    def _readable_deciphered(self) -> None:
        self._deciphered = None
        self._readable()

    def _readable(self) -> None:
        if not self._is_reading:
            return
        if self._is_ending:
            self._drop_read()
            return
        try:
            for _ in range(self._reads_max):
                room = self._http2.room()
                count = self.socket.recv_into(room)
                if not count:
                    self._break_off(grpc.StatusCode.UNAVAILABLE, "it was closed")
                    return
                self._read_bytes += count
                num_messages = len(self._messages)
                for event in self._http2.filled(count):
                    self._take(event)
                self._hold()
                if self._awaited_bytes or self._is_closed:
                    break
                if len(self._messages) == num_messages and not self._http2.under_way_bytes:
                    break  # maybe thousands of tiny frames: others have their turn
                if count < len(room) and not self._is_tls:
                    break  # the socket is empty
                if len(self._messages) >= self._messages_max:
                    break
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except OSError as error:
            self._break_off(grpc.StatusCode.UNAVAILABLE, error.strerror or text_of(error))
            return
        except RemoteProtocolError as error:
            self._break_off(grpc.StatusCode.INTERNAL, str(error))
            return
        self._go_on()

    def _go_on(self) -> None:
        """Act on the bytes that were read."""
        control = self._http2.take_control()
        if control or self._out:
            self._push(control)
        elif self._writer is not None:
            self._flush()  # the peer may have made room
        self._wake_for(self._http2.wanted_bytes)
        self._read_on()
        if self._is_reading:
            self._read_deciphered()

    def _hold(self) -> None:
        """Take room in `_READ_AHEAD` for the unread messages and the one under way.

        Without room, the call is read no further until there is some. A peer that sends much and
        makes no room for answers is cut off: its window update would never be read.
        """
        if self._is_ending or self._is_closed:
            return
        wanted_bytes = self._ahead_bytes + self._http2.under_way_bytes - self._awaited_bytes
        more_bytes = wanted_bytes - self._held_bytes
        is_blocked = self._messages_max == _ANY_NUMBER
        if more_bytes <= 0:
            self._held_bytes = wanted_bytes
            self._read_ahead.give_back(-more_bytes)
        elif self._awaited_bytes:
            pass
        elif is_blocked and self._ahead_bytes > _AHEAD_BYTES_MAX:
            self._break_off(grpc.StatusCode.RESOURCE_EXHAUSTED, _NO_ROOM)
        elif not self._http2.under_way_bytes:
            self._held_bytes = wanted_bytes
            self._read_ahead.count(more_bytes)
        elif self._read_ahead.take(more_bytes):
            self._held_bytes = wanted_bytes
        elif is_blocked:
            self._break_off(grpc.StatusCode.RESOURCE_EXHAUSTED, _NO_ROOM)
        else:
            self._awaited_bytes = more_bytes
            self._read_ahead.wait(more_bytes, self._held)

    def _held(self) -> None:
        """Go on reading: the awaited room was granted."""
        self._held_bytes += self._awaited_bytes
        self._awaited_bytes = 0
        self._hold()
        self._read_on()

    def _drop_messages(self) -> None:
        """Free messages that nobody will take."""
        self._messages.clear()
        self._read_ahead.give_up(self._held)
        self._ahead_bytes = self._awaited_bytes = 0
        held_bytes, self._held_bytes = self._held_bytes, 0
        self._read_ahead.give_back(held_bytes)

    def _drop_read(self) -> None:
        """Read and drop data until the peer closes the connection."""
        try:
            for _ in range(self._reads_max):
                if not self.socket.recv(_DROPPED_BYTES):
                    self._close()
                    return
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except OSError:
            self._close()

    def _take(self, event: Headers | Message | Ended) -> None:
        match event:
            case Message(data):
                self._messages.append(data)
                self._ahead_bytes += len(data) + _MESSAGE_COST_BYTES
            case Headers(fields, is_last):
                if not self.fields:
                    self.fields = fields
                    if not self._is_client:
                        self._messages_max = 0  # until it is answered
                headers = dict(fields)
                if not self._is_client:
                    if is_last:
                        self.over.set()
                elif is_last or headers.get(":status") != "200":
                    self._refused(headers)
            case Ended(error):
                if error != NO_ERROR or self._is_client:  # a server's call ends by trailers
                    status = _RESETS.get(error, grpc.StatusCode.INTERNAL)
                    why = f"it was ended without a status (HTTP/2 error {error})"
                    self._error = self._error or (status, why)
                self.over.set()
                self._wake_writer()
        self._wake_reader()

    def _refused(self, trailers: Mapping[str, str]) -> None:
        """Take the server's trailers."""
        self.over.set()
        self._wake_writer()
        status = _STATUSES.get(trailers.get("grpc-status", ""))
        if status is grpc.StatusCode.OK:
            return
        why = urllib.parse.unquote(trailers.get("grpc-message", ""))
        if status is None:
            status = grpc.StatusCode.UNKNOWN
            why = why or f"HTTP status {trailers.get(':status', 'unknown')[:20]}"
        self._error = self._error or (status, why)

    def _wake_for(self, wanted_bytes: int) -> None:
        """Set the socket's low-water mark: wake the loop at that many bytes, not at each packet."""
        if self._is_tls:
            wanted_bytes -= _TLS_BYTES
        most = max(_WAKE_BYTES, min(_WAKE_BYTES_MAX, self._read_bytes // _WAKE_SHARE))
        wake = min(wanted_bytes, most) if wanted_bytes >= _WAKE_MIN_BYTES else 1
        if wake != self._wake_bytes and not self._is_closed:
            with contextlib.suppress(OSError):
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wake)
                self._wake_bytes = wake

    async def _wait_to_read(self) -> None:
        assert self._reader is None, "one task reads"
        self._reader = self._loop.create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    # ---------------------------------------------------------------- writing

    def _check(self) -> None:
        if self._error is not None or (self.over.is_set() and (self._is_client or self._is_closed)):
            raise CallError(*(self._error or (grpc.StatusCode.CANCELLED, "it has ended")))

    def _push(self, pieces: Iterable[bytes | memoryview]) -> None:
        self._out.extend(memoryview(piece) for piece in pieces if len(piece))
        if len(self._out) > _CONTROL_MAX:
            self._break_off(grpc.StatusCode.RESOURCE_EXHAUSTED, "it reads no answers")
        self._flush()

    def limit(self, window_bytes: int, look_s: float) -> None:
        """Have at most `window_bytes` on the way that TCP has not acknowledged.

        The kernel wakes nobody when bytes are acknowledged. So while the window is full, it is
        looked at every `look_s`. May be called from any thread.
        """
        self._window_bytes, self._look_s = window_bytes, look_s

    def _room(self) -> int:
        """Return how many bytes may be written now."""
        window_bytes = self._window_bytes
        if window_bytes == _ANY_NUMBER:
            return window_bytes
        room = window_bytes - unacknowledged_bytes(self.socket)
        # TLS wants a write repeated with no less, and its records have up to 16 KiB.
        return max(room, _PIECE_BYTES) if room >= min(_PIECE_BYTES, window_bytes // 2) else 0

    def _look_for_room(self) -> None:
        self._next_look = None
        self._flush()

    def _flush(self) -> None:
        """Write as much as TCP and the window take now; go on when they take more."""
        if self._next_look is not None:
            return
        is_full = False
        try:
            room = self._room() if self._out and not self._is_closed else 0
            while self._out and not self._is_closed:
                if room <= 0:
                    is_full = True
                    break
                num_bytes = self._send(room)
                room -= num_bytes
                self._drop(num_bytes)
        except (BlockingIOError, InterruptedError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            pass
        except OSError as error:
            self._break_off(grpc.StatusCode.UNAVAILABLE, error.strerror or text_of(error))
            return
        if is_full and not self._is_closed:
            self._next_look = self._loop.call_later(self._look_s, self._look_for_room)
        wants = bool(self._out) and not self._is_closed and not is_full
        if wants != self._is_writing and not self._is_closed:
            self._is_writing = wants
            if wants:
                self._loop.add_writer(self.socket.fileno(), self._flush)
            else:
                self._loop.remove_writer(self.socket.fileno())
        if not self._out:
            if self._is_ending:
                self._say_end()
            self._wake_writer()

    def _say_end(self) -> None:
        """Shut down the writing half of the connection."""
        with contextlib.suppress(OSError):
            # TLS's own shutdown would also end reading.
            socket.socket.shutdown(self.socket, socket.SHUT_WR)

    def _send(self, room: int) -> int:
        first = self._out[0][:room]
        if self._is_tls or len(self._out) == 1 or len(first) == room:
            return self.socket.send(first)
        return self.socket.sendmsg((first, self._out[1][: room - len(first)]))

    def _drop(self, num_bytes: int) -> None:
        while num_bytes:
            first = self._out[0]
            if num_bytes < len(first):
                self._out[0] = first[num_bytes:]
                return
            num_bytes -= len(first)
            self._out.popleft()

    async def _wait_for_room(self) -> None:
        """Wait until the peer may have made room for data, and read on for it."""
        self._messages_max = _ANY_NUMBER
        try:
            self._read_on()
            await self._wait_to_write()
        finally:
            self._messages_max = _MESSAGES_MAX
            self._read_on()

    async def _wait_to_write(self) -> None:
        assert self._writer is None, "one task writes"
        self._writer = self._loop.create_future()
        try:
            await self._writer
        finally:
            self._writer = None

    def _wake_writer(self) -> None:
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)

    # ---------------------------------------------------------------- the end

    def _break_off(self, status: grpc.StatusCode, why: str) -> None:
        if not self.over.is_set():
            self._error = self._error or (status, why)
        self._close()

    def _close(self) -> None:
        if self._is_closed:
            return
        if self._is_reading:
            self._loop.remove_reader(self.socket.fileno())
        if self._is_writing:
            self._loop.remove_writer(self.socket.fileno())
        self._is_reading = self._is_writing = False
        if self._looking is not None:
            self._looking.cancel()
        if self._next_look is not None:
            self._next_look.cancel()
        self._is_closed = True
        self.over.set()
        self._out.clear()
        self._http2.forget()
        self._read_ahead.give_up(self._held)
        self._awaited_bytes = 0
        self.socket.close()
        self._closed.set()
        self._wake_reader()
        self._wake_writer()


@contextmanager
def own_files_may_mend() -> Iterator[None]:
    """Turn an error of this side's own files into one that a retry may mend.

    They may be being replaced, or have expired and be renewed: an outage like any other.

    Raises:
        CallError: they cannot be used now.
    """
    try:
        yield
    except (CertificateError, UnsafeFileError) as error:
        raise CallError(grpc.StatusCode.UNAVAILABLE, f"cannot connect: {error}") from error


@asynccontextmanager
async def dial(
    address: tuple[str, int],
    method: str,
    metadata: Iterable[tuple[str, str]],
    security: Security,
    to: str,
    patience: Patience,
) -> AsyncIterator[FrameCall]:
    """Make a call over a fresh connection to the peer `to`; cancel it at the end.

    Args:
        address: host and port.
        method: `/package.service/name`.
        metadata: the call's metadata.
        security: certificates of this side.
        to: identity of the peer, as in `Identity.file_name`.
        patience: time limits for the peer.

    Raises:
        CallError: nothing answers there, or one of both certificates is not valid.
    """
    try:
        with own_files_may_mend():
            async with asyncio.timeout(patience.connect_s):
                connection = await _connected(address, security, to, patience)
    except TimeoutError:
        why = f"no connection within {patience.connect_s:.1f} s"
        raise CallError(grpc.StatusCode.UNAVAILABLE, why) from None
    except OSError as error:  # TLS errors included
        why = error.strerror or text_of(error)
        raise CallError(grpc.StatusCode.UNAVAILABLE, f"cannot connect: {why}") from error
    call = FrameCall(connection, is_client=True)
    try:
        if why := security.why_revoked(call):
            raise CallError(grpc.StatusCode.UNAVAILABLE, why)
        call.begin(
            (
                (":method", "POST"),
                (":scheme", "https" if isinstance(connection, ssl.SSLSocket) else "http"),
                (":path", method),
                (":authority", to),
                ("te", "trailers"),
                ("content-type", _CONTENT_TYPE),
                ("user-agent", _USER_AGENT),
                *security.shown(),
                *metadata,
            )
        )
        call.keep_alive(patience, security)
        yield call
    finally:
        call.cancel()


async def _connected(
    address: tuple[str, int],
    security: Security,
    to: str,
    patience: Patience,
) -> socket.socket:
    loop = asyncio.get_running_loop()
    tls = security.client_tls(to)
    failed: OSError = OSError(f"{address[0]!r} has no address")
    for family, kind, protocol, _, where in (
        await loop.getaddrinfo(*address, type=socket.SOCK_STREAM)
    )[:_ADDRESSES_MAX]:
        connection = socket.socket(family, kind, protocol)
        try:
            connection.setblocking(False)
            patience.set_up(connection)
            await loop.sock_connect(connection, where)
            if tls is None:
                return connection
            context, name = tls
            return await _shaken(tls_socket(context, connection, name))
        except OSError as error:
            connection.close()
            failed = error
        except BaseException:
            connection.close()
            raise
    raise failed


def tls_socket(
    context: ssl.SSLContext, connection: socket.socket, server_name: str | None = None
) -> ssl.SSLSocket:
    """Wrap a non-blocking connection in TLS; the handshake is still to be done.

    Args:
        context: TLS context of this side.
        connection: detached; use the returned socket in its place.
        server_name: the name that a client expects; None on a server.

    Raises:
        OSError: the connection has ended, and is closed.
    """
    try:
        return context.wrap_socket(
            connection,
            server_side=server_name is None,
            server_hostname=server_name,
            do_handshake_on_connect=False,
        )
    except OSError as error:
        # If the peer has reset the connection, CPython has moved the descriptor to a new socket,
        # and drops that one unclosed: only its frame still holds it.
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if isinstance(half_made := frame.f_locals.get("self"), ssl.SSLSocket):
                half_made.close()
        connection.close()
        raise


async def _shaken(connection: ssl.SSLSocket) -> ssl.SSLSocket:
    """Do the TLS handshake of a non-blocking connection.

    Raises:
        OSError: the handshake failed, and the connection is closed.
    """
    loop = asyncio.get_running_loop()
    try:
        while True:
            ready: asyncio.Future[None] = loop.create_future()
            try:
                connection.do_handshake()
            except ssl.SSLWantReadError:
                loop.add_reader(connection.fileno(), _done, ready)
                try:
                    await ready
                finally:
                    loop.remove_reader(connection.fileno())
            except ssl.SSLWantWriteError:
                loop.add_writer(connection.fileno(), _done, ready)
                try:
                    await ready
                finally:
                    loop.remove_writer(connection.fileno())
            else:
                return connection
    except BaseException:
        connection.close()
        raise


def _done(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def last_words(
    http2: Http2, status: grpc.StatusCode, why: str, *, is_answered: bool
) -> list[bytes]:
    """Return the bytes of the trailers that end or refuse a client's call."""
    fields = [] if is_answered else [(":status", "200"), ("content-type", _CONTENT_TYPE)]
    fields.append(("grpc-status", str(status.value[0])))
    if why:
        fields.append(("grpc-message", _escaped(why)))
    return [
        b"" if is_answered else http2.farewell(),
        http2.header(fields, is_last=True),
        http2.reset(NO_ERROR),
    ]


def _escaped(why: str) -> str:
    """Return a reason, percent-encoded as gRPC's headers want it."""
    cut = why.encode(errors="replace")[:_WHY_BYTES_MAX].decode(errors="ignore")
    return urllib.parse.quote(cut, safe=" !#$&'()*+,/:;=?@[]^_`{|}~")


def _certificate_of(connection: socket.socket) -> bytes:
    """Return the peer's certificate (DER); empty without TLS."""
    if not isinstance(connection, ssl.SSLSocket):
        return b""
    return connection.getpeercert(binary_form=True) or b""


def _uris_of(connection: socket.socket) -> list[bytes]:
    """Return the URIs in the peer's certificate; none without TLS."""
    if not isinstance(connection, ssl.SSLSocket):
        return []
    names = (connection.getpeercert() or {}).get("subjectAltName", ())
    return [str(each[1]).encode() for each in names if each[0] == "URI"]


def _name_of(connection: socket.socket) -> str:
    with contextlib.suppress(OSError):
        host, port = connection.getpeername()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return "nobody"
