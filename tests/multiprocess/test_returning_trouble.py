"""A site comes back, whatever is in its way, and harms nobody."""

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

SCRIPT = Path(__file__).parent / "scripts" / "user_returns.py"


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


@pytest.mark.timeout(500)
@pytest.mark.parametrize("hangs", [False, True])
def test_a_script_without_a_sampler_comes_back_hardly_behind(run: Bench, hangs: bool) -> None:
    """What it does before it wants the state is not to be made up for; nor does it wait in vain."""
    topology = topology_yaml([(1, 1), (1, 1)], emulate=False, detect_within="5s", min_sites=1)
    topology = topology.replace("failure: {", "failure: {stall_within: 4s, ")
    if hangs:
        (run.folder / "hangs").touch()
    text = job_yaml(entrypoint=str(SCRIPT)) + f"arguments: ['10000', '{run.folder}']\n"
    run.isthmus("launch", str(run.write(topology, text)), "--detach", "--json").check()
    run.wait_for("first steps", lambda: is_training(run, 5))
    agent = run.pids("isthmus.sites.agent", "--site b")[0]
    kill(run.children(agent, "isthmus.sites.node.rank")[-1])

    def events(kind: str) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = run.isthmus("events", "--json").envelope["data"]["events"]
        return [each for each in told if each["kind"] == kind]

    run.wait_for("the site's return", lambda: bool(events("site.returned")), 240)
    stalled = [(each["site"], each["detail"]["note"]) for each in events("rank.stalled")]
    assert [site for site, _ in stalled] == ["b"] * hangs
    assert all("user_returns.py" in note for _, note in stalled)
    returned = events("site.resumed")[-1]
    behind = [each["detail"].get("behind", 0) for each in events("site.resumed")]
    assert max(behind) < 20, returned
    run.isthmus("cancel").check()
    run.wait_for_nothing_left(30.0)
