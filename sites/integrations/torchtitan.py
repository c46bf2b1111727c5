"""torchtitan's Trainer, together with all other sites."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torchtitan.distributed.utils
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.trainer import Trainer

from isthmus.sites.worker.api.site import Site
from isthmus.sites.worker.data.data_part import readers_per_site


class TogetherTrainer(Trainer):  # type: ignore[misc] # torchtitan may not be there
    """A Trainer whose gradients cross to the other sites while backward goes on.

    Each site has its own parallelism. Batch sizes of the configuration are this site's.
    """

    def __init__(self, config: Trainer.Config, site: Site) -> None:
        """Build the Trainer of a configuration; `site` is what `isthmus.join()` returned.

        A collective of all ranks of all sites.

        Raises:
            ValueError: a pipeline would accumulate gradients over several schedules, or CUDA graphs
                would replay a backward pass without its hooks.
        """
        if not config.training.disable_cuda_graphs:
            raise ValueError(
                "isthmus: CUDA graphs replay a backward pass without its hooks: set "
                "training.disable_cuda_graphs"
            )
        self._site = site
        self._num_backwards = 0
        loader = SharedLoader(config.dataloader, site)
        super().__init__(replace(config, dataloader=loader))
        if self.parallel_dims.pp_enabled and self.gradient_accumulation_steps > 1:
            raise ValueError(
                "isthmus: a pipeline accumulates by its micro-batches: set training.global_batch_"
                "size to -1, and a smaller parallelism.pipeline_parallel_microbatch_size"
            )
        optimizers = self.optimizers.optimizers
        site.attach(self.model_parts, optimizers, data_mesh=self._data_mesh(), loss="sum")
        self._log = self.metrics_processor.log
        self.metrics_processor.log = self._log_and_show

    def batch_generator(self, data_iterable: Any) -> Iterator[Any]:  # noqa: ANN401
        """Count the tokens of each batch that a step takes."""
        for inputs, labels in super().batch_generator(data_iterable):
            self._site.count_tokens(int((labels != IGNORE_INDEX).sum()))
            yield inputs, labels

    def forward_backward_step(
        self,
        *,
        input_dict: Any,  # noqa: ANN401
        labels: Any,  # noqa: ANN401
        global_valid_tokens: torch.Tensor,
    ) -> torch.Tensor:
        """Go back from the sum of losses; return the mean over this site, as torchtitan shows it.

        Gradients are divided once, by the tokens of all sites. Those of a step cross once.
        """
        self._num_backwards += 1
        if not self.parallel_dims.pp_enabled:
            is_last = self._num_backwards % self.gradient_accumulation_steps == 0
            for part in self.model_parts:
                if isinstance(part, FSDPModule):
                    part.set_requires_gradient_sync(is_last)
        loss: torch.Tensor = super().forward_backward_step(
            input_dict=input_dict,
            labels=labels,
            global_valid_tokens=torch.ones_like(global_valid_tokens),
        )
        return loss / global_valid_tokens

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        """Take a step, in which gradients are clipped by the norm that is the same everywhere."""
        with _clipping_by(self._site):
            super().train_step(data_iterator)

    def _data_mesh(self) -> DeviceMesh | None:
        """Return the ranks of this site with data of their own; None: this rank alone."""
        dims = self.parallel_dims
        return dims.get_mesh("batch") if dims.dp_enabled else None

    def _log_and_show(
        self,
        step: int,
        loss: float,
        most: float,
        norm: float,
        **others: Any,  # noqa: ANN401
    ) -> None:
        """Log as torchtitan does, and show it in `isthmus status`."""
        self._log(step, loss, most, norm, **others)
        self._site.log(loss=loss, grad_norm=norm)


class SharedLoader(BaseDataLoader.Config):  # type: ignore[misc] # torchtitan may not be there
    """The configuration of a data loader that reads this site's part of the data.

    torchtitan tells a loader how many ranks read, and which it is. Here it hears of those of all
    sites that take part when the run begins.
    """

    def __init__(self, config: BaseDataLoader.Config, site: Site) -> None:
        """`config` is the loader's own."""
        super().__init__(dataset=config.dataset, dataset_path=config.dataset_path)
        self._config = config
        self._site = site

    def build(self, *, dp_world_size: int, dp_rank: int, **others: Any) -> BaseDataLoader:  # noqa: ANN401
        """Build the loader of a rank: a collective of all ranks of all sites.

        `dp_world_size` is how many ranks of this site read data of their own, `dp_rank` which of
        them this one is.
        """
        site = self._site
        readers = readers_per_site(
            site.index, dp_world_size, site.num_sites, partial(site.all_reduce, exact=True)
        )
        first = sum(readers[: site.index])
        return self._config.build(dp_world_size=sum(readers), dp_rank=first + dp_rank, **others)


@contextmanager
def _clipping_by(site: Site) -> Iterator[None]:
    """Have torchtitan clip by `site.clip_grad_norm_`: for this it has no hook.

    Its own norm is rounded otherwise at a site that shards otherwise, so replicas would differ.
    """

    def clip(parameters: object, max_norm: float, **_: Any) -> torch.Tensor:  # noqa: ANN401
        del parameters  # all that are attached
        return torch.tensor(site.clip_grad_norm_(max_norm), dtype=torch.float32, device=site.device)

    utils = torchtitan.distributed.utils
    own = utils.clip_grad_norm_
    utils.clip_grad_norm_ = clip
    try:
        yield
    finally:
        utils.clip_grad_norm_ = own
