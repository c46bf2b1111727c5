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


LINES: Kinds[Look | PassedOn] = Kinds("agent to node", Look | PassedOn)


@pytest.mark.parametrize("message", [Look(rank=3), PassedOn(message=LookedAt(stack=("a",)))])
def test_a_line_is_read_as_the_message_that_was_written(message: Look | PassedOn) -> None:
    assert LINES.read(line_of(message)) == message
    assert message.op in {"look", "passed_on"}


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
