"""Messages as lines: what is written is read again, and a mistake names its place."""

from __future__ import annotations

import pytest

from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.json_fields import Message
from isthmus.topology.spec.json_lines import Kinds, line_of


class Look(Message):
    rank: int


class LookedAt(Message):
    rank: int = 0
    stack: tuple[str, ...] = ()


class PassedOn(Message):
    message: Look | LookedAt
    key: bytes = b""


Said = Look | PassedOn
LINES: Kinds[Said] = Kinds("agent to node", Said)


@pytest.mark.parametrize(
    "message", [Look(rank=3), PassedOn(message=LookedAt(stack=("a",)), key=b"\x00secret")]
)
def test_a_line_is_read_as_the_message_that_was_written(message: Said) -> None:
    assert LINES.read(line_of(message)) == message
    assert message.op in {"look", "passed_on"}


def test_fields_of_another_build_may_be_skipped() -> None:
    unknown: list[str] = []
    lines: Kinds[Said] = Kinds("launcher to tether", Said, on_unknown=unknown.append)
    assert lines.read(b'{"op": "look", "rank": 3, "node": 1}') == Look(rank=3)
    assert unknown == ["look.node"]


def test_a_secret_is_not_in_the_error() -> None:
    line = b'{"op": "passed_on", "message": {"op": "look", "rank": 1}, "key": "not base64!"}'
    with pytest.raises(ConfigError, match=r"agent to node: passed_on\.key: want base64$"):
        LINES.read(line)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "the line is not JSON"),
        (b"[]", "the message: want an object with one of the ops look, passed_on"),
        (b'{"op": "leave"}', "the message: want an object with one of the ops look, passed_on"),
        (b'{"op": ["look"]}', "the message: want an object with one of the ops look, passed_on"),
        (b'{"op": "look", "rank": "x"}', "look.rank: want int, got 'x'"),
        (b'{"op": "look"}', "look.rank is missing"),
        (b'{"op": "look", "rank": 3, "node": 1}', "look.node: unknown"),
        (
            b'{"op": "passed_on", "message": {"op": "looked_at", "rank": 1.5}}',
            "passed_on.message.looked_at.rank: want int, got 1.5",
        ),
        (
            b'{"op": "passed_on", "message": {"rank": 1}}',
            "passed_on.message: want an object with one of the ops look, looked_at",
        ),
    ],
)
def test_a_mistake_is_named_with_its_place(line: bytes, said: str) -> None:
    with pytest.raises(ConfigError, match=f"agent to node: {said}"):
        LINES.read(line)
