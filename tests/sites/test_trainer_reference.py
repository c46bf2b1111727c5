"""How far float32 rounding carries: what "the same training" can mean across sites.

Sites add the same gradients in another order. The reference with another split into micro-batches
does just that, in one process. Measured with this job over 50 steps of the standard library: losses
differ by at most 1.1e-8 relative (2.2e-8 at three times the learning rate), and no parameter by
more than 1.5e-7. So 1e-6 here leaves a factor of 50, and 1e-5 between sites (tests/multiprocess)
one of 500, while a batch of one sequence less moves losses by more than 1e-3 (below).
"""

import json
import runpy
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from isthmus.sites.trainer.reference import ReferenceResult, train_alone
from isthmus.topology.documents.load import load_job
from isthmus.topology.spec.job import Data, Job, Trainer
from tests.multiprocess.harness import job_yaml

pytestmark = pytest.mark.slow

STEPS = 50
SCRIPT = Path(__file__).parents[2] / "scripts" / "reference_training.py"


@dataclass(frozen=True)
class Trained:
    """The job of the end-to-end test on texts of its own, and what it learns."""

    folder: Path
    job: Job
    result: ReferenceResult
    seen: list[tuple[int, float]]

    def again(self, trainer: Trainer) -> ReferenceResult:
        """Return what the job learns with another trainer."""
        return train_alone(replace(self.job, trainer=trainer), self.folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("texts")
    write_texts(folder)
    made = load_job(job_yaml(steps=STEPS, global_batch=13), "job.yaml")
    job = replace(made, trainer=replace(made.trainer, data=Data(files=("*.txt",)), micro_batch=4))
    seen: list[tuple[int, float]] = []
    result = train_alone(job, folder, lambda step, loss: seen.append((step, loss)))
    return Trained(folder, job, result, seen)


def write_texts(folder: Path) -> None:
    for index in range(20):
        words = " ".join(str(7 * index * word % 101) for word in range(300))
        (folder / f"{index}.txt").write_text(words)


def worst_difference(some: list[float], others: list[float]) -> float:
    return max(abs(a - b) / b for a, b in zip(some, others, strict=True))


def test_the_same_job_gives_the_same_bits(whole: Trained) -> None:
    first, again = whole.result, whole.again(whole.job.trainer)
    assert first.losses == again.losses
    assert whole.seen == list(enumerate(first.losses))
    for one, other in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert first.losses[-1] < first.losses[0] - 0.3


@pytest.mark.parametrize("micro_batch", [1, 13])
def test_the_order_of_sums_moves_losses_by_less_than_a_millionth(
    whole: Trained, micro_batch: int
) -> None:
    split = whole.again(replace(whole.job.trainer, micro_batch=micro_batch))
    assert worst_difference(split.losses, whole.result.losses) < 1e-6


def test_a_different_batch_is_told_apart(whole: Trained) -> None:
    # The test above would be worth nothing if losses were this close whatever one does.
    lacking = whole.again(replace(whole.job.trainer, global_batch=12))
    assert worst_difference(lacking.losses, whole.result.losses) > 1e-3


def test_the_script_prints_the_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_texts(tmp_path)
    (tmp_path / "job.yaml").write_text(job_yaml(steps=2, global_batch=3))

    def run(setting: str) -> tuple[object, str, str]:
        monkeypatch.setattr(
            sys, "argv", [str(SCRIPT), str(tmp_path / "job.yaml"), "--set", setting]
        )
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        return ended.value.code, *capsys.readouterr()

    code, out, err = run("trainer.data.files=['*.txt']")
    assert code == 0, err
    assert [json.loads(line).keys() for line in out.splitlines()] == [{"step", "loss"}] * 2
    assert [json.loads(line)["step"] for line in out.splitlines()] == [1, 2]
    code, _, err = run("trainer.steps=no")
    assert code == 2
    assert "[trainer.steps]" in err
