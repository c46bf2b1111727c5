"""Whole runs in rounds that wait for nobody."""

import json
from pathlib import Path

import pytest

from tests.multiprocess.harness import UNDER_BOTH_SECURITIES, Bench, job_yaml, kill, topology_yaml
from tests.multiprocess.test_local_regimes import values_of
from tests.multiprocess.test_lost_site import is_training, victim

pytestmark = [UNDER_BOTH_SECURITIES, pytest.mark.multiprocess, pytest.mark.slow]

SYNC_EVERY = 8
SCRIPT = Path(__file__).parent / "scripts" / "user_open.py"
SETTINGS = [
    word
    for each in ("regime.kind=diloco", f"regime.sync_every={SYNC_EVERY}", "regime.min_steps=2")
    for word in ("--set", each)
]


def write_job(run: Bench, *arguments: int) -> Path:
    topology = topology_yaml(
        [(1, 1), (1, 2), (1, 1)], emulate=False, detect_within="5s", min_sites=1
    )
    text = job_yaml(steps=1) + f"entrypoint: {SCRIPT}\narguments: {[*map(str, arguments)]}\n"
    return run.write(topology, text)


def samples_of(run: Bench, site: str) -> list[int]:
    """Return the samples with which a site counts in the run's rounds."""
    counted = {
        step: int(each["round_steps"])
        for step, each in values_of(run, "step", site).items()
        if "round_steps" in each
    }
    found = []
    for path in run.folder.rglob(f"progress/{site}-*.jsonl"):
        for line in path.read_text().splitlines():
            step, _, places = json.loads(line)
            landing = (step // SYNC_EVERY + 1) * SYNC_EVERY
            taken = sum(
                1
                for other in path.read_text().splitlines()
                if landing - SYNC_EVERY <= json.loads(other)[0] < step
            )
            if taken < counted.get(landing, 0):
                found += places
    return found


def test_a_site_that_stands_holds_nobody_up(run: Bench) -> None:
    """The others go on meanwhile, for several rounds; no sample is used twice."""
    steps = 25 * SYNC_EVERY
    job = write_job(run, steps, 5 * SYNC_EVERY + 3, 12 * SYNC_EVERY)
    run.isthmus("launch", str(job), *SETTINGS).check()
    status = run.isthmus("status", "--json").check().envelope["data"]
    assert status["state"] == "SUCCEEDED"
    of_b = values_of(run, "step", "b")
    passed_over = [step for step, each in of_b.items() if each.get("round_steps") == 0]
    assert len(passed_over) >= 5, passed_over
    landings = [*range(SYNC_EVERY, steps + 1, SYNC_EVERY)]
    for site in "abc":
        own = values_of(run, "step", site)
        assert [step for step, each in own.items() if "round_steps" in each] == landings, site
    assert sum(each.get("round_steps", 0) for each in values_of(run, "step", "c").values()) < steps
    used = [each for site in "abc" for each in samples_of(run, site)]
    assert len(set(used)) == len(used), "twice"
    events = run.isthmus("events", "--json").check().envelope["data"]["events"]
    assert any("was passed over" in str(each) for each in events)


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_a_site_is_lost_while_another_stands_and_comes_back_later(run: Bench) -> None:
    """A site that comes back waits for all, so the other stands no more by then."""
    job = write_job(run, 250 * SYNC_EVERY, 20 * SYNC_EVERY + 3, 26 * SYNC_EVERY)
    process = run.start("launch", str(job), "--json", *SETTINGS)
    run.wait_for("first steps", lambda: is_training(run, 5))
    kill(victim(run, "gateway"))
    out, err = process.communicate(timeout=250)
    assert process.returncode == 0, f"{out}\n{err}\n{run.logs()}"
    events = run.isthmus("events", "--json").check().envelope["data"]["events"]
    assert "site.returned" in [each["kind"] for each in events]
    used = [each for site in "ab" for each in samples_of(run, site)]
    assert len(set(used)) == len(used), "twice"
    run.wait_for_nothing_left(15.0)
