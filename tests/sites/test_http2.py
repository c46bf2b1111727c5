"""HTTP/2 of one call: messages arrive however bytes are cut, and what is wrong is named."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.protos.errors import RemoteProtocolError
from isthmus.sites.gateway.links import http2
from isthmus.sites.gateway.links.http2 import (
    CANCEL,
    NO_ERROR,
    PREFIX_BYTES,
    REFUSED_STREAM,
    Ended,
    Event,
    Headers,
    Http2,
    Kind,
    Message,
)
from isthmus.sites.gateway.wire import connection
from tests.fakes.compiled_modules import PLAIN, WAYS, load
from tests.fakes.http2_frames import (
    ACK,
    ANSWER,
    CALL,
    END_HEADERS,
    END_STREAM,
    HEADER_TABLE_SIZE,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_SIZE,
    PADDED,
    PREFACE,
    PRIORITY,
    TRAILERS,
    begun,
    block,
    cut,
    data,
    feed,
    frame,
    frames_in,
    header,
    number,
    prefixed,
    settings,
)

MESSAGE_BYTES_MAX = 1 << 20
WINDOW_FIRST = 65_535
WINDOW_MAX = (1 << 31) - 1
PIECE_BYTES = 16 << 10
ROLES = pytest.mark.parametrize("is_client", [True, False], ids=["client", "server"])


@pytest.fixture(autouse=True, scope="module", params=WAYS)
def _way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever is compiled does the same as plain Python."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == PLAIN:
            patch.setattr(http2, "Reader", load(connection, PLAIN).Reader)
        yield


def fresh(is_client: bool) -> Http2:
    """One side that has heard nothing yet."""
    return Http2(is_client=is_client, message_bytes_max=MESSAGE_BYTES_MAX)


def in_call(is_client: bool) -> Http2:
    """One side in the middle of a call."""
    side = fresh(is_client)
    assert [type(each) for each in feed(side, begun(is_client))] == [Headers]
    if not is_client:
        assert list(side.let_in()) == []
    side.take_control()
    return side


def messages_in(events: list[Event]) -> list[bytes]:
    return [bytes(each.data) for each in events if isinstance(each, Message)]


def some_bytes(length: int, chance: random.Random) -> bytes:
    return chance.randbytes(length)


def packed(side: Http2, message: bytes) -> Iterator[bytes]:
    """Yield a message in frames as the peer permits them; nothing, while it permits none."""
    writer = side.writer

    def taken() -> bytes:
        piece = bytes(writer.first(len(message) + 100))
        writer.skip(len(piece))
        return piece

    writer.post(message)
    while writer.has_message or writer:
        writer.load()
        yield b"".join(taken() for _ in range(len(writer)))


class Side:
    """One end of a pair, and what it has been told."""

    def __init__(self, is_client: bool) -> None:
        self.http2 = fresh(is_client)
        self.events: list[Event] = []
        self.is_server = not is_client

    def take(self, sent: bytes, chance: random.Random) -> bytes:
        """Take bytes, in pieces; return the answers."""
        for piece in cut(sent, chance):
            found = feed(self.http2, piece)
            self.events += found
            if self.is_server and any(isinstance(each, Headers) for each in found):
                self.events += self.http2.let_in()
        return b"".join(self.http2.take_control())


def talk(sizes: dict[bool, list[int]], chance: random.Random) -> None:
    """Have both sides send messages at once; check that each gets the other's."""
    ends = {True: Side(is_client=True), False: Side(is_client=False)}
    sent = {who: [some_bytes(each, chance) for each in sizes[who]] for who in ends}
    outs = {True: ends[True].http2.opening(CALL), False: ends[False].http2.opening()}
    outs[False] += ends[False].take(outs[True], chance)
    outs[False] += ends[False].http2.header(ANSWER, is_last=False)
    outs[True] = ends[True].take(outs[False], chance)
    outs[False] = b""
    packing = {
        who: (piece for message in sent[who] for piece in packed(ends[who].http2, message))
        for who in ends
    }
    going = set(ends)
    while going or any(outs.values()):
        who = chance.choice((True, False))
        piece = next(packing[who], None)
        if piece is None:
            going.discard(who)
        outs[not who] += ends[not who].take(outs[who] + (piece or b""), chance)
        outs[who] = b""
    for who, end in ends.items():
        assert messages_in(end.events) == sent[not who]
        assert not [each for each in end.events if isinstance(each, Ended)]


# ------------------------------------------------------------------------ what arrives


SIZES = st.lists(
    st.one_of(st.sampled_from((0, 1, 4090, 4096, PIECE_BYTES, 40_000)), st.integers(0, 70_000)),
    max_size=6,
)


@pytest.mark.slow
@given(SIZES, SIZES, st.integers(0, 1 << 32))
def test_both_sides_get_each_others_messages_however_bytes_are_cut(
    client: list[int], server: list[int], seed: int
) -> None:
    talk({True: client, False: server}, random.Random(seed))


@ROLES
@pytest.mark.parametrize("seed", range(20))
def test_messages_arrive_from_frames_of_any_length_and_padding(seed: int, is_client: bool) -> None:
    chance = random.Random(seed)
    side = in_call(is_client)
    sizes = [chance.choice((0, 1, 5, 300, 9000, 33_000)) for _ in range(8)]
    sent = [some_bytes(each, chance) for each in sizes]
    wire = b""
    for piece in cut(b"".join(prefixed(each) for each in sent), chance):
        padding = chance.choice((None, None, 0, 1, 255))
        if padding is None:
            wire += data(piece)
        else:
            wire += data(bytes([padding]) + piece + bytes(padding), PADDED)
        wire += chance.choice(
            (b"", b"", data(b""), frame(Kind.PING, bytes(8)), frame(99, b"new", 0xFF, 7))
        )
    events = [found for piece in cut(wire, chance) for found in feed(side, piece)]
    assert messages_in(events) == sent, f"{seed=}"
    assert len(events) == len(sent), f"{seed=}"


@ROLES
def test_a_message_is_read_to_where_it_is_kept(is_client: bool) -> None:
    """Of a large message only the beginning passes through other memory."""
    side = in_call(is_client)
    message = some_bytes(500_000, random.Random(1))
    feed(side, data(prefixed(message))[:100])
    room = side.room()
    assert side.wanted_bytes == len(room) == len(message) - (100 - 9 - PREFIX_BYTES)
    room[:] = message[-len(room) :]
    (event,) = side.filled(len(room))
    assert isinstance(event, Message)
    assert event.data == message
    assert side.wanted_bytes == 1


def test_an_answer_and_trailers_arrive() -> None:
    client, server = fresh(is_client=True), fresh(is_client=False)
    (begin,) = feed(server, client.opening(CALL))
    assert begin == Headers(CALL, is_last=False)
    sent = server.opening() + server.header(ANSWER, is_last=False)
    sent += server.header(TRAILERS, is_last=True) + server.reset(NO_ERROR) + server.farewell()
    assert feed(client, sent) == [Headers(ANSWER, is_last=False), Headers(TRAILERS, is_last=True)]


def test_trailers_alone_are_an_answer() -> None:
    refusal = ((":status", "200"), ("grpc-status", "16"))
    side = fresh(is_client=True)
    assert feed(side, settings() + header(refusal, END_STREAM)) == [Headers(refusal, is_last=True)]


def test_a_call_may_be_over_with_its_header() -> None:
    side = fresh(is_client=False)
    events = feed(side, PREFACE + settings() + header(CALL, END_STREAM))
    assert events == [Headers(CALL, is_last=True)]
    assert list(side.let_in()) == []


@ROLES
def test_a_header_may_be_padded_have_a_priority_and_go_on(is_client: bool) -> None:
    side = fresh(is_client)
    fields = ANSWER if is_client else CALL
    packed_fields = block(fields)
    first = b"\x07" + bytes(5) + packed_fields[:3] + bytes(7)
    sent = begun(is_client)[: -len(header(fields))]
    sent += frame(Kind.HEADERS, first, PADDED | PRIORITY, 1)
    sent += frame(Kind.CONTINUATION, packed_fields[3:9], 0, 1)
    sent += frame(Kind.CONTINUATION, b"", 0, 1)
    sent += frame(Kind.CONTINUATION, packed_fields[9:], END_HEADERS, 1)
    assert feed(side, sent) == [Headers(fields, is_last=False)]


# ------------------------------------------------------------------------ how a call ends


@ROLES
@pytest.mark.parametrize(
    ("last", "num_messages"),
    [
        (data(b"", END_STREAM), 0),
        (data(prefixed(b"last"), END_STREAM), 1),
        (data(b"\x03" + prefixed(b"") + bytes(3), END_STREAM | PADDED), 1),
        (data(b"\x00", END_STREAM | PADDED), 0),
    ],
)
def test_the_peers_side_ends_with_its_last_data(
    last: bytes, num_messages: int, is_client: bool
) -> None:
    for piece_bytes in (1, len(last)):
        side = in_call(is_client)
        events: list[Event] = []
        for at in range(0, len(last), piece_bytes):
            events += feed(side, last[at : at + piece_bytes])
        assert len(messages_in(events)) == num_messages
        assert events[num_messages:] == [Ended(NO_ERROR)]


@ROLES
def test_a_reset_ends_a_call(is_client: bool) -> None:
    side = in_call(is_client)
    # Also one that names no error: nobody has said that this was all.
    assert feed(side, frame(Kind.RST_STREAM, number(NO_ERROR), 0, 1)) == [Ended(CANCEL)]
    side = in_call(is_client)
    assert feed(side, frame(Kind.RST_STREAM, number(11), 0, 1)) == [Ended(11)]


def test_a_client_may_end_its_side_and_break_off_later() -> None:
    side = in_call(is_client=False)
    assert feed(side, data(b"", END_STREAM)) == [Ended(NO_ERROR)]
    assert feed(side, frame(Kind.RST_STREAM, number(CANCEL), 0, 1)) == [Ended(CANCEL)]


def test_after_the_trailers_nothing_changes_how_a_call_has_ended() -> None:
    side = in_call(is_client=True)
    feed(side, header(TRAILERS, END_STREAM))
    sent = frame(Kind.RST_STREAM, number(CANCEL), 0, 1) + frame(Kind.GOAWAY, number(0) + number(2))
    assert feed(side, sent) == []


def test_a_server_that_goes_away_before_the_call_has_refused_it() -> None:
    side = in_call(is_client=True)
    assert feed(side, frame(Kind.GOAWAY, number(WINDOW_MAX) + number(0))) == []
    assert feed(side, frame(Kind.GOAWAY, number(1) + number(0))) == []
    assert feed(side, frame(Kind.GOAWAY, number(0) + number(0))) == [Ended(REFUSED_STREAM)]


def test_a_client_that_goes_away_does_not_end_its_call() -> None:
    assert feed(in_call(is_client=False), frame(Kind.GOAWAY, number(0) + number(0))) == []


def test_nothing_is_reset_before_there_is_a_call() -> None:
    assert fresh(is_client=False).reset(CANCEL) == b""


# ------------------------------------------------------------------------ who is let in


def test_a_server_keeps_no_message_of_who_was_not_let_in() -> None:
    side = fresh(is_client=False)
    sent = prefixed(b"x" * 900_000)
    tracemalloc.start()
    try:
        events = feed(side, begun(is_client=False) + data(sent[:20_000]))
        taken_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert [type(each) for each in events] == [Headers]
    assert taken_bytes < 100_000
    assert list(side.let_in()) == []
    assert messages_in(feed(side, data(sent[20_000:]))) == [b"x" * 900_000]


def test_what_came_early_is_there_once_the_call_was_let_in() -> None:
    side = fresh(is_client=False)
    early = data(prefixed(b"one") + prefixed(b"two")) + data(prefixed(b""), END_STREAM)
    assert len(feed(side, begun(is_client=False) + early)) == 1
    events = list(side.let_in())
    assert messages_in(events) == [b"one", b"two", b""]
    assert events[-1] == Ended(NO_ERROR)


def test_another_call_is_refused_and_its_data_skipped() -> None:
    side = in_call(is_client=False)
    begin = data(prefixed(b"first half")[:9])
    other = header(CALL, stream=3) + data(prefixed(b"other"), stream=3)
    other += data(b"\x02more\0\0", PADDED | END_STREAM, stream=3)
    other += header(CALL, END_STREAM, stream=5)
    rest = data(prefixed(b"first half")[9:])
    for piece_bytes in (1, 1000):
        side = in_call(is_client=False)
        events: list[Event] = []
        sent = begin + other + rest
        for at in range(0, len(sent), piece_bytes):
            events += feed(side, sent[at : at + piece_bytes])
        assert messages_in(events) == [b"first half"]
        assert len(events) == 1
        answers = frames_in(b"".join(side.take_control()))
        refusal = number(REFUSED_STREAM)
        assert answers == [(Kind.RST_STREAM, 0, 3, refusal), (Kind.RST_STREAM, 0, 5, refusal)]


# ------------------------------------------------------------------------ windows


class Ledger:
    """What a peer has granted, and what was sent to it."""

    def __init__(self) -> None:
        self.connection = WINDOW_FIRST
        self.stream = WINDOW_FIRST
        self.frame_bytes = PIECE_BYTES

    def take(self, sent: bytes) -> None:
        """Count data; fail where it is more than was granted."""
        for kind, _, _, payload in frames_in(sent):
            assert kind == Kind.DATA
            assert len(payload) <= self.frame_bytes
            self.connection -= len(payload)
            self.stream -= len(payload)
            assert len(payload) == 0 or min(self.connection, self.stream) >= 0


@pytest.mark.parametrize("seed", range(20))
def test_nobody_sends_more_than_the_peer_has_granted(seed: int) -> None:
    chance = random.Random(seed)
    side, ledger = in_call(is_client=bool(seed % 2)), Ledger()
    initial = WINDOW_FIRST
    sent, received = b"", b""
    for _ in range(40):
        message = some_bytes(chance.choice((0, 1, 1000, 100_000)), chance)
        sent += prefixed(message)
        for piece in packed(side, message):
            ledger.take(piece)
            received += b"".join(each[3] for each in frames_in(piece))
            if piece and chance.random() < 0.5:
                continue
            match chance.randrange(4):
                case 0:
                    more = chance.choice((1, 5, 6, 1000, 200_000))
                    ledger.connection += more
                    feed(side, frame(Kind.WINDOW_UPDATE, number(more)))
                case 1:
                    more = chance.choice((1, 5, 6, 1000, 200_000))
                    ledger.stream += more
                    feed(side, frame(Kind.WINDOW_UPDATE, number(more), 0, 1))
                case 2:
                    ledger.frame_bytes = chance.choice((PIECE_BYTES, 40_000, (1 << 24) - 1))
                    feed(side, settings((MAX_FRAME_SIZE, ledger.frame_bytes)))
                case _:
                    # Smaller ones, too: the window may be below 0 afterwards.
                    wanted = chance.choice((0, 100, WINDOW_FIRST, 300_000))
                    ledger.stream += wanted - initial
                    initial = wanted
                    feed(side, settings((INITIAL_WINDOW_SIZE, wanted)))
            assert side.writer.sendable_bytes == min(
                ledger.frame_bytes, ledger.connection, ledger.stream
            ), f"{seed=}"
    assert received == sent, f"{seed=}"


def test_room_for_other_calls_is_no_room_for_this_one() -> None:
    side = in_call(is_client=True)
    room = side.writer.sendable_bytes
    feed(side, settings((INITIAL_WINDOW_SIZE, 0)))
    feed(side, frame(Kind.WINDOW_UPDATE, number(1000), 0, 3))
    feed(side, frame(Kind.WINDOW_UPDATE, number(1000)))
    assert (room, side.writer.sendable_bytes) == (PIECE_BYTES, 0)


@ROLES
def test_the_peers_window_is_as_wide_as_it_can_be_and_is_renewed(
    is_client: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http2, "_WINDOW_RENEWED", 50_000)
    opening = fresh(is_client).opening(CALL)
    granted = dict(
        struct.iter_unpack(">HI", frames_in(opening[len(PREFACE) if is_client else 0 :])[0][3])
    )
    windows = {0: WINDOW_MAX, 1: granted[INITIAL_WINDOW_SIZE]}
    side = in_call(is_client)
    for length in (10_000, 0, 39_990, 70_000, 1, 200_000):
        # Padding counts, and empty frames do not.
        sent = data(b"\x09" + prefixed(bytes(length)) + bytes(9), PADDED) + data(b"")
        for stream in windows:
            windows[stream] -= sum(len(each[3]) for each in frames_in(sent))
        feed(side, sent)
        for kind, _, stream, payload in frames_in(b"".join(side.take_control())):
            assert kind == Kind.WINDOW_UPDATE
            windows[stream] += int.from_bytes(payload)
            assert windows[stream] == WINDOW_MAX
        assert windows[0] == windows[1] > WINDOW_MAX - 50_000


# ------------------------------------------------------------------------ answers


@ROLES
def test_pings_and_settings_are_answered_once(is_client: bool) -> None:
    side = in_call(is_client)
    feed(side, frame(Kind.PING, b"whatever") + settings((HEADER_TABLE_SIZE, 9), (77, 1)))
    feed(side, frame(Kind.PING, b"whatever", ACK) + frame(Kind.SETTINGS, b"", ACK))
    answers = frames_in(b"".join(side.take_control()))
    assert answers == [(Kind.PING, ACK, 0, b"whatever"), (Kind.SETTINGS, ACK, 0, b"")]
    assert side.take_control() == []


@ROLES
def test_headers_need_no_table_of_the_peer(is_client: bool) -> None:
    """Whatever it says about its table, and however often, nothing is kept of it."""
    side = in_call(is_client)
    flood = settings(*((HEADER_TABLE_SIZE, size) for size in (0, 4096) * 1000))
    feed(side, flood)
    side.take_control()
    tracemalloc.start()
    try:
        for _ in range(3):
            feed(side, flood)
            side.take_control()
        kept_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert kept_bytes < 4000
    decoder = hpack.Decoder()
    decoder.max_allowed_table_size = 0
    for _ in range(2):
        (found,) = frames_in(side.header(ANSWER, is_last=False))
        fields = [(str(name), str(value)) for name, value in decoder.decode(found[3])]
        assert fields == list(ANSWER)


# ------------------------------------------------------------------------ what is refused


def in_a_call(sent: bytes) -> Callable[[bool], bytes]:
    """What comes in the middle of a call."""
    return lambda is_client: begun(is_client) + sent


def after_settings(sent: bytes) -> Callable[[bool], bytes]:
    """What comes in place of a header."""
    return lambda is_client: (b"" if is_client else PREFACE) + settings() + sent


def at_first(sent: bytes) -> Callable[[bool], bytes]:
    """What comes in place of settings."""
    return lambda is_client: (b"" if is_client else PREFACE) + sent


ENDED = data(b"", END_STREAM)
BOTH = (True, False)
CLIENT, SERVER = (True,), (False,)
BOMB = hpack.Encoder().encode([("a", "b" * 4000)]) + b"\xbe" * 9
MALFORMED = [
    ("http 1", BOTH, lambda _: b"HTTP/1.1 400 Bad Request\r\n\r\n", "not HTTP/2"),
    ("no settings", BOTH, at_first(frame(Kind.PING, bytes(8))), "does not begin with settings"),
    ("acknowledged first", BOTH, at_first(frame(Kind.SETTINGS, b"", ACK)), "does not begin"),
    ("long", BOTH, in_a_call(frame(99, bytes(32_760))), "of kind 99 with 32760 bytes"),
    ("too long", BOTH, in_a_call(b"\xff" * 9), "of kind 255 with 16777215 bytes"),
    # Messages:
    ("large", BOTH, in_a_call(data(b"\0\0\x10\0\x01")), "1048577 bytes, where 1048576 are allowed"),
    ("compressed", BOTH, in_a_call(data(b"\x01\0\0\0\x01x")), "compressed message"),
    ("half", BOTH, in_a_call(data(prefixed(b"xx")[:-1], END_STREAM)), "ended within a message"),
    ("prefix", BOTH, in_a_call(data(b"\0\0", END_STREAM)), "ended within a message"),
    ("half, trailers", SERVER, in_a_call(data(b"\0") + header(TRAILERS, END_STREAM)), "within"),
    ("padding", BOTH, in_a_call(data(b"\x05xxxx", PADDED)), "less than its padding"),
    ("no padding", BOTH, in_a_call(data(b"", PADDED) + b"\x01"), "less than its padding"),
    ("other data", BOTH, in_a_call(data(b"x", stream=3)), "data of stream 3"),
    ("data of nothing", BOTH, in_a_call(data(b"x", stream=0)), "data of stream 0"),
    ("data first", BOTH, after_settings(data(b"x")), "data of stream 1, which is not open"),
    ("data of none", SERVER, after_settings(data(b"x", stream=0)), "data of stream 0"),
    ("data after the end", BOTH, in_a_call(ENDED + data(b"")), "data of stream 1"),
    ("data after trailers", BOTH, in_a_call(header(TRAILERS, END_STREAM) + data(b"")), "data of"),
    (
        "data after a reset",
        BOTH,
        in_a_call(frame(Kind.RST_STREAM, number(8), 0, 1) + data(b"")),
        "data of stream 1",
    ),
    # Headers:
    ("zero", BOTH, after_settings(header(CALL, stream=0)), "header of stream 0"),
    ("even", BOTH, after_settings(header(CALL, stream=2)), "header of stream 2"),
    ("even later", BOTH, in_a_call(header(CALL, stream=4)), "header of stream 4"),
    ("second call", CLIENT, in_a_call(header(ANSWER, stream=3)), "header of stream 3"),
    (
        "older call",
        SERVER,
        after_settings(header(CALL, stream=9) + header(CALL, stream=7)),
        "header of stream 7",
    ),
    ("empty", BOTH, after_settings(frame(Kind.HEADERS, b"", END_HEADERS, 1)), "empty"),
    ("again", BOTH, in_a_call(header(ANSWER)), "in the wrong place"),
    ("after the end", BOTH, in_a_call(ENDED + header(TRAILERS, END_STREAM)), "wrong place"),
    (
        "padded",
        BOTH,
        after_settings(frame(Kind.HEADERS, b"\x03xx", END_HEADERS | PADDED, 1)),
        "less than its padding",
    ),
    (
        "no pad",
        BOTH,
        after_settings(frame(Kind.HEADERS, b"", END_HEADERS | PADDED, 1)),
        "less than its padding",
    ),
    (
        "priority",
        BOTH,
        after_settings(frame(Kind.HEADERS, b"1234", END_HEADERS | PRIORITY, 1)),
        "less than its padding",
    ),
    (
        "hpack",
        BOTH,
        after_settings(frame(Kind.HEADERS, b"\xff\xff\xff", END_HEADERS, 1)),
        "cannot be read",
    ),
    (
        "no text",
        BOTH,
        after_settings(frame(Kind.HEADERS, b"\x00\x01a\x01\xff", END_HEADERS, 1)),
        "cannot be read",
    ),
    ("bomb", BOTH, after_settings(frame(Kind.HEADERS, BOMB, END_HEADERS, 1)), "larger than 8192"),
    ("broken off", BOTH, after_settings(frame(Kind.HEADERS, b"", 0, 1) + settings()), "broken off"),
    ("data within", BOTH, in_a_call(frame(Kind.HEADERS, b"", 0, 1) + data(b"x")), "broken off"),
    ("goes on", BOTH, in_a_call(frame(Kind.CONTINUATION, b"", 0, 1)), "was not begun"),
    (
        "goes on elsewhere",
        BOTH,
        in_a_call(frame(Kind.HEADERS, b"", 0, 1) + frame(Kind.CONTINUATION, b"", 0, 3)),
        "was not begun",
    ),
    (
        "goes on for ever",
        BOTH,
        after_settings(
            frame(Kind.HEADERS, b"", 0, 1) + frame(Kind.CONTINUATION, bytes(3000), 0, 1) * 3
        ),
        "more than 8192 bytes",
    ),
    # What steers:
    ("settings cut", BOTH, in_a_call(frame(Kind.SETTINGS, bytes(5))), "settings of 5 bytes"),
    ("settings of a call", BOTH, in_a_call(frame(Kind.SETTINGS, b"", 0, 1)), "settings of 0"),
    ("window", BOTH, in_a_call(settings((INITIAL_WINDOW_SIZE, 1 << 31))), "window of 2147483648"),
    ("frames", BOTH, in_a_call(settings((MAX_FRAME_SIZE, 16383))), "frames of 16383 bytes"),
    ("large frames", BOTH, in_a_call(settings((MAX_FRAME_SIZE, 1 << 24))), "frames of 16777216"),
    ("ping", BOTH, in_a_call(frame(Kind.PING, bytes(7))), "ping of 7 bytes"),
    ("ping of a call", BOTH, in_a_call(frame(Kind.PING, bytes(8), 0, 1)), "ping"),
    ("update", BOTH, in_a_call(frame(Kind.WINDOW_UPDATE, bytes(3))), "number of 3 bytes"),
    ("update of 0", BOTH, in_a_call(frame(Kind.WINDOW_UPDATE, bytes(4))), "grows by nothing"),
    ("reset of 0", BOTH, in_a_call(frame(Kind.RST_STREAM, number(8))), "reset of stream 0"),
    ("reset cut", BOTH, in_a_call(frame(Kind.RST_STREAM, b"", 0, 1)), "number of 0 bytes"),
    ("goaway", BOTH, in_a_call(frame(Kind.GOAWAY, b"xx")), "number of 2 bytes"),
    ("push", BOTH, in_a_call(frame(Kind.PUSH_PROMISE, number(2), END_HEADERS, 1)), "push"),
    (
        "connection's window",
        BOTH,
        in_a_call(frame(Kind.WINDOW_UPDATE, number(WINDOW_MAX - WINDOW_FIRST + 1))),
        "too wide",
    ),
    (
        "call's window",
        BOTH,
        in_a_call(frame(Kind.WINDOW_UPDATE, number(WINDOW_MAX), 0, 1)),
        "too wide",
    ),
    (
        "window by settings",
        BOTH,
        in_a_call(
            frame(Kind.WINDOW_UPDATE, number(1), 0, 1) + settings((INITIAL_WINDOW_SIZE, WINDOW_MAX))
        ),
        "too wide",
    ),
]


@pytest.mark.parametrize(
    ("is_client", "made", "said"),
    [
        pytest.param(role, made, said, id=f"{name}-{'client' if role else 'server'}")
        for name, roles, made, said in MALFORMED
        for role in roles
    ],
)
def test_what_is_wrong_is_refused_and_named(
    is_client: bool, made: Callable[[bool], bytes], said: str
) -> None:
    sent = made(is_client)
    for seed in range(3):
        with pytest.raises(RemoteProtocolError, match=said):
            Side(is_client).take(sent, random.Random(seed))


@ROLES
def test_a_message_that_is_too_long_takes_no_memory(is_client: bool) -> None:
    side = Http2(is_client=is_client, message_bytes_max=1 << 30)
    feed(side, begun(is_client))
    list(side.let_in())
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError, match="allowed"):
            feed(side, data(b"\0\xff\xff\xff\xff"))
        assert tracemalloc.get_traced_memory()[1] < 20_000
    finally:
        tracemalloc.stop()


@ROLES
def test_a_header_that_unfolds_takes_little_memory(is_client: bool) -> None:
    side = fresh(is_client)
    start = begun(is_client)[: -len(header(ANSWER if is_client else CALL))]
    bomb = hpack.Encoder().encode([("a", "b" * 4000)]) + b"\xbe" * 5_000
    feed(side, start)
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError, match="larger"):
            feed(side, frame(Kind.HEADERS, bomb, END_HEADERS, 1))
        assert tracemalloc.get_traced_memory()[1] < 300_000
    finally:
        tracemalloc.stop()
