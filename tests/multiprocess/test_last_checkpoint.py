"""However a script ends after its last step, that step is saved, or the run says that it is not."""

from pathlib import Path

import pytest

from isthmus.protos.catalogue import ExitCode
from isthmus.protos.checkpoint.store import checkpoints_in
from tests.multiprocess.harness import Bench, Result, job_yaml, topology_yaml

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.exhaustive]

SCRIPT = Path(__file__).parent / "scripts" / "user_ending.py"
STEPS = 12


def launch(run: Bench, ending: str, every: int, where: str = "") -> Result:
    topology = topology_yaml(
        [(1, 2), (1, 1)], emulate=False, rtt="2ms", min_sites=1, max_restarts=0
    )
    job = job_yaml(entrypoint=str(SCRIPT)) + f"checkpoint: {{every: {every} steps, keep: 50}}\n"
    return run.launch(topology, f"{job}arguments: ['{STEPS}', '{ending}'{where}]\n")


def saved(run: Bench) -> list[int]:
    (store,) = (run.folder / "checkpoints").iterdir()
    for each in checkpoints_in(str(store)):
        each.verified()
    return sorted(each.step for each in checkpoints_in(str(store)))


@pytest.mark.parametrize("every", [5, 4], ids=["due before", "due with it"])
@pytest.mark.parametrize("ending", ["plain", "destroy", "destroy and exit", "destroy late"])
def test_the_last_step_is_saved(run: Bench, ending: str, every: int) -> None:
    launch(run, ending, every).check()
    assert saved(run)[-1] == STEPS
    run.wait_for_nothing_left(20)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_may_destroy_their_groups_at_different_times(run: Bench, rank: int) -> None:
    launch(run, "destroy late", 5, f", a, '{rank}'").check()
    assert saved(run)[-1] == STEPS


def test_a_script_that_ends_without_leaving_does_not_succeed(run: Bench) -> None:
    """`os._exit` lets nobody save."""
    error = launch(run, "os_exit", 5).check(ExitCode.JOB_FAILED).envelope["error"]
    assert error["code"] in {"RANK_LOST", "RANK_EXITED"}
    run.wait_for_nothing_left(20)


def test_a_store_that_takes_nothing_more_is_said(run: Bench) -> None:
    """A file stands where the last checkpoint is to be written."""
    store = run.folder / "checkpoints"
    job = f"checkpoint: {{every: 5 steps, keep: 50, to: {store}}}\n"
    topology = topology_yaml([(1, 1), (1, 1)], emulate=False, rtt="2ms")
    text = job_yaml(entrypoint=str(SCRIPT)) + job + f"arguments: ['{STEPS}', plain]\n"
    path = run.write(topology, text)
    (store / "r").mkdir(parents=True)
    (store / "r" / f".step-{STEPS:08}.g2").write_text("in the way")
    done = run.isthmus("launch", str(path), "--run-id", "r", "--json")
    data = done.check(ExitCode.WITH_LOSSES).envelope["data"]
    assert f"the last checkpoint, of step {STEPS}, failed at site a" in data["reason"]
    assert "checkpoint.failed" in [each["kind"] for each in data["noted"]]
    assert f"checkpoint of step {STEPS} failed at site a" in done.err
