"""The only other site is lost while one comes back: the run goes on from the state that is left."""

import pytest

from tests.multiprocess.harness import UNDER_BOTH_SECURITIES, Bench, kill, topology_yaml
from tests.multiprocess.test_lost_site import is_training, steps_of
from tests.multiprocess.test_returning_link import JOB, STEPS, gateway, wait_for_pieces

pytestmark = [
    UNDER_BOTH_SECURITIES,
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.timeout(400),
]


@pytest.mark.parametrize("when", ["fetching", "following"])
def test_the_run_goes_on_though_the_site_that_gave_its_state_is_lost(run: Bench, when: str) -> None:
    topology = topology_yaml(
        [(1, 1), (1, 1)], emulate=False, detect_within="5s", min_sites=1, bandwidth="200Mbit/s"
    )
    job = run.write(topology, JOB)
    process = run.start("launch", str(job), "--json")
    run.wait_for("first steps", lambda: is_training(run, 4))
    kill(gateway(run, "b"))
    if when == "fetching":
        wait_for_pieces(run, 2)
    else:
        run.wait_for("the state", lambda: any(each["kind"] == "entry" for each in run.metrics()))
    kill(gateway(run, "a"))
    out, err = process.communicate(timeout=250)
    assert process.returncode == 0, f"{out}\n{err}\n{run.logs()}"
    assert steps_of(run, "b")[-1] == STEPS, "from the state that it has taken over"
    events = run.isthmus("events", "--json").check().envelope["data"]["events"]
    kinds = [(each["kind"], each["site"]) for each in events]
    assert ("site.returned", "b") in kinds
    run.wait_for_nothing_left(15.0)
