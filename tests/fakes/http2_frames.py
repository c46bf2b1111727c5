"""HTTP/2 written by hand: what a peer of another make sends, or a hostile one."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Iterator

import hpack

from isthmus.sites.gateway.links.http2 import Event, Http2, Kind

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
HEADER_TABLE_SIZE, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 1, 4, 5
CALL = ((":method", "POST"), (":scheme", "http"), (":path", "/a/b"), ("te", "trailers"))
ANSWER = ((":status", "200"), ("content-type", "application/grpc"))
TRAILERS = (("grpc-status", "0"),)


def frame(kind: int, payload: bytes = b"", flags: int = 0, stream: int = 0) -> bytes:
    """Return one frame, whatever it says."""
    head = struct.pack(">BHBBI", len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream)
    return head + payload


def number(value: int) -> bytes:
    """Return 32 bits of a payload."""
    return struct.pack(">I", value)


def settings(*pairs: tuple[int, int]) -> bytes:
    """Return settings."""
    return frame(Kind.SETTINGS, b"".join(struct.pack(">HI", *each) for each in pairs))


def block(fields: Iterable[tuple[str, str]]) -> bytes:
    """Return a header as HPACK has it, which leaves nothing in the peer's table."""
    never_kept = ((name, value, True) for name, value in fields)
    return hpack.Encoder().encode(never_kept)


def header(fields: Iterable[tuple[str, str]], flags: int = 0, stream: int = 1) -> bytes:
    """Return a header in one frame."""
    return frame(Kind.HEADERS, block(fields), END_HEADERS | flags, stream)


def data(piece: bytes, flags: int = 0, stream: int = 1) -> bytes:
    """Return a frame of data."""
    return frame(Kind.DATA, piece, flags, stream)


def prefixed(message: bytes) -> bytes:
    """Return a message as gRPC has it."""
    return struct.pack(">BI", 0, len(message)) + message


def begun(is_client: bool) -> bytes:
    """Return what a peer of a client, or of a server, begins with: its call, or its answer."""
    if is_client:
        return settings() + header(ANSWER)
    return PREFACE + settings() + header(CALL)


def cut(sent: bytes, chance: random.Random) -> Iterator[bytes]:
    """Cut bytes anywhere: into single ones, into a few pieces, or not at all."""
    most = max(chance.choice((1, 3, 20, 300, 5000, 1 << 20)), len(sent) // 300)
    at = 0
    while at < len(sent):
        length = chance.randint(1, most)
        yield sent[at : at + length]
        at += length


def feed(side: Http2, sent: bytes) -> list[Event]:
    """Give bytes to one side, as much at a time as it has room for; return what they say."""
    events: list[Event] = []
    at = 0
    while at < len(sent):
        room = side.room()
        assert len(room), "there is always room"
        piece = sent[at : at + len(room)]
        room[: len(piece)] = piece
        events += side.filled(len(piece))
        at += len(piece)
    return events


def frames_in(sent: bytes) -> list[tuple[int, int, int, bytes]]:
    """Return kind, flags, stream and payload of each frame of bytes without a preface."""
    found = []
    at = 0
    while at < len(sent):
        high, low, kind, flags, stream = struct.unpack_from(">BHBBI", sent, at)
        end = at + 9 + (high << 16 | low)
        assert end <= len(sent), "a frame was cut off"
        found.append((kind, flags, stream, sent[at + 9 : end]))
        at = end
    return found
