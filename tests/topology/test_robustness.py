"""Whatever stands in a document, the answer is what it describes, or problems.

Never a traceback.
"""

import json
import random
from collections.abc import Callable

import pytest

from isthmus.topology.documents.load import load_job, load_topology
from isthmus.topology.faults.loading import load_faults
from isthmus.topology.faults.script import FaultScript, expand
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.text.yaml_document import read_document
from tests.topology import fault_documents
from tests.topology.documents import JOB, TOPOLOGY

JUNK: list[object] = [
    None, True, False, 0, -1, 1e30, "", "x", "oregon", "h100", "80ms", "1Gbit/s", "10.0.0.1:1", [], {},
    [[]], ["oregon", "oregon"], [1, 2], {"like": "oregon"}, {"between": ["ohio", "oregon"]}, [{}],
    {"x": {"y": []}}, "all", "1s..2s", "2s..1s", "..", [["east"], ["west"]], ["east", "middle"], "west",
    "é" * 99, 10**18, {"version": 1}, [None], {"name": []},
]  # fmt: skip


CHAIN = load_topology(fault_documents.TOPOLOGY, "chain.yaml")


def spoilt(value: object, chance: random.Random) -> object:
    """Return a copy in which some values, keys and items are replaced, removed or added."""
    if chance.random() < 0.01:
        return chance.choice(JUNK)
    if isinstance(value, dict):
        kept = {key: spoilt(item, chance) for key, item in value.items() if chance.random() > 0.01}
        if chance.random() < 0.02:
            kept[chance.choice(["name", "like", "rtt", "cut", "for", "x", "0"])] = chance.choice(
                JUNK
            )
        return kept
    if isinstance(value, list):
        kept_items = [spoilt(item, chance) for item in value if chance.random() > 0.01]
        return kept_items + ([chance.choice(JUNK)] if chance.random() < 0.02 else [])
    return value


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_spoilt_documents_are_refused_with_problems_only(seed: int) -> None:
    chance = random.Random(seed)
    loads: list[Callable[[str, str], object]] = [load_topology, load_job, load_script]
    texts = (TOPOLOGY, JOB, fault_documents.SCRIPT)
    sources = [read_document(text, "right.yaml").value for text in texts]
    for attempt in range(40):
        for load, source in zip(loads, sources, strict=True):
            text = json.dumps(spoilt(source, chance), indent=1, ensure_ascii=False)
            try:
                load(text, "spoilt.yaml")
            except ConfigError as error:
                lines = text.split("\n")
                for problem in error.problems:
                    assert problem.message, f"{seed=} {attempt=}"
                    assert 1 <= problem.line <= len(lines), f"{seed=} {attempt=}"
                    assert 1 <= problem.column <= len(lines[problem.line - 1]) + 1
                    assert str(problem).count("^") >= 1 or not problem.excerpt


def load_script(text: str, source: str) -> FaultScript:
    script = load_faults(text, source, CHAIN)
    assert list(expand(script)) == sorted(expand(script), key=lambda each: each.at_s)
    return script


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_spoilt_overrides_are_refused_with_problems_only(seed: int) -> None:
    chance = random.Random(seed)
    parts = ["sites", "links", "0", "1", "9", "-1", "rtt", "between", "name", "x", "", "wan", "é"]
    for attempt in range(60):
        path = ".".join(chance.choices(parts, k=chance.randint(1, 4)))
        override = f"{path}{chance.choice(['=', '', '=='])}{json.dumps(chance.choice(JUNK))}"
        for load, text in ((load_topology, TOPOLOGY), (load_job, JOB)):
            assert outcome(load, text, override), f"{seed=} {attempt=} {override=}"


def outcome(load: Callable[..., object], text: str, override: str) -> object:
    """Return the loaded document, or the problems."""
    try:
        return load(text, "t.yaml", [override])
    except ConfigError as error:
        return error.problems
