"""Messages as lines: what is written is read again, and a mistake names its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.json_lines import Kinds, line_of


@dataclass(frozen=True)
class Look:
    op: ClassVar[str] = "look"
    rank: int


@dataclass(frozen=True)
class Passed:
    op: ClassVar[str] = "passed"
    message: Any


LINES: Kinds[Look | Passed] = Kinds(Look, Passed)


@pytest.mark.parametrize("message", [Look(3), Passed({"op": "metric", "values": [1, None]})])
def test_a_line_is_read_as_the_message_that_was_written(message: Look | Passed) -> None:
    assert LINES.read(line_of(message)) == message


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "the line is not JSON"),
        (b"[]", "want an object with one of the ops look, passed"),
        (b'{"op": "leave"}', "want an object with one of the ops look, passed"),
        (b'{"op": ["look"]}', "want an object with one of the ops look, passed"),
        (b'{"op": "look", "rank": "x"}', "look.rank: want int, got 'x'"),
        (b'{"op": "look"}', "look.rank is missing"),
        (b'{"op": "look", "rank": 3, "node": 1}', "look.node: unknown"),
    ],
)
def test_a_mistake_is_named_with_its_place(line: bytes, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LINES.read(line)
