"""A node whose disk is full: its site is started again once, and then stays out."""

from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.harness import UNDER_BOTH_SECURITIES, Bench, job_yaml, topology_yaml

pytestmark = [
    UNDER_BOTH_SECURITIES,
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.timeout(300),
]

SCRIPT = Path(__file__).parent / "scripts" / "user_bad_node.py"


def test_a_node_that_is_at_fault_twice_is_kept_out_until_it_is_mended(run: Bench) -> None:
    topology = topology_yaml([(1, 1), (2, 1)], emulate=False, detect_within="5s", min_sites=1)
    text = job_yaml(entrypoint=str(SCRIPT)) + f"arguments: ['100000', '{run.folder}']\n"
    process = run.start("launch", str(run.write(topology, text)), "--json")

    def told(kind: str) -> list[dict[str, Any]]:
        events = run.isthmus("events", "--json").envelope["data"]["events"]
        return [each for each in events if each["kind"] == kind]

    run.wait_for("the run", lambda: bool([*run.home.glob("runs/*/metrics.jsonl")]), 60)
    run.wait_for("the second fault", lambda: bool(told("node.kept_out")), 150)
    [kept_out] = told("node.kept_out")
    note = kept_out["detail"]["note"]
    assert (kept_out["site"], kept_out["detail"]["node"]) == ("b", 1), kept_out
    assert note.startswith(
        "node 1 of site b is kept out: its machine was at fault twice, last: rank 1 of site b exited"
    ), note
    assert "No space left on device: '/scratch/activations'" in note
    assert "set `nodes: 1` for it" in note
    assert len(told("site.returning")) == 1
    failures = [each["detail"] for each in told("failure.reported")]
    assert {each["code"] for each in failures if not each["collateral"]} == {"NODE_FAULTY"}
    shown = run.isthmus("status", "--json").check().envelope["data"]
    assert shown["state"] == "ACTIVE"
    assert any("is kept out" in each for each in shown["notes"]), shown["notes"]

    (run.folder / "mended").touch()
    num_returned = len(told("site.returned"))
    run.isthmus("sites", "add", "b", "--json").check()
    run.wait_for("the return", lambda: len(told("site.returned")) > num_returned, 100)
    run.isthmus("cancel", "--json").check()
    process.communicate(timeout=60)
    run.wait_for_nothing_left(15.0)
