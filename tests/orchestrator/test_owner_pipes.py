"""An emulator's conversation with its owner.

Long messages, late readers, lines that come together.
"""

from __future__ import annotations

import json
import os
import select
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from isthmus.orchestrator.emulator.emulator_config import Apply, Counted, RelayEndpoint, Up
from isthmus.orchestrator.emulator.owner_pipes import (
    COUNTERS_EVERY_S,
    FLUSH_EVERY_S,
    Conversation,
    LineReader,
)
from isthmus.topology.faults.script import Change
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.json_fields import to_json
from isthmus.topology.spec.json_lines import line_of

WITHIN_S = 20.0
READY = Up()
WIDE = Counted(links=({"x": "x" * 200},) * 8000)
"""Of the largest full mesh: many times what a pipe holds."""


@dataclass
class Talk:
    """A conversation whose other end is held here."""

    to_emulator: int
    from_emulator: int
    stdin: LineReader
    conversation: Conversation
    obeyed: list[Change]

    def say(self, text: bytes) -> None:
        os.write(self.to_emulator, text)
        self.stdin.read()

    def hear(self) -> bytes:
        assert select.select([self.from_emulator], [], [], WITHIN_S)[0], "nothing is said"
        return os.read(self.from_emulator, 1 << 20)

    def hear_line(self) -> bytes:
        heard = b""
        while not heard.endswith(b"\n"):
            heard += self.hear()
        return heard


@pytest.fixture
def talk() -> Iterator[Talk]:
    stdin, to_emulator = os.pipe()
    from_emulator, stdout = os.pipe()
    obeyed: list[Change] = []

    def obey(changes: Sequence[Change]) -> None:
        if changes[0].kind == "reset":
            raise ConfigError("this one is wrong")
        obeyed.extend(changes)

    reader = LineReader(stdin)
    conversation = Conversation(reader, stdout, obey, lambda: WIDE)
    try:
        yield Talk(to_emulator, from_emulator, reader, conversation, obeyed)
    finally:
        for descriptor in (stdin, to_emulator, from_emulator, stdout):
            os.close(descriptor)


def test_a_message_longer_than_a_pipe_goes_as_fast_as_it_is_read(talk: Talk) -> None:
    now_s = 100.0
    talk.conversation.begin(READY, now_s)
    assert json.loads(talk.hear()) == to_json(READY)
    assert talk.conversation.turn(now_s) == now_s + COUNTERS_EVERY_S, "nothing is to be said"
    now_s += COUNTERS_EVERY_S
    heard = b""
    while (until_s := talk.conversation.turn(now_s)) == now_s + FLUSH_EVERY_S:
        heard += talk.hear()
        now_s = until_s
    heard += talk.hear()
    assert json.loads(heard) == to_json(WIDE)
    assert now_s < 100.0 + 2 * COUNTERS_EVERY_S, "not one pipe a report"


def test_an_answer_is_never_dropped_behind_counters_that_are_not_read(talk: Talk) -> None:
    talk.conversation.begin(READY, 0.0)
    cut, wrong, heal = (
        Change(kind=kind, source="a", target="b") for kind in ("cut", "reset", "heal")
    )
    lines = [line_of(Apply(changes=(change,))) for change in (cut, wrong, heal)]
    begun, rest = lines[2][:9], lines[2][9:]
    talk.say(lines[0] + lines[1] + begun)
    heard = b""
    for turn in range(200):
        talk.conversation.turn(turn * FLUSH_EVERY_S)
        heard += talk.hear()
        if turn == 2:
            talk.say(rest)
        if heard.count(b"applied") == 2 and heard.endswith(b"\n"):
            break
    told = [json.loads(line) for line in heard.splitlines()]
    answers = [each for each in told if each["op"] in ("applied", "refused")]
    assert answers == [
        {"op": "applied", "endpoints": []},
        {"op": "refused", "why": "this one is wrong"},
        {"op": "applied", "endpoints": []},
    ]
    assert talk.obeyed == [cut, heal]


def test_an_emulator_that_leads_to_no_gateways_says_so(talk: Talk) -> None:
    talk.conversation.begin(READY, 0.0)
    talk.hear()
    gateway = RelayEndpoint(source="a", target="b", gateway=0, host="127.0.0.1", port=9)
    talk.say(line_of(Apply(endpoints=(gateway,))))
    talk.conversation.turn(0.0)
    assert json.loads(talk.hear().splitlines()[0]) == {
        "op": "refused",
        "why": "endpoints: only a relay leads to gateways",
    }


@pytest.mark.slow
def test_the_last_counters_are_said_whole_or_given_up(talk: Talk) -> None:
    talk.conversation.begin(READY, 0.0)
    talk.hear()
    with ThreadPoolExecutor(1) as owner:
        heard = owner.submit(talk.hear_line)
        talk.conversation.end()
        assert json.loads(heard.result(2 * WITHIN_S)) == to_json(WIDE)
    talk.conversation.end()  # nobody reads: it returns all the same


def test_reading_without_need_waits_for_nothing(talk: Talk) -> None:
    talk.stdin.read()
    assert (list(talk.stdin.lines()), talk.stdin.has_ended) == ([], False)


def test_an_emulator_that_was_stopped_for_hours_reports_once(talk: Talk) -> None:
    talk.conversation.begin(READY, 0.0)
    talk.hear()
    until_s = talk.conversation.turn(7200.0)
    heard = b""
    while not heard.endswith(b"\n"):
        heard += talk.hear()
        until_s = talk.conversation.turn(7200.5)
    assert heard.count(b"\n") == 1
    assert until_s == 7200.0 + COUNTERS_EVERY_S
