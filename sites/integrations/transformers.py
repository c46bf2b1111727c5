"""The Trainer of Hugging Face transformers, together with all other sites."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from isthmus.sites.integrations.accelerate import accumulate_before_crossing
from isthmus.sites.worker.api.site import Site

LOGGED = {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "learning_rate"}
"""The Trainer's names of what isthmus shows, and ours."""


def train_together(trainer: Trainer, site: Site) -> None:
    """Have `trainer.train()` train with all other sites: call it once, before.

    The site reads its part of `trainer.train_dataset`. Gradients cross sites while backward goes
    on, weighted by the samples, or by what the loss is a mean over where the Trainer counts that.

    Raises:
        TypeError: the training dataset has no length.
    """
    if trainer.train_dataset is not None:
        if not hasattr(trainer.train_dataset, "__len__"):
            raise TypeError(
                "train_together: the training dataset has no length: divide it by "
                "site.global_rank yourself, and set trainer.train_dataset afterwards"
            )
        trainer.train_dataset = site.part_of(trainer.train_dataset)
    _count_tokens(trainer, site)
    accumulate_before_crossing(trainer.accelerator)
    trainer.add_callback(_Together(trainer, site))


class _Together(TrainerCallback):  # type: ignore[misc] # transformers may not be there
    """Attaches when the Trainer has wrapped its model, and passes on what it logs."""

    def __init__(self, trainer: Trainer, site: Site) -> None:
        self._trainer = trainer
        self._site = site

    def on_train_begin(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
        """Give all sites the same parameters; from now on gradients cross."""
        self._site.attach(self._trainer.model_wrapped, self._trainer.optimizer)

    def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:  # noqa: ANN401
        """Show the loss in `isthmus status`."""
        known = {LOGGED[name]: value for name, value in (logs or {}).items() if name in LOGGED}
        if known:
            self._site.log(**known)


def _count_tokens(trainer: Trainer, site: Site) -> None:
    """Weigh each step by what its loss is a mean over.

    The Trainer counts that for a whole step, over the ranks of this site where
    `average_tokens_across_devices` is set: then each rank counts an equal part. All sites count in
    units of which every site's ranks get whole numbers.
    """
    get_batch_samples = trainer.get_batch_samples
    ranks = [each.num_ranks for each in site.topology.sites]

    def get_and_count(
        epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        batches, num_items = get_batch_samples(epoch_iterator, num_batches, device)
        unit = math.lcm(*ranks)
        if num_items is None:
            site.count_tokens(unit * sum(map(_num_samples, batches)))
        elif trainer.args.average_tokens_across_devices:
            site.count_tokens(unit // site.world_size * int(num_items))
        else:
            site.count_tokens(unit * int(num_items))
        return batches, num_items

    trainer.get_batch_samples = get_and_count


def _num_samples(batch: Any) -> int:  # noqa: ANN401
    """Return the samples of a batch: the first dimension of its first tensor; 1: it has none."""
    values = batch.values() if hasattr(batch, "values") else batch
    return next((len(each) for each in values if isinstance(each, torch.Tensor)), 1)
