"""A site comes back though the other cannot write its state at first, which harms nobody."""

from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.harness import UNDER_BOTH_SECURITIES, Bench, job_yaml, kill, topology_yaml
from tests.multiprocess.test_lost_site import is_training, steps_of, victim

pytestmark = [
    UNDER_BOTH_SECURITIES,
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.timeout(300),
]


def test_a_state_that_cannot_be_written_ends_no_healthy_site(run: Bench) -> None:
    topology = topology_yaml(
        [(1, 2), (1, 1), (1, 1)], emulate=False, detect_within="5s", min_sites=1
    )
    text = job_yaml(steps=9999, codec="int8") + "begin_with: [a, c]\n"
    process = run.start("launch", str(run.write(topology, text)), "--json")
    run.wait_for("first steps", lambda: is_training(run, 5))
    [node] = Path(run.home).glob("**/sites/a/node0")
    in_the_way = node / "entry"
    in_the_way.touch()

    def told(kind: str) -> list[dict[str, Any]]:
        events = run.isthmus("events", "--json").check().envelope["data"]["events"]
        return [each for each in events if each["kind"] == kind]

    kill(victim(run, "gateway"))
    run.wait_for("the failure", lambda: bool(told("state.failed")), 60)
    in_the_way.unlink()
    run.wait_for("the return", lambda: bool(told("site.returned")), 90)
    [failed] = told("state.failed")
    assert failed["site"] == "a"
    assert f"{in_the_way}/epoch-" in failed["detail"]["reason"]
    assert "Not a directory" in failed["detail"]["reason"]
    said = [str(each["detail"]) for each in told("site.ended")]
    assert any("site a (gateway 0" in each and "Not a directory" in each for each in said), said
    run.isthmus("cancel", "--json").check()
    process.communicate(timeout=60)
    steps = steps_of(run, "a")
    assert steps == [*range(1, len(steps) + 1)]
    run.wait_for_nothing_left(15.0)
