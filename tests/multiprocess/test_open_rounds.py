"""Whole runs in rounds that wait for nobody.

What a rank does in them is in tests/sites/test_open_steps.py, test_round_clock.py and
test_worker_sampler.py.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from isthmus.protos.checkpoint.store import checkpoints_in
from tests.multiprocess.harness import (
    UNDER_BOTH_SECURITIES,
    Bench,
    job_yaml,
    kill,
    metrics_of,
    topology_yaml,
)
from tests.multiprocess.test_coordinator_restart import Deployment
from tests.multiprocess.test_local_regimes import values_of
from tests.multiprocess.test_lost_site import is_training, victim

pytestmark = [
    *(UNDER_BOTH_SECURITIES, pytest.mark.multiprocess, pytest.mark.slow),
    pytest.mark.exhaustive,
]

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
    return run.write(topology, job_yaml(steps=1) + script_of(run, "progress", *arguments))


def script_of(run: Bench, progress: str, *arguments: int) -> str:
    """Return a job's lines for the script, which leaves in a folder what it has used."""
    words = [*map(str, arguments), str(run.folder / progress)]
    return f"entrypoint: {SCRIPT}\narguments: {words}\n"


def samples_of(progress: Path, counted: Mapping[int, float], site: str) -> list[int]:
    """Return the samples with which a site counts in rounds, by the steps counted in each."""
    found = []
    for path in progress.glob(f"{site}-*.jsonl"):
        used = [json.loads(line) for line in path.read_text().splitlines()]
        for step, _, places in used:
            landing = (step // SYNC_EVERY + 1) * SYNC_EVERY
            taken = sum(1 for other, *_ in used if landing - SYNC_EVERY <= other < step)
            if taken < counted.get(landing, 0):
                found += places
    return found


def counted_in(metrics: Iterable[Mapping[str, Any]], site: str) -> dict[int, float]:
    """Return with how many steps a site counts in each round."""
    return {
        each["step"]: each["values"]["round_steps"]
        for each in metrics
        if each["kind"] == "step" and each["site"] == site and "round_steps" in each["values"]
    }


def stores(run: Bench, every: str) -> list[str]:
    """Return settings that keep all checkpoints."""
    return ["--set", f"checkpoint={{every: {every}, keep: 99, to: {run.folder}/stored}}"]


def stored_without_b(run: Bench) -> dict[int, str]:
    """Return where checkpoints are that were written while site b stood, by step."""
    found = {}
    for checkpoint in checkpoints_in(str(run.folder / "stored" / "one")):
        manifest = checkpoint.manifest()
        if "b" not in manifest.ranks:
            found[manifest.step] = checkpoint.place
    return found


def check_samples(run: Bench, sites: str) -> None:
    """Check that no sample of the run's rounds was used twice."""
    metrics, progress = run.metrics(), run.folder / "progress"
    used = [
        sample for site in sites for sample in samples_of(progress, counted_in(metrics, site), site)
    ]
    assert len(set(used)) == len(used), "twice"


def test_a_site_that_stands_holds_nobody_up(run: Bench) -> None:
    """The others go on meanwhile, for several rounds; no sample is used twice."""
    steps = 25 * SYNC_EVERY
    job = write_job(run, steps, 5 * SYNC_EVERY + 3, 12 * SYNC_EVERY)
    run.isthmus("launch", str(job), *SETTINGS, "--run-id", "one", *stores(run, "16 steps")).check()
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
    check_samples(run, "abc")
    assert {*stored_without_b(run)} == {
        step for step in passed_over if step % (2 * SYNC_EVERY) == 0
    }
    events = run.isthmus("events", "--json").check().envelope["data"]["events"]
    assert any("was passed over" in str(each) for each in events)


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
    check_samples(run, "ab")
    run.wait_for_nothing_left(15.0)


@pytest.mark.timeout(300)
def test_a_coordinator_is_killed_in_a_round_and_another_run_goes_on(run: Bench) -> None:
    """From a checkpoint in which the site that stood has no part. No sample is used twice."""
    steps, stands_at, until = 25 * SYNC_EVERY, 3 * SYNC_EVERY + 3, 18 * SYNC_EVERY
    progress, other = run.folder / "progress", run.folder / "other"
    keys = ", ".join(each.removeprefix("regime.").replace("=", ": ") for each in SETTINGS[1::2])
    more = script_of(run, "progress", steps, stands_at, until)
    more += f"regime: {{{keys}}}\ncheckpoint: {{every: 2s, keep: 99, to: {run.folder}/stored}}\n"
    deployed = Deployment(run, job_yaml(steps=1) + more)

    def has_passed_over() -> bool:
        reached = progress / "a"
        return reached.exists() and int(reached.read_text()) >= stands_at + 2 * SYNC_EVERY

    run.wait_for("rounds without site b", has_passed_over, 100)
    deployed.kill()
    deployed.start(deployed.address)
    done = deployed.isthmus("wait", "one", "--timeout", "100s")
    assert done.code == 0, f"{done.out}\n{done.err}\n{run.logs()}"
    before = metrics_of(deployed.state / "runs" / "one")

    first, place = min(stored_without_b(run).items())
    words = json.dumps([*map(str, (steps, steps, steps)), str(other)])
    settings = ["--set", f"arguments={words}", "--set", f"checkpoint.resume={place}"]
    run.isthmus("launch", str(run.folder / "job.yaml"), "--run-id", "two", *settings).check()
    used = []
    for site in "ab":
        counted = counted_in(before, site).items()
        until_then = {step: taken for step, taken in counted if step <= first}
        used += samples_of(progress, until_then, site)
        used += samples_of(other, counted_in(run.metrics("two"), site), site)
    assert len(set(used)) == len(used), "twice"
