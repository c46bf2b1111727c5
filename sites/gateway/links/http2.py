"""The part of HTTP/2 that one gRPC call on its own connection needs.

Frames of gradients are messages of gRPC calls. gRPC's own library copies each message three times
on its way between the interpreter and a socket, and wakes several threads for it. Here a message is
received into its final memory and sent without a copy. On the wire the protocol is the same: either
end may be gRPC's library (tests/sites/test_frame_calls.py).

What is done for each piece of a message is compiled (`wire/connection.py`). All else is here, and
pure but for `read`.

A connection carries one call. Both sides stream messages until one of them ends it. Other parts of
HTTP/2, such as priorities and pushes, are refused or ignored, as RFC 9113 permits.

Sizes are in bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import hpack
import numpy as np

from isthmus.protos.errors import RemoteProtocolError
from isthmus.sites.gateway.wire import connection
from isthmus.sites.gateway.wire.connection import Reader, Writer

Fields = tuple[tuple[str, str], ...]
"""Names and values of a header."""

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEAD: Final = struct.Struct(">BHBBI")
"""The head of a frame: its length in 8 and 16 bits, its kind, its flags, its stream."""
HEAD_BYTES: Final = _HEAD.size
_PREFIX: Final = struct.Struct(">BI")
"""Prefix of a message: whether it is compressed, and its length."""
PREFIX_BYTES: Final = _PREFIX.size
_SETTING: Final = struct.Struct(">HI")
_NUMBER: Final = struct.Struct(">I")
_STREAM: Final = 1
"""Number of a client's first stream."""

_WINDOW_FIRST: Final = 65_535
_WINDOW_MAX: Final = (1 << 31) - 1
_WINDOW_RENEWED: Final = 1 << 30
"""Bytes after which the peer's window is renewed by as many."""
_FRAME_FIRST: Final = 16 << 10
"""Largest frame for a peer that has announced no other limit."""
_FRAME_MAX: Final = (1 << 24) - 1
_PING_BYTES: Final = 8
_PRIORITY_BYTES: Final = 5
_SCRATCH_BYTES: Final = 32 << 10
"""Buffer for frames that carry no message; they must fit into it."""
_DIRECT_MIN: Final = 4 << 10
"""If less is missing of a message, it is read together with the next bytes."""
_HEADER_BYTES_MAX: Final = 8 << 10
"""Longest header, encoded and decoded; gRPC's library has the same limit."""
_BEFORE_CALL_MAX: Final = 16 << 10
"""Limit on a client's bytes before its call: settings, pings, windows, and the header. A frame
counts _FRAME_COST_BYTES more than its length."""
_FRAME_COST_BYTES: Final = 256


class Kind(IntEnum):
    """Type of an HTTP/2 frame."""

    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class _Setting(IntEnum):
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5


_ACK: Final = 0x1
_END_STREAM: Final = 0x1
_END_HEADERS: Final = 0x4
_PADDED: Final = 0x8
_PRIORITY: Final = 0x20
NO_ERROR: Final = 0x0
REFUSED_STREAM: Final = 0x7
CANCEL: Final = 0x8


@dataclass(frozen=True, slots=True)
class Headers:
    """The peer's header, which begins its side of the call, or its trailers, which end it."""

    fields: Fields
    is_last: bool


@dataclass(frozen=True, slots=True)
class Message:
    """A complete message, in memory of its own."""

    data: memoryview


@dataclass(frozen=True, slots=True)
class Begun:
    """A message has begun to come, and more of it must be read; only `read` tells of it."""


BEGUN: Final = Begun()


@dataclass(frozen=True, slots=True)
class Ended:
    """The peer sends nothing more in this call."""

    error: int
    """HTTP/2 error code; NO_ERROR: a regular end."""


Event = Headers | Message | Ended


class Http2:
    """One side of a connection with one call.

    A server gets no message before it calls `let_in`, so strangers take no memory.
    """

    def __init__(self, *, is_client: bool, message_bytes_max: int) -> None:
        self._is_client = is_client
        self._message_bytes_max = message_bytes_max
        self._stream = _STREAM if is_client else 0
        self._control: list[bytes] = []
        self._encoder = hpack.Encoder()
        self._encoder.header_table_size = 0  # the peer's table is not used
        self._decoder = hpack.Decoder(max_header_list_size=_HEADER_BYTES_MAX)
        # What this side may send.
        self.writer = Writer()
        self.writer.stream = self._stream
        self._window_first = _WINDOW_FIRST
        # What has come.
        self.reader = Reader(_SCRATCH_BYTES, _WINDOW_RENEWED)
        self._scratch = self.reader.scratch
        self._preface = b"" if is_client else _PREFACE
        """The part of the client's preface that has not come yet."""
        self._has_settings = False
        """The peer's first frame, SETTINGS, has come."""
        self._has_header = False
        self._before_call_left = _BEFORE_CALL_MAX
        self._is_open = False
        """The call is let in: messages may come."""
        self._is_ended = False
        """The peer's side of the call has ended."""
        self._refused_stream = 0
        """Stream of the latest second call, which was refused."""
        self._block: bytearray | None = None
        """The first part of a header that continues in another frame; None: no such header."""
        self._block_stream = 0
        self._block_is_last = False

    # ---------------------------------------------------------------- what is sent

    def opening(self, fields: Iterable[tuple[str, str]] = ()) -> bytes:
        """Return the first bytes of this side; a client's include the header of its call."""
        settings = [
            (_Setting.INITIAL_WINDOW_SIZE, _WINDOW_MAX),
            (_Setting.MAX_FRAME_SIZE, _FRAME_MAX),
            (
                (_Setting.ENABLE_PUSH, 0)
                if self._is_client
                else (_Setting.MAX_CONCURRENT_STREAMS, 1)
            ),
        ]
        sent = [
            _PREFACE if self._is_client else b"",
            _frame(Kind.SETTINGS, 0, 0, b"".join(_SETTING.pack(*each) for each in settings)),
            _frame(Kind.WINDOW_UPDATE, 0, 0, _NUMBER.pack(_WINDOW_MAX - _WINDOW_FIRST)),
        ]
        if self._is_client:
            sent.append(self.header(fields, is_last=False))
        return b"".join(sent)

    def header(self, fields: Iterable[tuple[str, str]], *, is_last: bool) -> bytes:
        """Return a header, or the trailers that end this side of the call."""
        block = self._encoder.encode(list(fields))
        assert len(block) <= _FRAME_FIRST, f"a header of {len(block)} bytes"
        flags = _END_HEADERS | (_END_STREAM if is_last else 0)
        return _frame(Kind.HEADERS, flags, self._stream, block)

    def reset(self, error: int) -> bytes:
        """Return a RST_STREAM frame for the call; empty without a call."""
        if not self._stream:
            return b""
        return _frame(Kind.RST_STREAM, 0, self._stream, _NUMBER.pack(error))

    def ping(self) -> bytes:
        """Return a PING frame, which the peer must answer."""
        return _frame(Kind.PING, 0, 0, bytes(_PING_BYTES))

    def farewell(self) -> bytes:
        """Return a GOAWAY frame: this connection takes no further call."""
        return _frame(Kind.GOAWAY, 0, 0, _NUMBER.pack(self._stream) + _NUMBER.pack(NO_ERROR))

    def take_control(self) -> list[bytes]:
        """Return and clear the control frames to be sent to the peer, between frames of data."""
        taken, self._control = self._control, []
        return taken

    def finish(self) -> bytes:
        """Return an empty DATA frame that ends this side of the call: no more messages."""
        return _frame(Kind.DATA, _END_STREAM, self._stream, b"")

    # ---------------------------------------------------------------- what comes

    @property
    def wanted_bytes(self) -> int:
        """Bytes that must come before there is anything to do; at least 1."""
        return self.reader.wanted_bytes

    @property
    def under_way_bytes(self) -> int:
        """Length of the message that has come in part; 0: none."""
        return self.reader.message.num_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes that have come so far."""
        return self.reader.read_bytes

    def forget(self) -> None:
        """Drop the message that has come in part; nothing more is read."""
        self.reader.message.take()

    def room(self) -> memoryview:
        """Return the buffer for the next bytes, never empty. Then call `filled`."""
        return self.reader.room(_DIRECT_MIN)

    def filled(self, num_bytes: int) -> Iterator[Event]:
        """Parse `num_bytes` that were put into `room`, and yield the events in them.

        Raises:
            RemoteProtocolError: the bytes are not HTTP/2 or gRPC, or exceed a limit.
        """
        self.reader.came(num_bytes)
        while (code := self.reader.step()) != connection.NEEDS:
            found = self._act(code)
            if found is None:
                return
            yield from found

    def begin_turn(self, most_reads: int) -> None:
        """Let `read` read this often, if there is anything to read."""
        self.reader.reads_left = 0 if self.reader.is_dry else most_reads

    def read(self, descriptor: int) -> Event | Begun | None:
        """Read from a socket; return what it tells, or None if it tells nothing more in this turn.

        Raises:
            OSError: the connection has ended.
            RemoteProtocolError: as `filled`.
        """
        while True:
            code = self.reader.pump(descriptor)
            if code == connection.NEEDS:
                return None
            if code == connection.CLOSED:
                raise ConnectionAbortedError("it was closed")
            found = self._act(code)
            if code == connection.BEGINS:
                if not self.reader.has_rest:
                    return BEGUN
                continue
            if code == connection.OTHER:
                self.reader.reads_left = 0  # maybe of thousands: others have their turn
            if found:
                return found[0]
            self.reader.is_short = found is None

    def let_in(self) -> Iterator[Event]:
        """Accept the call's messages, as its server; yield the events that have come already.

        Raises:
            RemoteProtocolError: as `filled`.
        """
        self._is_open = not self._is_ended
        self._note_state()
        yield from self.filled(0)

    def _act(self, code: int) -> Sequence[Event] | None:
        """Do what the reader leaves to do; None: more must come before."""
        reader = self.reader
        if code == connection.COMPLETE:
            return (Message(reader.message.take()),)
        if code == connection.BEGINS:
            self._begin_message()
            return ()
        if code == connection.LAST:
            reader.is_last = False
            self._end_whole()
            return (Ended(NO_ERROR),)
        return self._take_part()

    def _take_part(self) -> Sequence[Event] | None:
        """Parse the next frame in the scratch buffer; None: it is not complete yet."""
        reader = self.reader
        available = reader.end - reader.begin
        if self._preface:
            return self._take_preface(available)
        if available < HEAD_BYTES:
            return None
        high, low, kind, flags, stream = _HEAD.unpack_from(self._scratch, reader.begin)
        length, stream = high << 16 | low, stream & _WINDOW_MAX
        if not self._has_settings:
            if kind != Kind.SETTINGS or flags & _ACK:
                raise RemoteProtocolError("not HTTP/2: it does not begin with settings")
            self._has_settings = True
        if kind == Kind.DATA:
            return self._begin_data(available, length, flags, stream)
        if not self._is_client and not self._has_header and length > self._before_call_left:
            raise RemoteProtocolError("HTTP/2 that goes on, and makes no call")
        if HEAD_BYTES + length > len(self._scratch):
            raise RemoteProtocolError(f"an HTTP/2 frame of kind {kind} with {length} bytes")
        if available < HEAD_BYTES + length:
            return None
        at = reader.begin + HEAD_BYTES
        reader.begin = at + length
        events = self._take_frame(kind, flags, stream, bytes(self._scratch[at : at + length]))
        self._note_state()
        return events

    def _note_state(self) -> None:
        """Tell the reader whether frames of data may come now."""
        self.reader.stream = self._stream
        self.reader.takes_data = self._is_open and self._block is None

    def _take_preface(self, available: int) -> Sequence[Event] | None:
        length = min(available, len(self._preface))
        begin = self.reader.begin
        if bytes(self._scratch[begin : begin + length]) != self._preface[:length]:
            raise RemoteProtocolError("not HTTP/2")
        self._preface = self._preface[length:]
        self.reader.begin += length
        return () if length else None

    # ---------------------------------------------------------------- messages

    def _begin_data(
        self, available: int, length: int, flags: int, stream: int
    ) -> Sequence[Event] | None:
        is_padded = bool(flags & _PADDED)
        if available < HEAD_BYTES + is_padded:
            return None
        if stream != self._stream or not self._is_open or self._block is not None:
            return self._pass_by(stream, length)
        reader = self.reader
        reader.begin += HEAD_BYTES
        padding = 0
        if is_padded:
            padding = self._scratch[reader.begin]
            reader.begin += 1
        data_bytes = length - is_padded - padding
        if data_bytes < 0:
            raise RemoteProtocolError("an HTTP/2 frame of less than its padding")
        reader.data_left, reader.pad_left = data_bytes, padding
        reader.is_last = bool(flags & _END_STREAM)
        reader.renewed_in -= length
        if reader.renewed_in <= 0:
            renewed = _NUMBER.pack(_WINDOW_RENEWED - reader.renewed_in)
            self._control.append(_frame(Kind.WINDOW_UPDATE, 0, 0, renewed))
            self._control.append(_frame(Kind.WINDOW_UPDATE, 0, self._stream, renewed))
            reader.renewed_in = _WINDOW_RENEWED
        return ()

    def _pass_by(self, stream: int, length: int) -> Sequence[Event] | None:
        """Leave data unread until its call is let in; skip data of a refused call."""
        if self._block is not None:
            raise RemoteProtocolError("an HTTP/2 header was broken off")
        is_held = not self._is_client and self._has_header and not self._is_ended
        if is_held and stream == self._stream and not self._is_open:
            return None
        # A second call may have sent data before it learned that it is refused.
        if not self._stream < stream <= self._refused_stream:
            raise RemoteProtocolError(f"data of stream {stream}, which is not open")
        self.reader.begin += HEAD_BYTES
        self.reader.pad_left = length
        return ()

    def _begin_message(self) -> None:
        is_compressed, length = _PREFIX.unpack(self.reader.message.prefix)
        if is_compressed:
            raise RemoteProtocolError("a compressed message")
        if length > self._message_bytes_max:
            raise RemoteProtocolError(
                f"a message of {length} bytes, where {self._message_bytes_max} are allowed"
            )
        # Not a bytearray, which would be zeroed first.
        self.reader.message.begin(memoryview(np.empty(length, np.uint8).data))

    def _end_call(self) -> None:
        self._is_ended, self._is_open = True, False
        self._note_state()

    def _end_whole(self) -> None:
        """End the peer's side of the call; an error in the middle of a message."""
        if self.reader.message.is_there:
            raise RemoteProtocolError("the call ended within a message")
        self._end_call()

    # ---------------------------------------------------------------- other frames

    def _take_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> Sequence[Event]:
        if not self._is_client and not self._has_header:
            self._before_call_left -= _FRAME_COST_BYTES + len(payload)
            if self._before_call_left < 0:
                raise RemoteProtocolError("HTTP/2 that goes on, and makes no call")
        if self._block is not None and kind != Kind.CONTINUATION:
            raise RemoteProtocolError("an HTTP/2 header was broken off")
        match kind:
            case Kind.HEADERS:
                return self._take_headers(flags, stream, payload)
            case Kind.CONTINUATION:
                if self._block is None or stream != self._block_stream:
                    raise RemoteProtocolError("an HTTP/2 header that was not begun goes on")
                return self._take_block(flags, payload)
            case Kind.SETTINGS:
                self._take_settings(flags, stream, payload)
            case Kind.PING:
                if len(payload) != _PING_BYTES or stream:
                    raise RemoteProtocolError(f"an HTTP/2 ping of {len(payload)} bytes")
                if not flags & _ACK:
                    self._control.append(_frame(Kind.PING, _ACK, 0, payload))
            case Kind.WINDOW_UPDATE:
                self._take_window(stream, _number(payload) & _WINDOW_MAX)
            case Kind.RST_STREAM:
                return self._take_reset(stream, _number(payload))
            case Kind.GOAWAY:
                last = _number(payload[: _NUMBER.size]) & _WINDOW_MAX
                if self._is_client and last < self._stream and not self._is_ended:
                    self._end_call()
                    return (Ended(REFUSED_STREAM),)
            case Kind.PUSH_PROMISE:
                raise RemoteProtocolError("an HTTP/2 push")
            case _:
                pass  # a priority, or an unknown type
        return ()

    def _take_reset(self, stream: int, error: int) -> Sequence[Event]:
        if not stream:
            raise RemoteProtocolError("an HTTP/2 reset of stream 0")
        if stream != self._stream or (self._is_client and self._is_ended):
            return ()
        self._end_call()
        # A regular end has another form, so NO_ERROR means cancelled.
        return (Ended(error or CANCEL),)

    def _take_headers(self, flags: int, stream: int, payload: bytes) -> Sequence[Event]:
        begin, end = 0, len(payload)
        if flags & _PADDED:
            begin, end = 1, end - (payload[0] if payload else 0)
        if flags & _PRIORITY:
            begin += _PRIORITY_BYTES
        if begin > end:
            raise RemoteProtocolError("an HTTP/2 header of less than its padding")
        if not self._stream and stream % 2:
            self._stream = self.writer.stream = stream
        if stream != self._stream or not stream:
            self._refuse(stream)
        self._block, self._block_stream = bytearray(), stream
        self._block_is_last = bool(flags & _END_STREAM)
        return self._take_block(flags, payload[begin:end])

    def _refuse(self, stream: int) -> None:
        """Refuse a second call on this connection."""
        if self._is_client or not stream % 2 or stream < self._stream:
            raise RemoteProtocolError(f"an HTTP/2 header of stream {stream}")
        self._refused_stream = max(self._refused_stream, stream)
        refusal = _NUMBER.pack(REFUSED_STREAM)
        self._control.append(_frame(Kind.RST_STREAM, 0, stream, refusal))

    def _take_block(self, flags: int, payload: bytes) -> Sequence[Event]:
        assert self._block is not None
        self._block += payload
        if len(self._block) > _HEADER_BYTES_MAX:
            raise RemoteProtocolError(f"an HTTP/2 header of more than {_HEADER_BYTES_MAX} bytes")
        if not flags & _END_HEADERS:
            return ()
        block, self._block = bytes(self._block), None
        try:
            decoded = self._decoder.decode(block)
        except hpack.HPACKError as error:
            raise RemoteProtocolError(f"an HTTP/2 header cannot be read: {error}") from error
        if self._block_stream != self._stream:
            return ()
        fields = tuple((str(name), str(value)) for name, value in decoded)
        is_first, self._has_header = not self._has_header, True
        if not fields or self._is_ended or not (is_first or self._block_is_last):
            raise RemoteProtocolError("an HTTP/2 header that is empty, or in the wrong place")
        if not self._block_is_last:
            self._is_open = self._is_client
        elif self._is_client:
            self._end_call()  # the status explains the end, even within a message
        else:
            self._end_whole()
        return (Headers(fields, self._block_is_last),)

    def _take_settings(self, flags: int, stream: int, payload: bytes) -> None:
        if len(payload) % _SETTING.size or stream:
            raise RemoteProtocolError(f"HTTP/2 settings of {len(payload)} bytes, stream {stream}")
        if flags & _ACK:
            return
        for number, value in _SETTING.iter_unpack(payload):
            match number:
                case _Setting.INITIAL_WINDOW_SIZE:
                    if value > _WINDOW_MAX:
                        raise RemoteProtocolError(f"an HTTP/2 window of {value} bytes")
                    self.writer.stream_window += value - self._window_first
                    self._window_first = value
                    self._check_windows()
                case _Setting.MAX_FRAME_SIZE:
                    if not _FRAME_FIRST <= value <= _FRAME_MAX:
                        raise RemoteProtocolError(f"HTTP/2 frames of {value} bytes")
                    self.writer.frame_bytes = value
                case _:
                    pass
        self._control.append(_frame(Kind.SETTINGS, _ACK, 0, b""))

    def _take_window(self, stream: int, more: int) -> None:
        if not more:
            raise RemoteProtocolError("an HTTP/2 window that grows by nothing")
        if stream == 0:
            self.writer.connection_window += more
        elif stream == self._stream:
            self.writer.stream_window += more
        self._check_windows()

    def _check_windows(self) -> None:
        if max(self.writer.connection_window, self.writer.stream_window) > _WINDOW_MAX:
            raise RemoteProtocolError("an HTTP/2 window became too wide")


def _frame(kind: Kind, flags: int, stream: int, payload: bytes) -> bytes:
    return _HEAD.pack(len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream) + payload


def _number(payload: bytes) -> int:
    if len(payload) != _NUMBER.size:
        raise RemoteProtocolError(f"an HTTP/2 number of {len(payload)} bytes")
    return int(_NUMBER.unpack(payload)[0])
