"""What a rank has of the model, and how it learns with it: as a replica, or as a part of a cut.

Both are attached to the site when they are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from isthmus.sites.trainer import sampler
from isthmus.sites.trainer.compiling import compile_blocks
from isthmus.sites.trainer.corpus import Corpus
from isthmus.sites.trainer.gpt import Gpt
from isthmus.sites.trainer.learning import (
    clip_gradients,
    evaluate,
    evaluated,
    learn_from,
    make_optimizer,
    own_tokens,
)
from isthmus.sites.trainer.ring import check_can_cut
from isthmus.sites.worker.api.site import Site
from isthmus.sites.worker.data.data_positions import Positions
from isthmus.topology.spec.trainer_cuts import cut_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Learner(Protocol):
    """One rank's part in learning."""

    optimizer: torch.optim.Optimizer
    saved: Sequence[nn.Module]
    """What checkpoints hold: the model, or this rank's parts of it."""
    data_mesh: DeviceMesh | None
    """The ranks of the site with sequences of their own; None: all."""
    own_tokens: int
    """Tokens of each sequence that this rank has."""

    def learn(self, samples: Positions, rows: int) -> tuple[Tensor, int]:
        """Leave the gradients of `samples`, averaged over all sites.

        Args:
            samples: This rank's positions.
            rows: Samples of the site's busiest replica.

        Returns:
            The sum of their losses, float64, shape (), and the number of their tokens; both 0 on a
            rank that does not see losses.
        """

    def clip(self, clip_norm: float) -> float:
        """Scale gradients down to a norm; return what it was, the same bits on all ranks."""

    def evaluate(self) -> tuple[float, int]:
        """Return the losses of this rank's share of the text that is held out, as `learn` does."""


def replicated(
    site: Site, model: nn.Module
) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    """Make a model one of the replicas of all sites."""
    parallel = DistributedDataParallel(
        model,
        device_ids=[site.device] if site.device.type == "cuda" else None,
        bucket_cap_mb=site.job.exchange.bucket_bytes / (1 << 20),
        gradient_as_bucket_view=True,
    )
    optimizer = make_optimizer(model, site.job.trainer.optimizer)
    site.attach(parallel, optimizer)
    return parallel, optimizer


class ReplicaLearner:
    """Every rank has the whole model, under DistributedDataParallel."""

    data_mesh: DeviceMesh | None = None

    def __init__(self, site: Site, model: Gpt, corpus: Corpus) -> None:
        self._site, self._model, self._corpus = site, model, corpus
        if site.job.trainer.compile:
            compile_blocks(model.blocks)
        self.own_tokens = own_tokens(site.job.trainer, None)
        self._parallel, self.optimizer = replicated(site, model)
        self.saved: Sequence[nn.Module] = [self._parallel]

    def learn(self, samples: Positions, rows: int) -> tuple[Tensor, int]:
        """See `Learner`; each rank goes through its own samples only."""
        return learn_from(self._parallel, self._corpus.training, self._site.job.trainer, samples)

    def clip(self, clip_norm: float) -> float:
        """See `Learner`."""
        return clip_gradients(self._model.parameters(), clip_norm)

    def evaluate(self) -> tuple[float, int]:
        """See `Learner`."""
        site = self._site
        ranks, rank = site.world_size, site.rank
        return evaluate(
            self._model, self._corpus.held_out, site.job.trainer, ranks=ranks, rank=rank
        )


class CutLearner:
    """The site's ranks share the model, as the job's placement says."""

    def __init__(self, site: Site, model: Gpt, corpus: Corpus) -> None:
        from isthmus.sites.trainer.parallel import lay_out  # takes torch half a second to import

        self._site, self._corpus = site, corpus
        config = site.job.trainer
        cut = cut_of(site.job, site.topology.site(site.name))
        if cut.context > 1:
            check_can_cut(site.name, site.device)
        laid = lay_out(model, cut, config, site.device)
        self._parts, self._pipeline, self._ring = laid.parts, laid.pipeline, laid.ring
        self.own_tokens = own_tokens(config, laid.ring)
        self.data_mesh: DeviceMesh | None = laid.data_mesh
        self._config = config
        self._micro_batch = cut.micro_batch
        self.optimizer: torch.optim.Optimizer = make_optimizer(
            nn.ModuleList(laid.parts), config.optimizer
        )
        site.attach(laid.parts, self.optimizer, data_mesh=laid.counted_mesh)
        self.saved: Sequence[nn.Module] = laid.parts

    def learn(self, samples: Positions, rows: int) -> tuple[Tensor, int]:
        """See `Learner`."""
        text, config = self._corpus.training, self._config
        if self._pipeline is None:
            cut = replace(config, micro_batch=self._micro_batch)
            return learn_from(self._parts[0], text, cut, samples, rows, self._ring)
        starts = sampler.random_starts(config.seed, samples, len(text) - config.model.context)
        windows = self._windows(text, starts)
        tokens = len(samples) * config.model.context
        loss_sum = self._pipeline.learn(windows, rows, tokens)
        return loss_sum, tokens if self._pipeline.is_last else 0

    def clip(self, clip_norm: float) -> float:
        """See `Learner`."""
        return self._site.clip_grad_norm_(clip_norm)

    def evaluate(self) -> tuple[float, int]:
        """See `Learner`; ranks that share their data evaluate together."""
        assert self.data_mesh is not None
        sharing = self.data_mesh.mesh.flatten().tolist()
        text, config = self._corpus.held_out, self._config
        ranks, rank = len(sharing), sharing.index(self._site.rank)
        if self._pipeline is None:
            return evaluate(
                self._parts[0],
                text,
                config,
                ranks=ranks,
                rank=rank,
                micro_batch=self._micro_batch,
                ring=self._ring,
            )
        starts, rows = evaluated(text, config, ranks=ranks, rank=rank)
        loss_sum = self._pipeline.evaluate(self._windows(text, starts), rows)
        tokens = len(starts) * config.model.context
        return float(loss_sum), tokens if self._pipeline.is_last else 0

    def _windows(self, text: np.ndarray, starts: np.ndarray) -> Tensor:
        found = sampler.windows(text, starts, self._config.model.context)
        return torch.from_numpy(found).to(self._site.device)
