"""Scripts of the suite in real runs: what a user sees of them, by the exit status and the error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.conformance.case import Way
from tests.conformance.pool import TOLERANCE
from tests.conformance.registry import CASES
from tests.conformance.world import OneProcess, World, learnt
from tests.multiprocess.harness import Bench, Result, bench, job_yaml, topology_yaml

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.timeout(400),
]

ENTRY = Path(__file__).parent / "entry.py"
ENDS_S = 120.0
"""By then a run has ended that trains for a second, or it waits for ever."""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Bench]:
    with bench(tmp_path) as made:
        yield made


def launch(run: Bench, name: str, way: Way) -> Result:
    """Train by a case, at its two sites."""
    topology = topology_yaml([(1, each) for each in CASES[name].ranks], emulate=False)
    job = job_yaml(entrypoint=str(ENTRY)) + f'arguments: ["{name}", "{way}"]\n'
    path = run.write(topology, job)
    return run.isthmus("launch", str(path), "--json", timeout_s=ENDS_S)


@pytest.mark.parametrize(("name", "way"), [("plain_loop", "ddp"), ("tp_beside_ddp", "lone")])
def test_sites_learn_what_one_process_does(run: Bench, name: str, way: Way) -> None:
    result = launch(run, name, way).check()
    case = CASES[name]
    assert result.envelope["data"]["verified_steps"] == 1 + (case.steps or 0)
    torch.manual_seed(0)
    expected = learnt(case.oracle(World(way, -1, sum(case.ranks), OneProcess())))
    written = sorted(run.home.rglob("learnt-*.pt"))
    assert len(written) == sum(case.ranks)
    for path in written:
        torch.testing.assert_close(
            torch.load(path, weights_only=True), expected, rtol=TOLERANCE, atol=TOLERANCE
        )


def test_what_is_not_equal_is_refused_by_name(run: Bench) -> None:
    error = launch(run, "same_data", "ddp").check(1).envelope["error"]
    assert error["code"] == "SAME_DATA"
    assert "sites a and b had the same gradient" in error["message"]
