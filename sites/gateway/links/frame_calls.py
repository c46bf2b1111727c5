"""gRPC calls between gateways, each on its own connection, dialled or accepted.

`http2.py` has the protocol, without I/O. This module has the sockets. Every call runs on the
process's event loop, reads straight into its message's memory, and writes without a copy. As the
sockets are our own, TCP can be configured and measured (`congestion/kernel.py`).

A gateway listens for them with `frame_listener.py`; `calls.py` has what is made of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
import sys
import traceback
import urllib.parse
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
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
from isthmus.sites.gateway.links.congestion.kernel import traffic_of
from isthmus.sites.gateway.links.http2 import (
    CANCEL,
    NO_ERROR,
    PREFIX_BYTES,
    REFUSED_STREAM,
    Begun,
    Ended,
    Fields,
    Headers,
    Http2,
    Message,
)
from isthmus.sites.gateway.links.progress import Progress, Traffic
from isthmus.sites.gateway.links.read_ahead import ReadAhead
from isthmus.sites.gateway.wire import tls
from isthmus.sites.gateway.wire.connection import Line, Writer

_READS_MAX: Final = 4
"""Reads of one connection before others have their turn."""
_TLS_READS_MAX: Final = 16
"""The same with TLS, which gives one record at a time."""
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
_FRAMES_MAX: Final = 16
"""Frames of a message that wait in line at a time."""
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


Taker = Callable[[memoryview], bytes | None]
"""Takes a message, and returns the answer to it, if there is one."""


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
        self._session = tls.session_of(connection) if isinstance(connection, ssl.SSLSocket) else 0
        """The TLS session, if there is one whose address is known."""
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
        self._out = Writer()
        self._unframed: memoryview | None = None
        """The part of the message under way that is not in `_out` yet."""
        self._prefix_bytes = 0
        """Length of gRPC's prefix, if that is not in `_out` yet."""
        self._is_carrying = False
        """TCP has not taken all of the message under way."""
        self._is_blocked = False
        """The peer's window is full."""
        self._on_written: Callable[[], None] | None = None
        """Called when TCP has taken all of it."""
        self._taker: Taker | None = None
        """Takes messages as they come (`take_each`)."""
        self._untaken: Exception | None = None
        """Why a message was not taken."""
        self._writer: asyncio.Future[None] | None = None
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
        self._http2.reader.session = self._out.session = self._session
        self._line = Line(connection.fileno(), self._http2.reader, self._out)
        self._line.is_by_hand = self._is_tls and not self._session
        self._line.reads_max = self._reads_max

    def begin(self, fields: Iterable[tuple[str, str]] = ()) -> None:
        """Send the start of the connection, and begin to read."""
        self._line.attach(self._loop, self._turn)
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
        while self._untaken is not None or not self._messages:
            if self._untaken is not None:
                raise self._untaken
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

    async def take_each(self, take: Taker) -> None:
        """Have `take` called with each message as it comes, until the end; send what it returns.

        Raises:
            CallError: as `read`.
            Exception: whatever `take` raises; nothing more is taken then.
        """
        self._taker = take
        try:
            while (message := await self.read()) is not None:
                answer = take(message)
                del message
                if answer is not None:
                    await self.write(answer)
        finally:
            self._taker = self._untaken = None

    def post(
        self, message: bytes | memoryview, on_written: Callable[[], None] | None = None
    ) -> None:
        """Begin to write a message; `on_written` is called when TCP has taken it, maybe at once.

        Until then no other message may be written.

        Raises:
            CallError: the call is over.
        """
        self._check()
        assert not self._is_carrying, "one message after the other"
        self._unframed = memoryview(message)
        assert self._unframed.itemsize == 1, "bytes"
        self._prefix_bytes = PREFIX_BYTES
        self._is_carrying, self._on_written = True, on_written
        self._flush()

    async def write(self, message: bytes | memoryview) -> None:
        """Write a message; return when TCP has taken all of it.

        Raises:
            CallError: the call is over.
        """
        while self._is_carrying:  # a writer was cancelled, and its message is not
            await self._wait_to_write()
        self.post(message)
        while self._is_carrying:
            await self._wait_to_write()
            self._check()
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
        if not self._line.wants_read:
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
        return traffic_of(self.socket, self._out.left_bytes)

    def answer(self) -> None:
        """Accept the call as its server, and begin to take its messages."""
        self._line.attach(self._loop, self._turn)
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
        self._give_up_writing()
        self._error = self._error or (grpc.StatusCode.CANCELLED, "it has ended")
        self.over.set()
        self._push(last_words(self._http2, status, why, is_answered=True))
        self._wake_reader()
        # Read and drop what the peer has sent meanwhile. If a connection is closed with unread
        # bytes, TCP resets it, and the peer never reads the trailers.
        self._drop_messages()
        self._messages_max = _ANY_NUMBER
        self._line.is_by_hand = True
        self._line.unmark()
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
        if wants != self._line.wants_read:
            self._line.wants_read = wants
            self._line.tend()

    def _turn(self) -> None:
        """Act on what the engine has read, or found to be written."""
        if self._line.has_read:
            self._readable()
        if self._line.has_written:
            self._flush()

    def _readable(self) -> None:
        if self._is_ending:
            self._drop_read()
            return
        try:
            if self._is_tls and not self._session:
                self._read_tls()
            else:
                self._read_plain()
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            self._http2.reader.is_dry = True
        except OSError as error:
            self._break_off(grpc.StatusCode.UNAVAILABLE, self._text_of(error))
            return
        except RemoteProtocolError as error:
            self._break_off(grpc.StatusCode.INTERNAL, str(error))
            return
        self._go_on()

    def _read_plain(self) -> None:
        http2, descriptor = self._http2, self.socket.fileno()
        http2.begin_turn(self._reads_max)
        while (event := http2.read(descriptor)) is not None:
            if not isinstance(event, Begun):
                self._take(event)
            self._hold()
            if self._is_closed:
                return
            if self._awaited_bytes or len(self._messages) >= self._messages_max:
                http2.begin_turn(0)  # what was read with these is parsed, too

    def _read_tls(self) -> None:
        for _ in range(self._reads_max):
            room = self._http2.room()
            count = self.socket.recv_into(room)
            if not count:
                raise ConnectionAbortedError("it was closed")
            num_messages = len(self._messages)
            for event in self._http2.filled(count):
                self._take(event)
            self._hold()
            if self._awaited_bytes or self._is_closed:
                return
            if len(self._messages) == num_messages and not self._http2.under_way_bytes:
                return  # maybe thousands of tiny frames: others have their turn
            if len(self._messages) >= self._messages_max:
                return

    def _go_on(self) -> None:
        """Act on the bytes that were read."""
        control = self._http2.take_control()
        if control or self._is_blocked:
            self._push(control)
        self._line.mark()
        self._read_on()

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
            self._http2.reader.is_dry = True
        except OSError:
            self._close()

    def _take(self, event: Headers | Message | Ended) -> None:
        match event:
            case Message(data):
                self._take_message(data)
                return
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
                self._note_end()
        self._wake_reader()

    def _take_message(self, message: memoryview) -> None:
        """Give a message to whom takes them as they come, or keep it until it is read."""
        if self._taker is None or self._messages or self._is_carrying or self._untaken is not None:
            self._messages.append(message)
            self._ahead_bytes += len(message) + _MESSAGE_COST_BYTES
            self._wake_reader()
            return
        try:
            answer = self._taker(message)
            if answer is not None:
                self.post(answer)
        except Exception as error:  # noqa: BLE001 - raised by `take_each`
            self._untaken = error
            self._wake_reader()

    def _refused(self, trailers: Mapping[str, str]) -> None:
        """Take the server's trailers."""
        self.over.set()
        self._give_up_writing()
        status = _STATUSES.get(trailers.get("grpc-status", ""))
        if status is grpc.StatusCode.OK:
            return
        why = urllib.parse.unquote(trailers.get("grpc-message", ""))
        if status is None:
            status = grpc.StatusCode.UNKNOWN
            why = why or f"HTTP status {trailers.get(':status', 'unknown')[:20]}"
        self._error = self._error or (status, why)

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

    @property
    def _is_mute(self) -> bool:
        """Whether no more messages may be written."""
        ended = self.over.is_set() and (self._is_client or self._is_closed)
        return self._error is not None or ended

    def _note_end(self) -> None:
        if self._is_mute:
            self._give_up_writing()

    def _give_up_writing(self) -> None:
        """Send no more of the message under way than is framed."""
        self._unframed = self._on_written = None
        self._prefix_bytes = 0
        if self._is_carrying:
            self._is_carrying = False
            self._wake_writer()

    def _check(self) -> None:
        if self._is_mute:
            raise CallError(*(self._error or (grpc.StatusCode.CANCELLED, "it has ended")))

    def _push(self, pieces: Iterable[bytes | memoryview]) -> None:
        for piece in pieces:
            self._out.push(piece)
        if len(self._out) > _CONTROL_MAX + 2 * _FRAMES_MAX:
            self._break_off(grpc.StatusCode.RESOURCE_EXHAUSTED, "it reads no answers")
        self._flush()

    def limit(self, window_bytes: int, look_s: float) -> None:
        """Have at most `window_bytes` on the way that TCP has not acknowledged.

        The kernel wakes nobody when bytes are acknowledged. So while the window is full, it is
        looked at every `look_s`. May be called from any thread.
        """
        self._line.look_s = look_s
        self._line.window_bytes = window_bytes

    def _frame(self) -> None:
        """Queue the next frames of the message under way, as the peer's window permits."""
        while self._unframed is not None and len(self._out) < 2 * _FRAMES_MAX:
            room = self._http2.sendable_bytes - self._prefix_bytes
            if room <= 0:
                return
            piece, rest = self._unframed[:room], self._unframed[room:]
            whole_bytes = len(self._unframed) if self._prefix_bytes else None
            self._out.push(self._http2.data_head(len(piece), whole_bytes))
            self._out.push(piece)
            self._prefix_bytes = 0
            self._unframed = rest if len(rest) else None

    def _flush(self) -> None:
        """Write as much as TCP and the window take now; go on when they take more."""
        if self._is_closed:
            return
        try:
            while True:
                self._frame()
                if not self._out:
                    break
                self._send()
                if self._out:
                    break
        except OSError as error:
            self._break_off(grpc.StatusCode.UNAVAILABLE, self._text_of(error))
            return
        self._line.tend()
        self._wait_for_room(self._unframed is not None and not self._out)
        if not self._out and self._unframed is None:
            if self._is_ending:
                self._say_end()
            if self._is_carrying:
                self._is_carrying = False
                on_written, self._on_written = self._on_written, None
                self._wake_writer()
                if on_written is not None:
                    on_written()

    def _say_end(self) -> None:
        """Shut down the writing half of the connection."""
        with contextlib.suppress(OSError):
            # TLS's own shutdown would also end reading.
            socket.socket.shutdown(self.socket, socket.SHUT_WR)

    def _send(self) -> None:
        """Write as much as TCP and the window take now."""
        if not self._line.is_by_hand or self._session or not self._is_tls:
            self._line.flush()
            return
        room = self._line.room()
        try:
            while self._out and room > 0:
                num_bytes = self.socket.send(self._out.first(room))
                self._out.skip(num_bytes)
                room -= num_bytes
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            self._line.is_stuck = True
        else:
            self._line.is_full = bool(self._out)

    def _wait_for_room(self, is_blocked: bool) -> None:
        """While the peer's window is full, read on: it may make room behind its messages."""
        if is_blocked != self._is_blocked:
            self._is_blocked = is_blocked
            if not self._is_ending:
                self._messages_max = _ANY_NUMBER if is_blocked else _MESSAGES_MAX
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

    def _text_of(self, error: OSError) -> str:
        if self._session and error.errno == errno.EPROTO:
            return tls.reason()
        return error.strerror or text_of(error)

    def _break_off(self, status: grpc.StatusCode, why: str) -> None:
        if not self.over.is_set():
            self._error = self._error or (status, why)
        self._close()

    def _close(self) -> None:
        if self._is_closed:
            return
        self._line.detach()
        self._line.wants_read = False
        if self._looking is not None:
            self._looking.cancel()
        self._is_closed = True
        self.over.set()
        self._out.clear()
        self._http2.forget()
        self._read_ahead.give_up(self._held)
        self._awaited_bytes = 0
        self.socket.close()
        self._closed.set()
        self._wake_reader()
        self._give_up_writing()


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
