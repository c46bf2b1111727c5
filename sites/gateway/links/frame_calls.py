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
import traceback
import urllib.parse
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from isthmus.protos.errors import RemoteProtocolError
from isthmus.protos.failure import text_of
from isthmus.protos.limits import EXCHANGE_CHANNEL_BYTES
from isthmus.protos.mutual_tls import CertificateError
from isthmus.protos.private_files import UnsafeFileError
from isthmus.protos.security import Security
from isthmus.sites.gateway.links.call_socket import CallSocket
from isthmus.sites.gateway.links.http2 import (
    CANCEL,
    NO_ERROR,
    REFUSED_STREAM,
    Begun,
    Ended,
    Event,
    Fields,
    Headers,
    Http2,
    Message,
)
from isthmus.sites.gateway.links.inbox import Inbox, Taker
from isthmus.sites.gateway.links.keep_alive import KeepAlive, Patience
from isthmus.sites.gateway.links.progress import Traffic
from isthmus.sites.gateway.links.status import CallError, Status

_NO_ROOM: Final = "it sends, and makes no room for answers"
_PIECES_MAX: Final = 64
"""Pieces of a message that wait in line at a time."""
_CONTROL_MAX: Final = 1024
"""Control answers that may wait to be sent; a peer that causes more is cut off."""
_LINGER_S: Final = 2.0
"""Time for the peer to read the end of a call before its connection is closed."""
_WHY_BYTES_MAX: Final = 2000
"""Longest error text in a header; peers accept no longer ones."""
_ADDRESSES_MAX: Final = 4
_STATUSES: Final = {str(int(status)): status for status in Status}
_RESETS: Final = {CANCEL: Status.CANCELLED, REFUSED_STREAM: Status.UNAVAILABLE}
"""gRPC statuses of HTTP/2's error codes; all others: INTERNAL."""
_CONTENT_TYPE: Final = "application/grpc"
_USER_AGENT: Final = "isthmus"
_PSEUDO: Final = ":"


class _Waiter:
    """Lets one task wait until something is done."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._done: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Wait until `wake` is called."""
        assert self._done is None, "one task reads, and one writes"
        self._done = self._loop.create_future()
        try:
            await self._done
        finally:
            self._done = None

    def wake(self) -> None:
        """End the wait, if there is one."""
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


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
        self.fields: Fields = ()
        """The fields of the peer's header."""
        self.over = asyncio.Event()
        """Set once no more messages will come."""
        self._is_client = is_client
        self._http2 = Http2(is_client=is_client, message_bytes_max=EXCHANGE_CHANNEL_BYTES)
        self._loop = asyncio.get_running_loop()
        self._inbox = Inbox()
        self._reader = _Waiter(self._loop)
        self._writer = _Waiter(self._loop)
        self._is_carrying = False
        """TCP has not taken all of the message under way."""
        self._on_written: Callable[[], None] | None = None
        """Called when TCP has taken all of it."""
        self._is_ending = False
        """The server has sent its trailers."""
        self._error: tuple[Status, str] | None = None
        """Why the call broke or was refused. A stored exception would, once raised, keep this call
        and all that it has read in memory."""
        self._closed = asyncio.Event()
        self._keep_alive: KeepAlive | None = None
        if begun is not None:
            self._http2, header = begun
            self._take(header)
        self._out = self._http2.writer
        self._wire = CallSocket(connection, self._http2)

    def begin(self, fields: Iterable[tuple[str, str]] = ()) -> None:
        """Send the start of the connection, and begin to read."""
        self._wire.line.attach(self._loop, self._turn)
        self._push([self._http2.opening(fields)])
        self._read_on()

    async def wait_header(self) -> None:
        """Wait for the peer's header.

        Raises:
            CallError: the connection broke.
        """
        while not self.fields and not self.over.is_set():
            await self._reader.wait()
        if not self.fields:
            raise CallError(*(self._error or (Status.UNAVAILABLE, "no call was made")))

    async def read(self) -> memoryview | None:
        """Return the next message; None at the end.

        Raises:
            CallError: the call was refused, or broke.
        """
        inbox = self._inbox
        while inbox.untaken is not None or not inbox:
            if inbox.untaken is not None:
                raise inbox.untaken
            if self._error is not None:
                raise CallError(*self._error)
            if self.over.is_set():
                return None
            await self._reader.wait()
        message = inbox.next()
        self._hold()
        self._read_on()
        return message

    async def take_each(self, take: Taker) -> None:
        """Have `take` called with each message as it comes, until the end; send what it returns.

        Raises:
            CallError: as `read`.
            Exception: whatever `take` raises; nothing more is taken then.
        """
        self._inbox.taker = take
        try:
            while (message := await self.read()) is not None:
                answer = take(message)
                del message
                if answer is not None:
                    await self.write(answer)
        finally:
            self._inbox.taker = self._inbox.untaken = None

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
        self._out.post(message)
        self._is_carrying, self._on_written = True, on_written
        self._flush()

    async def write(self, message: bytes | memoryview) -> None:
        """Write a message; return when TCP has taken all of it.

        Raises:
            CallError: the call is over.
        """
        while self._is_carrying:  # a writer was cancelled, and its message is not
            await self._writer.wait()
        self.post(message)
        while self._is_carrying:
            await self._writer.wait()
            self._check()
        self._check()

    def finish(self) -> None:
        """Say, as the client, that no more messages will come; the answers can still be read."""
        self._push([self._http2.finish()])

    def cancel(self) -> None:
        """End the call and its connection at once, and free unread messages."""
        if not self._closed.is_set() and not self._is_ending and not self._out:
            farewell = b"" if self._is_client else self._http2.farewell()
            self._push([farewell, self._http2.reset(CANCEL)])
        self._close()
        self._inbox.clear()

    def break_off(self, why: str) -> None:
        """End the connection at once, because the peer breaks the rules."""
        self._break_off(Status.UNAVAILABLE, why)

    def keep_alive(self, patience: Patience, security: Security) -> None:
        """From now on ping the peer when it is silent; break off if it does not answer."""
        self._keep_alive = KeepAlive(self, self._loop, patience, security)

    @property
    def is_read(self) -> bool:
        """Whether the call is read on now."""
        return self._wire.line.wants_read

    def ping(self) -> None:
        """Send what the other end has to answer."""
        self._push([self._http2.ping()])

    def traffic(self) -> Traffic:
        """Return the bytes acknowledged and left on the connection.

        Raises:
            OSError: the connection has ended.
        """
        return self._wire.traffic()

    def limit(self, window_bytes: int, look_s: float) -> None:
        """Limit the bytes on the way: `CallSocket.limit`."""
        self._wire.limit(window_bytes, look_s)

    def answer(self) -> None:
        """Accept the call as its server, and begin to take its messages."""
        self._wire.line.attach(self._loop, self._turn)
        fields = ((":status", "200"), ("content-type", _CONTENT_TYPE))
        # GOAWAY this early makes gRPC's library open another connection for its next call.
        self._push([self._http2.farewell(), self._http2.header(fields, is_last=False)])
        self._inbox.is_closed = False
        try:
            for event in self._http2.let_in():
                self._take(event)
            self._hold()
        except RemoteProtocolError as error:
            self._break_off(Status.INTERNAL, str(error))
            return
        self._go_on()

    async def end(self, status: Status, why: str) -> None:
        """Send the end of a call that was answered, and give the peer time to read it."""
        if self._closed.is_set():
            return
        self._is_ending = True
        self._give_up_writing()
        self._error = self._error or (Status.CANCELLED, "it has ended")
        self.over.set()
        self._push(last_words(self._http2, status, why, is_answered=True))
        self._reader.wake()
        # Read and drop what the peer has sent meanwhile. If a connection is closed with unread
        # bytes, TCP resets it, and the peer never reads the trailers.
        self._inbox.clear()
        self._inbox.is_closed = False
        self._wire.drop_from_now()
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
        return self._wire.auth_context()

    def peer(self) -> str:
        """Return the address of the other end."""
        return self._wire.address

    # ---------------------------------------------------------------- reading

    def _read_on(self) -> None:
        """Watch for data to read, unless too many messages wait already."""
        wants = not self._closed.is_set() and self._inbox.wants_more
        if wants != self._wire.line.wants_read:
            self._wire.line.wants_read = wants
            self._wire.line.tend()

    def _turn(self) -> None:
        """Act on what the engine has read, or found to be written."""
        if self._wire.line.has_read:
            self._readable()
        if self._wire.line.has_written:
            self._flush()

    def _readable(self) -> None:
        if self._is_ending:
            if self._wire.drop():
                self._close()
            return
        try:
            self._wire.read(self._act)
        except OSError as error:
            self._break_off(Status.UNAVAILABLE, self._wire.why(error))
            return
        except RemoteProtocolError as error:
            self._break_off(Status.INTERNAL, str(error))
            return
        self._go_on()

    def _act(self, event: Event | Begun) -> bool:
        """Take an event; return whether more may be read."""
        if not isinstance(event, Begun):
            self._take(event)
        self._hold()
        return self._inbox.wants_more

    def _go_on(self) -> None:
        """Act on the bytes that were read."""
        control = self._http2.take_control()
        if control or self._inbox.is_blocked:
            self._push(control)
        self._wire.line.mark()
        self._read_on()

    def _hold(self) -> None:
        """Reserve room for what has arrived."""
        if self._is_ending or self._closed.is_set():
            return
        if not self._inbox.hold(self._http2.under_way_bytes, self._granted):
            self._break_off(Status.RESOURCE_EXHAUSTED, _NO_ROOM)

    def _granted(self) -> None:
        self._hold()
        self._read_on()

    def _take(self, event: Headers | Message | Ended) -> None:
        match event:
            case Message(data):
                answer = self._inbox.take(data, is_busy=self._is_carrying)
                if answer is None:
                    self._reader.wake()
                    return
                try:
                    self.post(answer)
                except CallError as error:
                    self._inbox.untaken = error
                    self._reader.wake()
                return
            case Headers(fields, is_last):
                if not self.fields:
                    self.fields = fields
                    if not self._is_client:
                        self._inbox.is_closed = True  # until it is answered
                headers = dict(fields)
                if not self._is_client:
                    if is_last:
                        self.over.set()
                elif is_last or headers.get(":status") != "200":
                    self._refused(headers)
            case Ended(error):
                if error != NO_ERROR or self._is_client:  # a server's call ends by trailers
                    status = _RESETS.get(error, Status.INTERNAL)
                    why = f"it was ended without a status (HTTP/2 error {error})"
                    self._error = self._error or (status, why)
                self.over.set()
                self._note_end()
        self._reader.wake()

    def _refused(self, trailers: Mapping[str, str]) -> None:
        """Take the server's trailers."""
        self.over.set()
        self._give_up_writing()
        self._error = self._error or _failure_in(trailers)

    # ---------------------------------------------------------------- writing

    @property
    def _is_mute(self) -> bool:
        """Whether no more messages may be written."""
        ended = self.over.is_set() and (self._is_client or self._closed.is_set())
        return self._error is not None or ended

    def _note_end(self) -> None:
        if self._is_mute:
            self._give_up_writing()

    def _give_up_writing(self) -> None:
        """Send no more of the message under way than is framed."""
        self._out.give_up()
        self._on_written = None
        if self._is_carrying:
            self._is_carrying = False
            self._writer.wake()

    def _check(self) -> None:
        if self._is_mute:
            raise CallError(*(self._error or (Status.CANCELLED, "it has ended")))

    def _push(self, pieces: Iterable[bytes | memoryview]) -> None:
        for piece in pieces:
            self._out.push(piece)
        if len(self._out) > _CONTROL_MAX + _PIECES_MAX:
            self._break_off(Status.RESOURCE_EXHAUSTED, "it reads no answers")
        self._flush()

    def _flush(self) -> None:
        """Write as much as TCP and the window take now; go on when they take more."""
        if self._closed.is_set():
            return
        try:
            self._wire.send()
        except OSError as error:
            self._break_off(Status.UNAVAILABLE, self._wire.why(error))
            return
        self._wire.line.tend()
        is_blocked = self._out.has_message and not self._out
        if is_blocked != self._inbox.is_blocked:
            # While the peer's window is full, read on: it may make room behind its messages.
            self._inbox.is_blocked = is_blocked
            self._read_on()
        if not self._out and not is_blocked:
            if self._is_ending:
                self._wire.say_end()
            if self._is_carrying:
                self._is_carrying = False
                on_written, self._on_written = self._on_written, None
                self._writer.wake()
                if on_written is not None:
                    on_written()

    # ---------------------------------------------------------------- the end

    def _break_off(self, status: Status, why: str) -> None:
        if not self.over.is_set():
            self._error = self._error or (status, why)
        self._close()

    def _close(self) -> None:
        if self._closed.is_set():
            return
        self._wire.close()
        if self._keep_alive is not None:
            self._keep_alive.end()
            self._keep_alive = None
        self._closed.set()
        self.over.set()
        self._inbox.give_up()
        self._reader.wake()
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
        raise CallError(Status.UNAVAILABLE, f"cannot connect: {error}") from error


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
        raise CallError(Status.UNAVAILABLE, why) from None
    except OSError as error:  # TLS errors included
        why = error.strerror or text_of(error)
        raise CallError(Status.UNAVAILABLE, f"cannot connect: {why}") from error
    call = FrameCall(connection, is_client=True)
    try:
        if why := security.why_revoked(call):
            raise CallError(Status.UNAVAILABLE, why)
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


def _failure_in(trailers: Mapping[str, str]) -> tuple[Status, str] | None:
    """Return the status with which a server has ended a call, and why; None: it is OK."""
    status = _STATUSES.get(trailers.get("grpc-status", ""))
    if status is Status.OK:
        return None
    why = urllib.parse.unquote(trailers.get("grpc-message", ""))
    if status is None:
        return Status.UNKNOWN, why or f"HTTP status {trailers.get(':status', 'unknown')[:20]}"
    return status, why


def last_words(http2: Http2, status: Status, why: str, *, is_answered: bool) -> list[bytes]:
    """Return the bytes of the trailers that end or refuse a client's call."""
    fields = [] if is_answered else [(":status", "200"), ("content-type", _CONTENT_TYPE)]
    fields.append(("grpc-status", str(int(status))))
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
