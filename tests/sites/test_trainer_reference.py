"""How far float32 rounding carries: what "the same training" can mean across sites.

Sites add the same gradients in another order. The reference with another split into micro-batches
does just that, in one process. Measured with this job over 50 steps of the standard library: losses
differ by at most 1.1e-8 relative (2.2e-8 at three times the learning rate), and no parameter by
more than 1.5e-7. So 1e-6 here leaves a factor of 50, and 1e-5 between sites (tests/multiprocess)
one of 500, while a batch of one sequence less moves losses by more than 1e-3 (below).
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sites.trainer.reference import train_alone
from tests.multiprocess.harness import job_yaml
from topology.documents.load import load_job
from topology.job import Data, Job

pytestmark = pytest.mark.slow

STEPS = 50


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """The job of the end-to-end test, on a text of its own."""
    for index in range(20):
        words = " ".join(str(7 * index * word % 101) for word in range(300))
        (tmp_path / f"{index}.txt").write_text(words)
    made = load_job(job_yaml(steps=STEPS, global_batch=13), "job.yaml")
    return replace(made, trainer=replace(made.trainer, data=Data(files=("*.txt",))))


def with_micro_batch(job: Job, micro_batch: int) -> Job:
    return replace(job, trainer=replace(job.trainer, micro_batch=micro_batch))


def worst_difference(some: list[float], others: list[float]) -> float:
    return max(abs(a - b) / b for a, b in zip(some, others, strict=True))


def test_the_same_job_gives_the_same_bits(job: Job, tmp_path: Path) -> None:
    seen: list[tuple[int, float]] = []
    first = train_alone(job, tmp_path, lambda step, loss: seen.append((step, loss)))
    again = train_alone(job, tmp_path)
    assert first.losses == again.losses
    assert seen == list(enumerate(first.losses))
    for one, other in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert first.losses[-1] < first.losses[0] - 0.3


@pytest.mark.parametrize("micro_batch", [1, 13])
def test_the_order_of_sums_moves_losses_by_less_than_a_millionth(
    job: Job, tmp_path: Path, micro_batch: int
) -> None:
    whole = train_alone(with_micro_batch(job, 4), tmp_path)
    split = train_alone(with_micro_batch(job, micro_batch), tmp_path)
    assert worst_difference(split.losses, whole.losses) < 1e-6


def test_a_different_batch_is_told_apart(job: Job, tmp_path: Path) -> None:
    # The test above would be worth nothing if losses were this close whatever one does.
    whole = train_alone(job, tmp_path)
    lacking = replace(job, trainer=replace(job.trainer, global_batch=12))
    assert worst_difference(train_alone(lacking, tmp_path).losses, whole.losses) > 1e-3


@pytest.mark.multiprocess
def test_the_script_prints_the_losses(tmp_path: Path, job: Job) -> None:
    (tmp_path / "job.yaml").write_text(job_yaml(steps=2, global_batch=3))
    script = Path(__file__).parents[2] / "scripts" / "reference_training.py"
    environ = {**os.environ, "PYTHONPATH": str(script.parents[1])}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(script), str(tmp_path / "job.yaml"), *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            env=environ,
            check=False,
        )

    done = run("--set", "trainer.data.files=['*.txt']")
    assert done.returncode == 0, done.stderr
    assert [line.split('"loss"')[0] for line in done.stdout.splitlines()] == [
        '{"step": 1, ',
        '{"step": 2, ',
    ]
    done = run("--set", "trainer.steps=no")
    assert done.returncode == 2
    assert "[trainer.steps]" in done.stderr
    assert "Traceback" not in done.stderr
