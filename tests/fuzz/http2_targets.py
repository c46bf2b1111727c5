"""What comes at a gateway's port, and back from one: HTTP/2, and gRPC's messages in it."""

from __future__ import annotations

from isthmus.protos.errors import RemoteProtocolError
from isthmus.sites.gateway.links.http2 import CANCEL, NO_ERROR, Headers, Http2
from tests.fakes.http2_frames import (
    ANSWER,
    CALL,
    END_STREAM,
    PADDED,
    TRAILERS,
    begun,
    data,
    feed,
    header,
    prefixed,
    settings,
)
from tests.fuzz.target import KIB, Target

_MESSAGE_BYTES_MAX = 64 * KIB
_HEADER_BYTES_MAX = 32 * KIB
_PIECE_BYTES = 300
_FRAME_BYTES_MAX = (1 << 24) - 1


def _decode(is_client: bool, sent: bytes) -> None:
    """Take bytes as one side does; as a server, let in whoever calls."""
    side = Http2(is_client=is_client, message_bytes_max=_MESSAGE_BYTES_MAX)
    for at in range(0, len(sent), _PIECE_BYTES):
        found = feed(side, sent[at : at + _PIECE_BYTES])
        if not is_client and any(isinstance(each, Headers) for each in found):
            for _ in side.let_in():
                pass
        side.take_control()
        assert side.wanted_bytes >= 1
        assert side.writer.sendable_bytes <= _FRAME_BYTES_MAX


def _samples(is_client: bool) -> list[bytes]:
    own, other = (Http2(is_client=each, message_bytes_max=0) for each in (is_client, not is_client))
    if is_client:
        feed(other, own.opening(CALL))
        begin = other.opening() + other.header(ANSWER, is_last=False)
        last = [other.header(TRAILERS, is_last=True) + other.reset(NO_ERROR) + other.farewell()]
    else:
        begin = other.opening(CALL)
        last = [data(b"", END_STREAM), other.reset(CANCEL)]
    message = prefixed(bytes(range(40)))
    messages = data(prefixed(bytes(40))) + data(message[:3]) + data(message[3:])
    messages += data(b"\x04" + message + message + bytes(4), PADDED)
    beside = b"" if is_client else header(CALL, stream=3) + data(b"x", stream=3)
    steered = settings((1, 0), (4, 1 << 20), (5, 1 << 20)) + other.farewell()
    return [
        begin,
        *(begin + messages + each for each in last),
        begun(is_client) + steered + beside + data(message),
        settings() + header((*ANSWER, *TRAILERS), END_STREAM) if is_client else begun(False),
    ]


def _target(is_client: bool) -> Target:
    return Target(
        name="http2-client" if is_client else "http2-server",
        decode=lambda sent: _decode(is_client, sent),
        refusals=(RemoteProtocolError,),
        samples=lambda: _samples(is_client),
        # Its own memory, a message, a header as it came and unfolded; objects of small messages.
        most_bytes=lambda sent: (
            64 * KIB + _MESSAGE_BYTES_MAX + 4 * _HEADER_BYTES_MAX + 150 * _PIECE_BYTES
        ),
    )


HTTP2_TARGETS = (_target(True), _target(False))
