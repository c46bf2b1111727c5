"""A rank that computes wrongly: found within the steps that the job says, named, and out.

What a rank does is in tests/sites/test_gradient_check.py, what its launcher says in
test_launcher.py, and what the coordinator decides in tests/orchestrator/test_run_losses.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.multiprocess.harness import Bench, Result, job_yaml, topology_yaml

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.exhaustive]

SCRIPT = Path(__file__).parent / "scripts" / "user_corrupt.py"
EVERY = 3


def launch(
    run: Bench,
    sites: list[tuple[int, int]],
    *arguments: object,
    verify: str = f"gradients_every: {EVERY}",
    min_sites: int = 1,
) -> Result:
    listed = ", ".join(f'"{argument}"' for argument in arguments)
    folder = run.folder / "saved"
    folder.mkdir(exist_ok=True)
    job = job_yaml(entrypoint=str(SCRIPT)) + f"arguments: [{listed}]\n"
    job = job.replace("parameters_every: 1", f"parameters_every: 1, {verify}")
    job += f"env: {{SAVE_IN: '{folder}'}}\n"
    topology = topology_yaml(sites, rtt="2ms", min_sites=min_sites)
    return run.launch(topology if len(sites) > 1 else topology.replace("links:\n", ""), job)


def saved(run: Bench) -> dict[str, dict[str, torch.Tensor]]:
    files = sorted((run.folder / "saved").glob("*.pt"))
    return {each.stem: torch.load(each, weights_only=True) for each in files}


@pytest.mark.parametrize(
    "ranks", [pytest.param([(1, 2), (1, 2)], id="two-sites"), pytest.param([(1, 3)], id="one-site")]
)
def test_one_flipped_bit_ends_the_run_and_names_the_rank(
    run: Bench, ranks: list[tuple[int, int]]
) -> None:
    site = "ab"[len(ranks) - 1]
    result = launch(run, ranks, 200, "flip", site, 1, 4).check(1)
    error = result.envelope["error"]
    assert error["code"] == "GRADIENTS_DIFFER", error
    assert (error["where"]["site"], error["where"]["rank"]) == (site, 1)
    step = 2 * EVERY  # the first comparison after step 4
    assert f"after step {step}, rank 1 of site {site} (node 0, host " in error["message"]
    assert (
        "computed wrong gradients of one micro-batch: 3.weight differed by up to"
        in (error["message"])
    )
    run.wait_for_nothing_left(20)


def test_a_site_that_computes_wrongly_is_dropped_and_waits_for_its_operator(run: Bench) -> None:
    verify = f"gradients_every: {EVERY}, on_corruption: drop"
    result = launch(run, [(1, 1)] * 3, 20, "flip", "b", 0, 4, verify=verify).check(7)
    notes = "\n".join(result.envelope["data"]["notes"])
    assert "the run continues without site b: rank 0 of site b exited with status 1" in notes
    assert "computed wrong gradients of one micro-batch: 3.weight" in notes
    assert "`isthmus sites add b` starts the site again" in notes
    assert "site.returning" not in run.isthmus("events", "--json").check().out
    left = saved(run)
    assert left.keys() == {"a0", "c0"}
    run.wait_for_nothing_left(20)


def test_comparing_changes_no_bit_of_a_clean_run(run: Bench) -> None:
    sites = [(1, 2), (1, 1)]
    launch(run, sites, 9, verify="gradients_every: 0").check()
    before = saved(run)
    result = launch(run, sites, 9, verify="gradients_every: 1").check()
    after = saved(run)
    assert before.keys() == after.keys() == {"a0", "a1", "b0"}
    for name, state in before.items():
        for key, value in state.items():
            assert torch.equal(value, after[name][key]), (name, key)
    totals = result.envelope["data"]["compared_gradients"]
    assert totals["steps"] == 9
    assert totals["ranks"] == 3
