"""A site that takes fewer steps than the others: what is said, and what they go on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.protos.catalogue import ExitCode
from tests.multiprocess.harness import Bench, Result, job_yaml, topology_yaml

# In one process: tests/orchestrator/test_early_ends.py, tests/sim, and the conformance suite.
pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.exhaustive]

SCRIPT = Path(__file__).parent / "scripts" / "user_early.py"
STEPS = 14


def launch(
    run: Bench, num_sites: int, kind: str, fewer: int, failure: str = "", job: str = ""
) -> Result:
    """Have site b take so many steps fewer."""
    topology = topology_yaml([(1, 1)] * num_sites, emulate=False, rtt="2ms", min_sites=1)
    topology = topology.replace("failure: {", f"failure: {{{failure}")
    arguments = f"arguments: ['{STEPS}', {kind}, b, '{fewer}']\n"
    return run.launch(topology, job_yaml(entrypoint=str(SCRIPT)) + arguments + job)


def learnt(run: Bench) -> dict[str, dict[str, Any]]:
    """Return what each site has learnt, by its name."""
    return {
        path.parent.name: torch.load(path, weights_only=True)
        for path in run.home.rglob("learnt-*.pt")
    }


def is_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("num_sites", "kind", "job"),
    [
        pytest.param(2, "end", "", id="end"),
        pytest.param(2, "skip", "", id="skip"),
        pytest.param(
            *(3, "end", "checkpoint: {every: 5 steps}\n"),
            id="three sites that save",
        ),
    ],
)
def test_the_others_go_on_and_that_is_said_at_once_and_no_loss(
    run: Bench, num_sites: int, kind: str, job: str
) -> None:
    result = launch(run, num_sites, kind, 4, job=job).check()
    data = result.envelope["data"]
    assert (data["state"], data["reason_code"], data["steps"]) == ("SUCCEEDED", "", STEPS)
    (noted,) = [each for each in data["noted"] if each["kind"] == "site.ended_early"]
    assert "site b ended after 10 steps; site " in noted["text"]
    assert " is at step 11; the others go on without it" in noted["text"]
    lines = result.err.splitlines()
    (at,) = [number for number, line in enumerate(lines) if noted["text"] in line]
    assert any(line.startswith("ACTIVE") for line in lines[:at])
    assert "sites that ended before the others: b" in data["notes"]
    steps = {each["site"]: each["num_steps"] for each in data["sites"]}
    assert steps == {"a": STEPS, "b": STEPS - 4, "c": STEPS} if num_sites == 3 else True
    found = learnt(run)
    assert len(found) == num_sites
    if num_sites == 3:
        assert is_equal(found["a"], found["c"])
    assert not is_equal(found["a"], found["b"])
    run.wait_for_nothing_left(20)


def test_the_run_ends_where_that_is_wanted_and_says_who_ended_first(run: Bench) -> None:
    error = launch(run, 2, "end", 4, "on_early_end: end, ").check(ExitCode.JOB_FAILED)
    told = error.envelope["error"]
    assert told["code"] == "SITE_ENDED_EARLY"
    assert told["message"].startswith("site b ended after 10 steps; site a is at step 11")
    assert told["where"]["site"] == "b"
    run.wait_for_nothing_left(20)


def test_steps_that_one_site_leaves_out_are_named(run: Bench) -> None:
    error = launch(run, 2, "steps", 1).check(ExitCode.JOB_FAILED).envelope["error"]
    assert error["code"] == "STEPS_DIFFER"
    assert "of step 4, at site a (rank 0) it ended with round " in error["message"]
    assert "Site b has taken fewer steps" in error["message"]
    run.wait_for_nothing_left(20)
