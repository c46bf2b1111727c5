# cython: annotation_typing=False, boundscheck=False, wraparound=False, initializedcheck=False
"""Bytes of a connection: out of the socket into messages, and from where they lie into the socket.

Cython compiles this module, with the types in connection.pxd, where there is a C compiler.
Otherwise it is plain Python, which does the same by ctypes (`memory.py`), slower. Addresses are
numbers in both.

`Reader` parses frames of DATA and gRPC's messages in them (`Incoming`): of a message that comes in
ten pieces the interpreter hears twice, when it begins and when it is complete. All other frames are
`http2.py`'s. `Writer` puts messages into frames, as the peer's window permits, and sends these with
few system calls. `Line` keeps it below the limit on unacknowledged bytes. In a turn, an `Engine`
reads and writes on all connections of an event loop, without the interpreter's lock, and then tells
of those that have something to tell.

Sizes are in bytes.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
from collections import deque
from collections.abc import Callable
from typing import Final
from weakref import WeakKeyDictionary

import cython

if not cython.compiled:
    from isthmus.sites.gateway.wire.memory import (
        address_of,
        copy,
        decipher,
        encipher,
        is_block,
        load8,
        load32,
        move,
        receive,
        set_mark,
        store_head,
        tls_failure,
        transmit,
        unacknowledged,
        use_tls,
    )

# What `Reader.step` and `Reader.pump` find; the first is 0 in C, too.
NEEDS: Final = 0
"""Nothing can be done before more bytes come."""
BEGINS: Final = 1
"""A message begins: give it memory (`Incoming.begin`), or refuse it."""
COMPLETE: Final = 2
"""A message is complete: take it (`Incoming.take`)."""
LAST: Final = 3
"""The frame that ends the peer's side of the call is read up."""
OTHER: Final = 4
"""Something at `begin` is not for the reader, or it comes at a time when it must not."""
CLOSED: Final = 5
"""The other end has closed the connection."""

HEAD_BYTES: Final = 9
PREFIX_BYTES: Final = 5
_PIECES: Final = 64
_RECORD_BYTES: Final = 16 << 10
"""Longest record of TLS."""
_HEAD_ROOM: Final = 16
"""A frame's head and a message's prefix take 14."""
_FRAME_FIRST: Final = 16 << 10
"""Longest frame for a peer that has announced no other limit."""
_WINDOW_FIRST: Final = 65_535
_LINES_MAX: Final = 8192
_EVENTS_MAX: Final = 256
_READABLE: Final = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
_ENDING: Final = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
_WRITABLE: Final = select.EPOLLOUT | select.EPOLLHUP | select.EPOLLERR


def use_openssl(reads: int, writes: int, why: int, forgets: int, last: int) -> None:
    """Set the addresses of OpenSSL's functions, before any connection has a session."""
    use_tls(reads, writes, why, forgets, last)


def last_failure() -> int:
    """Return OpenSSL's number of the latest error."""
    return tls_failure()


class Incoming:
    """The message under way: its prefix, then its bytes, as far as they have come."""

    def __init__(self) -> None:
        self._prefix = bytearray(PREFIX_BYTES)
        self._prefix_at = address_of(self._prefix)
        self._prefix_bytes = 0
        """As much as has come of the prefix of the next message."""
        self._memory = memoryview(b"")
        self._memory_at = 0
        self._length = -1
        """-1: no message has begun."""
        self._filled = 0

    @property
    def num_bytes(self) -> int:
        """Length of the message that has come in part; 0: none."""
        return max(0, self._length)

    @property
    def is_there(self) -> bool:
        """Whether a message, or its prefix, has come in part."""
        return self._length >= 0 or self._prefix_bytes > 0

    @property
    def prefix(self) -> bytes:
        """GRPC's prefix of the message that begins."""
        return bytes(self._prefix)

    def begin(self, memory: memoryview) -> None:
        """Give the message that begins its memory, of just its length."""
        self._memory = memory
        self._length = len(memory)
        self._memory_at = address_of(memory) if len(memory) else self._prefix_at
        self._filled = 0
        self._prefix_bytes = 0

    def take(self) -> memoryview:
        """Return the message that is complete, or drop one that is not."""
        memory, self._memory = self._memory, memoryview(b"")
        self._length = -1
        return memory

    def room(self, num_bytes: int) -> memoryview:
        """Return the memory of the next so many bytes."""
        return self._memory[self._filled : self._filled + num_bytes]

    def _missing(self) -> int:
        """Return how many bytes of the message have not come; 0: none has begun."""
        return self._length - self._filled if self._length >= 0 else 0

    def _end(self) -> int:
        """Return the address of the next byte of the memory."""
        return self._memory_at + self._filled

    def _note(self, num_bytes: int) -> None:
        """Count bytes that were put into the memory."""
        self._filled += num_bytes

    def _fill(self, source: int, num_bytes: int) -> int:
        """Copy bytes into the prefix or the memory; return how many there was room for."""
        if self._length < 0:
            taken = min(num_bytes, 5 - self._prefix_bytes)
            copy(self._prefix_at + self._prefix_bytes, source, taken)
            self._prefix_bytes += taken
        else:
            taken = min(num_bytes, self._length - self._filled)
            copy(self._memory_at + self._filled, source, taken)
            self._filled += taken
        return taken


class Reader:
    """The bytes that have come on a connection, and the frames in them."""

    def __init__(self, scratch_bytes: int, renewed_bytes: int) -> None:
        """Frames without a message must fit into `scratch_bytes`.

        The frame with which `renewed_bytes` of data have come is left to the caller, who renews the
        peer's window.
        """
        self.scratch = memoryview(bytearray(scratch_bytes))
        self._scratch_at = address_of(self.scratch)
        self._scratch_bytes = scratch_bytes
        self.message = Incoming()
        self._is_direct = False
        self.begin = 0
        self.end = 0
        self.data_left = 0
        self.pad_left = 0
        self.renewed_in = renewed_bytes
        """Bytes of data that may come before the window is renewed."""
        self.read_bytes = 0
        self.stream = 0
        self.takes_data = False
        self.is_last = False
        self.reads_left = 0
        self.session = 0
        self.is_dry = False
        """The socket had no more bytes."""
        self.ends = False
        """The other end has closed the connection: there is no event for the end of its bytes."""
        self.is_short = False
        """The caller has seen all that has come, and needs more."""
        self._failed = 0

    # ---------------------------------------------------------------- bytes from elsewhere

    @property
    def has_rest(self) -> bool:
        """Whether all of the message under way has come."""
        return self.message._missing() <= min(self.data_left, self.end - self.begin)

    @property
    def wanted_bytes(self) -> int:
        """Bytes that must come before there is anything to do; at least 1."""
        return self._wanted()

    def room(self, direct_min: int) -> memoryview:
        """Return the buffer for the next bytes. Then call `came`.

        It is part of a message, if more than `direct_min` bytes of it are missing.
        """
        wanted = self.wanted_bytes
        self._is_direct = self.begin == self.end and wanted > direct_min
        if self._is_direct:
            return self.message.room(wanted)
        self._make_room()
        return self.scratch[self.end :]

    def came(self, num_bytes: int) -> None:
        """Count bytes that were put into `room`."""
        self.read_bytes += num_bytes
        self.is_short = False
        if self._is_direct:
            self._is_direct = False
            self.message._note(num_bytes)
            self.data_left -= num_bytes
        else:
            self.end += num_bytes

    def step(self) -> int:
        """Parse what has come, up to the next thing that is the caller's."""
        return self._step()

    def pump(self, descriptor: int) -> int:
        """Read from a socket and parse, up to the next thing that is the caller's.

        At most `reads_left` times.

        Raises:
            OSError: the connection has ended.
        """
        with cython.nogil:
            code = self._pump(descriptor)
        if code < 0:
            raise OSError(-code, os.strerror(-code))
        return code

    # ---------------------------------------------------------------- without the interpreter

    def _pump(self, fd: int) -> int:
        code = 0
        if not self.is_short:
            code = self._step()
        if code == 0 and self._failed != 0:
            return self._failed
        while code == 0 and self.reads_left > 0:
            self.reads_left -= 1
            wanted = 0
            if self.begin == self.end:
                wanted = min(self.data_left, self.message._missing())
            spare = self._make_room()
            if self.session:
                if wanted > 0:
                    spare = 0
                    got = decipher(self.session, self.message._end(), wanted)
                elif spare > 0:
                    got = decipher(self.session, self._scratch_at + self.end, spare)
                else:
                    return 4
            elif wanted > 0:
                spare = min(spare, 4096)  # a few acknowledgements, or the next frame's head
                got = receive(fd, self.message._end(), wanted, self._scratch_at + self.end, spare)
            elif spare > 0:
                got = receive(fd, self._scratch_at + self.end, spare, 0, 0)
            else:
                return 4
            if got <= 0:
                self.reads_left = 0
                self.is_dry = True
                if is_block(got):
                    return 0
                self._failed = got if got < 0 else 5  # it may not be told twice
                return self._failed
            self.is_short = False
            self.read_bytes += got
            if got < wanted + spare and not self.session and not self.ends:
                self.reads_left = 0
                self.is_dry = True
            if got < wanted:
                wanted = got
            if wanted > 0:
                self.message._note(wanted)
                self.data_left -= wanted
            self.end += got - wanted
            code = self._step()
        return code

    def _wanted(self) -> int:
        if self.begin != self.end:
            return 1
        return max(1, min(self.data_left, self.message._missing()))

    def _make_room(self) -> int:
        """Move what has come to the front of the scratch buffer; return the length of the rest."""
        if self.begin:
            move(self._scratch_at, self._scratch_at + self.begin, self.end - self.begin)
            self.end -= self.begin
            self.begin = 0
        return self._scratch_bytes - self.end

    def _step(self) -> int:
        while True:
            available = self.end - self.begin
            if self.message._length >= 0 and self.message._filled == self.message._length:
                return 2
            if self.message._prefix_bytes == 5:
                return 1
            if self.data_left > 0:
                if available == 0:
                    return 0
                taken = self.message._fill(
                    self._scratch_at + self.begin, min(available, self.data_left)
                )
                self.begin += taken
                self.data_left -= taken
                continue
            if self.pad_left > 0:
                if available == 0:
                    return 0
                taken = min(available, self.pad_left)
                self.pad_left -= taken
                self.begin += taken
                continue
            if self.is_last:
                return 3
            if available == 0:
                return 0
            if not self.takes_data:
                return 4
            if available < 9:
                return 0
            at = self._scratch_at + self.begin
            length = load32(at) >> 8
            kind = load8(at + 3)
            if (
                kind != 0
                or load8(at + 4) & 8
                or load32(at + 5) & 0x7FFFFFFF != self.stream
                or length >= self.renewed_in
            ):
                return 4
            self.begin += 9
            self.data_left = length
            self.renewed_in -= length
            self.is_last = load8(at + 4) & 1 != 0


class Writer:
    """Pieces of memory to be sent, in order, and a message that is put into frames."""

    def __init__(self) -> None:
        self.left_bytes = 0
        self._waiting: deque[bytes | memoryview] = deque()
        self._loaded: deque[bytes | bytearray | memoryview] = deque()
        """The first pieces, whose addresses are known."""
        self.session = 0
        """OpenSSL's session, if it is TLS (`tls.py`)."""
        self._own = bytearray(_RECORD_BYTES + _PIECES * _HEAD_ROOM)
        """Memory for a record of TLS, and for heads of frames."""
        self._own_at = address_of(self._own)
        self._pending = 0
        """Length of a record that TLS wants again, for the socket was full."""
        self.stream = 0
        """The call's stream."""
        self.frame_bytes = _FRAME_FIRST
        """Longest frame that the peer takes."""
        self.connection_window = _WINDOW_FIRST
        self.stream_window = _WINDOW_FIRST
        """Bytes of data that the peer takes at present: of all streams, and of the call's."""
        self._message: bytes | memoryview | None = None
        """The message under way, while some of it is in no frame."""
        self._message_at = 0
        self._message_left = 0
        self._prefix_left = 0
        """Length of the message's prefix, if it is in no frame."""
        self._first = 0
        self._count = 0
        if not cython.compiled:
            self._starts, self._lengths = [0] * _PIECES, [0] * _PIECES

    def __len__(self) -> int:
        return len(self._loaded) + len(self._waiting)

    @property
    def sendable_bytes(self) -> int:
        """Longest next frame of DATA; 0 or less: the peer has to make room."""
        return self._sendable()

    @property
    def has_message(self) -> bool:
        """Whether some of the message under way is in no frame."""
        return self._message is not None

    def push(self, piece: bytes | memoryview) -> None:
        """Queue a piece, which is kept and must not change until it is sent."""
        if len(piece):
            self._waiting.append(piece)
            self.left_bytes += len(piece)

    def post(self, message: bytes | memoryview) -> None:
        """Queue a message behind all pieces, when there is no other.

        It is kept and must not change. Pieces that are pushed later go between its frames.
        """
        assert self._message is None, "one message after the other"
        self._message = message
        self._message_left = len(message)
        self._message_at = address_of(message) if len(message) else 0
        self._prefix_left = 5

    def give_up(self) -> None:
        """Send no more of the message under way than is in frames."""
        self._message = None

    def clear(self) -> None:
        """Drop all pieces."""
        self._waiting.clear()
        self._loaded.clear()
        self._message = None
        self.left_bytes = 0
        self._first = self._count = 0

    def load(self) -> bool:
        """Make `first` available; return whether there is anything to be sent now."""
        self._load()
        return self._count > 0

    def first(self, most_bytes: int) -> memoryview:
        """Return the first piece, or its beginning, after `load`. Then call `skip`."""
        first = memoryview(self._loaded[0])
        begin = self._starts[self._first] - address_of(first)
        return first[begin : begin + min(most_bytes, self._lengths[self._first])]

    def skip(self, num_bytes: int) -> None:
        """Count bytes of the first piece, which the caller has sent, as sent."""
        self._skip(num_bytes)
        self._drop()

    def _load(self) -> None:
        """Look up addresses of pieces, once those that were known are sent."""
        if self._count:
            return
        self._first = 0
        while self._waiting and self._count < 64:
            piece = self._waiting.popleft()
            self._add(piece, address_of(piece), len(piece))
        while self._message is not None and self._count < 63:
            taken = min(self._sendable() - self._prefix_left, self._message_left)
            if taken < 0 or (taken == 0 and self._message_left > 0):
                return
            self._add_frame(taken)

    def _add_frame(self, taken: int) -> None:
        """Put as much of the message into a frame."""
        at = self._own_at + _RECORD_BYTES + _HEAD_ROOM * self._count
        self.connection_window -= self._prefix_left + taken
        self.stream_window -= self._prefix_left + taken
        store_head(
            at, self._prefix_left + taken, self.stream, self._prefix_left, self._message_left
        )
        self.left_bytes += 9 + self._prefix_left + taken
        self._add(self._own, at, 9 + self._prefix_left)
        self._prefix_left = 0
        if taken > 0 and self._message is not None:
            self._add(self._message, self._message_at, taken)
            self._message_at += taken
            self._message_left -= taken
        if self._message_left == 0:
            self._message = None

    def _add(self, owner: bytes | bytearray | memoryview, at: int, length: int) -> None:
        self._loaded.append(owner)
        self._starts[self._count] = at
        self._lengths[self._count] = length
        self._count += 1

    def _sendable(self) -> int:
        return min(self.frame_bytes, min(self.connection_window, self.stream_window))

    def _drop(self) -> None:
        """Release the pieces that were sent."""
        while len(self._loaded) > self._count:
            self._loaded.popleft()

    def _flush(self, fd: int, room: int) -> int:
        total = 0
        while self._count > 0 and total < room:
            if self.session:
                sent = self._encipher(room - total)
            else:
                sent = transmit(
                    fd, self._starts, self._lengths, self._first, self._count, room - total
                )
            if sent <= 0:
                if sent == 0 or is_block(sent):
                    break
                return sent
            total += sent
            most = self._count
            self._skip(sent)
            if not self.session and most - self._count < min(most, 16):
                break  # the socket is full
        return total

    def _encipher(self, room: int) -> int:
        """Send one record: of a long piece, or of the beginnings of several."""
        length = max(min(room, 16384), self._pending)
        if self._lengths[self._first] >= length:
            taken = encipher(self.session, self._starts[self._first], length)
        else:
            taken = 0
            index = self._first
            while taken < length and index < self._first + self._count:
                copy(
                    self._own_at + taken,
                    self._starts[index],
                    min(self._lengths[index], length - taken),
                )
                taken += min(self._lengths[index], length - taken)
                index += 1
            length = taken
            taken = encipher(self.session, self._own_at, length)
        self._pending = length if is_block(taken) else 0
        return taken

    def _skip(self, num_bytes: int) -> None:
        """Count bytes as sent."""
        self.left_bytes -= num_bytes
        while self._count > 0 and num_bytes >= self._lengths[self._first]:
            num_bytes -= self._lengths[self._first]
            self._first += 1
            self._count -= 1
        if num_bytes > 0:
            self._starts[self._first] += num_bytes
            self._lengths[self._first] -= num_bytes


class Line:
    """A connection, as an engine serves it."""

    def __init__(self, descriptor: int, reader: Reader, writer: Writer) -> None:
        self.descriptor = descriptor
        self.reader = reader
        self.writer = writer
        self.on_turn: Callable[[], None] | None = None
        self.has_read = False
        """In the latest turn, the reader has found something."""
        self.has_written = False
        """In the latest turn, the writer has written all that it had, or failed."""
        self.wants_read = False
        self.reads_max = 1
        """Reads in a turn, at most."""
        self.is_by_hand = False
        """The caller reads and writes itself when the socket is ready."""
        self.is_stuck = False
        """The socket takes no more bytes for now."""
        self.is_full = False
        """As many bytes as may be are on the way."""
        self.window_bytes = -1
        """Limit on bytes that the peer's TCP has not acknowledged; negative: none."""
        self.look_s = 0.0
        """Interval at which it is looked whether the window has room."""
        self._mark = 1
        """The socket's low-water mark."""
        self._failed = 0
        self._engine: Engine | None = None
        self._slot = -1

    def attach(self, loop: asyncio.AbstractEventLoop, on_turn: Callable[[], None]) -> None:
        """Have the loop's engine serve this connection. Idempotent.

        `on_turn` is called when the reader or the writer needs the caller.

        Raises:
            OSError: there are too many.
        """
        if self._engine is not None:
            return
        self.on_turn = on_turn
        self._engine = _engine_of(loop)
        self._engine.attach(self)

    def detach(self) -> None:
        """Have it serve this connection no more; call before it is closed. Idempotent."""
        engine, self._engine = self._engine, None
        self.on_turn = None
        if engine is not None:
            engine.detach(self)

    def tend(self) -> None:
        """Be served soon, if there is something to do: what the caller wants has changed."""
        if self._engine is not None:
            self._engine.tend(self)

    def flush(self) -> None:
        """Write what socket and window take now.

        Raises:
            OSError: the connection has ended.
        """
        while not self._failed:
            self.writer._drop()
            self.writer._load()
            if not self.writer._count:
                break
            with cython.nogil:
                self._write()
            if self.writer._count:
                break
        self.writer._drop()
        if self._failed:
            raise OSError(-self._failed, os.strerror(-self._failed))

    def mark(self) -> None:
        """Have the kernel tell of as much as is missing of a message, and not of each packet."""
        self._set_mark()

    def unmark(self) -> None:
        """Have it tell of each byte."""
        self._mark = 1
        set_mark(self.descriptor, 1)

    def room(self) -> int:
        """Return how many bytes may be written now; 0: `is_full` is set."""
        return self._room()

    def note(self, events: int) -> None:
        """Note what epoll tells."""
        if events & _READABLE:
            self.reader.is_dry = False
        if events & _ENDING:
            self.reader.ends = True
        if events & _WRITABLE:
            self.is_stuck = False

    def _turn(self) -> int:
        """Read and write; return whether the caller is needed, and note for what."""
        self.has_read = self.has_written = False
        if self.is_by_hand:
            self.has_read = self.wants_read and not self.reader.is_dry
            self.has_written = self.writer._count > 0 and not self.is_stuck
        else:
            if self.wants_read and not self.reader.is_dry:
                self.reader.reads_left = self.reads_max
                self.has_read = self.reader._pump(self.descriptor) != 0
                if not self.has_read:
                    self._set_mark()
            if self.writer._count > 0 and not self.is_stuck and self._failed == 0:
                self._write()
                self.has_written = self.writer._count == 0 or self._failed != 0
        return self.has_read or self.has_written

    def _set_mark(self) -> None:
        # The least must fit a new connection's receive buffer: Linux begins with 128 KiB, half of
        # it for bookkeeping. The buffer grows with what has come, so later it is up to 1 MiB.
        wanted = self.reader._wanted()
        if self.reader.session or self.is_by_hand:
            wanted -= 32768  # that TLS may hold, not yet deciphered
        if wanted < 16384:
            wanted = 1
        most = max(65536, min(1048576, self.reader.read_bytes // 16))
        wanted = min(wanted, most)
        if wanted != self._mark:
            self._mark = wanted
            set_mark(self.descriptor, wanted)

    def _is_due(self) -> bool:
        """Whether the next turn may read or write more, though the socket tells of no event."""
        return (self.wants_read and not self.reader.is_dry) or (
            self.writer._count > 0 and not self.is_stuck and not self.is_full and self._failed == 0
        )

    def _awaits_room(self) -> bool:
        """Whether the window is full, of which the socket tells nothing when it has room again."""
        return self.is_full and self.writer._count > 0 and self._failed == 0

    def _room(self) -> int:
        room = 1 << 62
        if self.window_bytes >= 0:
            room = self.window_bytes - unacknowledged(self.descriptor)
            # TLS wants a write repeated with no less, and its records have up to 16 KiB.
            if room < min(16384, self.window_bytes // 2):
                room = 0
            elif room < 16384:
                room = 16384
        self.is_full = room == 0
        return room

    def _write(self) -> None:
        room = self._room()
        if room == 0:
            return
        sent = self.writer._flush(self.descriptor, room)
        if sent < 0:
            self._failed = sent
        elif self.writer._count > 0:
            self.is_full = sent >= room
            self.is_stuck = not self.is_full


_engines: WeakKeyDictionary[asyncio.AbstractEventLoop, Engine] = WeakKeyDictionary()


class Engine:
    """Reads and writes on the connections of an event loop, all of them in each turn.

    Use it on the loop's thread only.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._poll = select.epoll()
        self._lines: dict[int, Line] = {}
        self._slots: list[Line] = []
        self._count = 0
        self._due: asyncio.Handle | None = None
        self._looking: asyncio.TimerHandle | None = None
        if not cython.compiled:
            self._table: dict[int, Line] = {}
            self._found: dict[int, int] = {}
        loop.add_reader(self._poll.fileno(), self.turn)

    def attach(self, line: Line) -> None:
        """Serve a connection from now on."""
        if self._count == _LINES_MAX:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        self._poll.register(line.descriptor, _READABLE | select.EPOLLOUT | select.EPOLLET)
        self._lines[line.descriptor] = line
        line._slot = self._count
        self._slots.append(line)
        self._place(line)
        self._count += 1

    def detach(self, line: Line) -> None:
        """Serve a connection no more. The last one ends the engine."""
        self._poll.unregister(line.descriptor)
        del self._lines[line.descriptor]
        self._count -= 1
        last = self._slots.pop()
        if last is not line:
            last._slot = line._slot
            self._slots[last._slot] = last
            self._place(last)
        line._slot = -1
        if not self._count:
            self._end()

    def _place(self, line: Line) -> None:
        if cython.compiled:
            self._table[line._slot] = cython.cast(cython.p_void, line)
        else:
            self._table[line._slot] = line

    def tend(self, line: Line) -> None:
        """Serve a connection soon, if there is something to do."""
        if self._due is None and line._slot >= 0 and line._is_due():
            self._due = self._loop.call_soon(self.turn)
        if self._looking is None and line._awaits_room():
            self._looking = self._loop.call_later(line.look_s, self._look)

    def turn(self) -> None:
        """Read and write on all connections that are ready."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        for descriptor, events in self._poll.poll(0, _EVENTS_MAX):
            self._lines[descriptor].note(events)
        with cython.nogil:
            num_found = self._turn()
        found = [self._slots[self._found[index]] for index in range(num_found)]
        for line in found:
            if line.on_turn is not None:  # else another's turn has ended it
                line.on_turn()
                line.tend()
        if self._count and self._due is None and self._is_due():
            self._due = self._loop.call_soon(self.turn)
        if self._looking is None:
            slot = self._first_that_awaits_room()
            if slot >= 0:
                self.tend(self._slots[slot])

    def _look(self) -> None:
        self._looking = None
        self.turn()

    def _end(self) -> None:
        del _engines[self._loop]
        for timer in (self._due, self._looking):
            if timer is not None:
                timer.cancel()
        self._due = self._looking = None
        self._loop.remove_reader(self._poll.fileno())
        self._poll.close()

    def _turn(self) -> int:
        num_found = 0
        for slot in range(self._count):
            if cython.cast(Line, self._table[slot])._turn():
                self._found[num_found] = slot
                num_found += 1
        return num_found

    def _is_due(self) -> bool:
        for slot in range(self._count):  # noqa: SIM110 - no generator in C
            if cython.cast(Line, self._table[slot])._is_due():
                return True
        return False

    def _first_that_awaits_room(self) -> int:
        """Return the slot of a line whose window is full; negative: there is none."""
        for slot in range(self._count):
            if cython.cast(Line, self._table[slot])._awaits_room():
                return slot
        return -1


def _engine_of(loop: asyncio.AbstractEventLoop) -> Engine:
    """Return a loop's engine."""
    engine = _engines.get(loop)
    if engine is None:
        engine = _engines[loop] = Engine(loop)
    return engine
