"""Every kind of event has words, and they hold with whatever its detail has."""

import ast
import re
from pathlib import Path

import pytest

from isthmus import orchestrator
from isthmus.orchestrator.core.event_kinds import EventKind, text_of
from isthmus.topology.spec.exporters import EVENTS

LEADS_NOWHERE = re.compile(r"^[:;,]|[:;,]$|\s[:;,]|  |[{}]")


@pytest.mark.parametrize("kind", EventKind)
def test_each_kind_has_words(kind: EventKind) -> None:
    assert kind.text
    assert kind.seen.exported in {"", *EVENTS}
    for text in (text_of(kind, "a", {}), text_of(kind, "", {"why": "b: c"})):
        assert text
        assert not LEADS_NOWHERE.search(text), text


def test_no_kind_is_written_out_elsewhere() -> None:
    folder, kinds = Path(next(iter(orchestrator.__path__))), set(map(str, EventKind))
    found = [
        f"{path.name}:{node.lineno}"
        for path in folder.rglob("*.py")
        if path.name != "event_kinds.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in kinds
    ]
    assert found == []


@pytest.mark.parametrize(
    ("kind", "detail", "text"),
    [
        ("site.lost", {"message": "its lease expired"}, "site a was lost: its lease expired"),
        ("site.lost", {}, "site a was lost"),
        ("site.lost", {"note": "the run continues without a"}, "the run continues without a"),
        ("epoch.begun", {"epoch": 3, "members": ["a", "b"]}, "epoch 3: a, b take part"),
        ("session.resumed", {"silent_s": 1.23456}, "again after 1.23 s: nothing was lost"),
        ("run.ended", {"state": "SUCCEEDED", "reason": ""}, "run r SUCCEEDED"),
        ("run.ended", {"state": "SUCCEEDED", "note": "sites lost: b"}, "SUCCEEDED; sites lost: b"),
        ("run.ended", {"state": "FAILED", "reason": "{x}: y"}, "run r FAILED: {x}: y"),
        ("of.another_build", {"why": "x"}, "of.another_build a"),
    ],
)
def test_text(kind: str, detail: dict[str, object], text: str) -> None:
    assert text_of(kind, "a", detail, "r").endswith(text)
