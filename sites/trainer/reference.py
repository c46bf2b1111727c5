"""The same training in one process: what several sites together must reproduce.

Same initial weights, same global batches, same order of steps; only the sums are formed in another
order. Run it by hand with `python scripts/reference_training.py JOB`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from isthmus.sites.trainer.corpus import load_corpus
from isthmus.sites.trainer.gpt import Gpt
from isthmus.sites.trainer.learning import make_optimizer, take_step
from isthmus.sites.trainer.sampler import samples_of
from isthmus.topology.spec.job import Job


@dataclass(frozen=True, slots=True)
class ReferenceResult:
    """What one process learnt."""

    losses: list[float]
    """Mean training loss over the global batch, by step, in nats a byte."""
    model: Gpt
    """With its final parameters."""


def train_alone(
    job: Job, folder: Path, on_step: Callable[[int, float], None] | None = None
) -> ReferenceResult:
    """Train `job` in this process on the CPU.

    Args:
        job: Only its `trainer` is used.
        folder: The job file's; relative names of text files start there.
        on_step: Called after each step with its number, from 0, and its loss.

    Raises:
        ConfigError: the text or the model is not as the job says.
    """
    with one_deterministic_thread():
        return _train(job, folder, on_step)


def _train(job: Job, folder: Path, on_step: Callable[[int, float], None] | None) -> ReferenceResult:
    config = job.trainer
    corpus = load_corpus(config.data, folder, config.model.context)
    model = Gpt(config.model, config.seed)
    optimizer = make_optimizer(model, config.optimizer)
    losses: list[float] = []
    for step in range(config.steps):
        samples = samples_of(step, config.global_batch, 1, 0)
        result = take_step(model, optimizer, corpus.training, config, step, samples)
        losses.append(result.loss_sum / result.tokens)
        if on_step is not None:
            on_step(step, losses[-1])
    return ReferenceResult(losses, model)


@contextlib.contextmanager
def one_deterministic_thread() -> Iterator[None]:
    """Set torch up as the launcher does for ranks on CPUs, and put it back afterwards.

    A second thread would gain little on matrices this small, and lose much on a busy machine,
    where each operation waits for whichever thread is not running.
    """
    num_threads = torch.get_num_threads()
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
        torch.use_deterministic_algorithms(was_deterministic)
