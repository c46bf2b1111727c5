"""Averages over all ranks of all sites, and the pipeline that they take."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from isthmus.protos import metrics
from isthmus.sites.worker.api.rank import Rank
from isthmus.sites.worker.checks.arguments import check_list
from isthmus.sites.worker.exchange.bucket_copy import CudaTransfer, Transfer
from isthmus.sites.worker.exchange.bucket_pipeline import BucketPipeline
from isthmus.sites.worker.exchange.collectives import Collectives
from isthmus.sites.worker.exchange.exactness import Exactness
from isthmus.sites.worker.exchange.finite_watch import FiniteWatch
from isthmus.sites.worker.exchange.inference import written_anywhere
from isthmus.sites.worker.exchange.missing_sites import MissingSites
from isthmus.sites.worker.exchange.shard_encoder import ShardEncoder
from isthmus.sites.worker.exchange.site_averages import SiteAverages
from isthmus.sites.worker.exchange.slots import SharedTensors
from isthmus.sites.worker.exchange.tensor_average import TensorAverage
from isthmus.sites.worker.layouts.initial_state import InitialState

Named = Sequence[tuple[str, torch.Tensor]]


class Averaging:
    """One rank's averages. The first starts the pipeline, at the same call at every rank."""

    def __init__(self, rank: Rank) -> None:
        """Average nothing yet."""
        self._context, self.link = rank.context, rank.link
        self._members, self._steps = rank.members, rank.steps
        self._records, self._regime = rank.records, rank.regime
        self.exactness = Exactness(rank.context.spec.job.exchange)
        """Which gradients cross as float32."""
        self.encoder: ShardEncoder | None = None
        """What encodes on this rank's device, if that is wanted and the gateway takes it."""
        self.shared: SharedTensors | None = None
        """Tensors in memory that the gateway shares; None: the site has several ranks, or a GPU."""
        if rank.context.device.type == "cpu" and rank.context.world_size == 1:
            self.shared = SharedTensors(rank.link)
        self._pipeline: BucketPipeline | None = None
        self._site_averages: SiteAverages | None = None
        self._collectives: Collectives | None = None
        self._site_collectives: Collectives | None = None
        self._lists: TensorAverage | None = None
        self._has_averaged = False
        """The script has averaged tensors, and attached nothing before that."""

    # ---------------------------------------------------------------- the pipeline

    @property
    def missing_sites(self) -> MissingSites:
        """Who takes part, as results tell it."""
        return self.link.missing_sites

    @property
    def has_begun(self) -> bool:
        """Whether the script has averaged anything, or made ready to."""
        return self._pipeline is not None

    @property
    def pipeline(self) -> BucketPipeline:
        """The pipeline, started by the first call that needs it: a collective of the site."""
        if self._pipeline is None:
            self._pipeline = self._open()
            self._pipeline.start()
        return self._pipeline

    @property
    def site_averages(self) -> SiteAverages:
        """What averages inside the site, where gradients lie; as `pipeline`, a collective."""
        if self._site_averages is None:
            self._site_averages = SiteAverages(self.site_collectives, self._context.device)
        return self._site_averages

    @property
    def collectives(self) -> Collectives:
        """The process groups inside the site that averages take; as `pipeline`, a collective."""
        if self._collectives is None:
            self._collectives = Collectives(self._context.spec.timeouts.process_group_s)
        return self._collectives

    @property
    def site_collectives(self) -> Collectives:
        """Those of `site_averages`, for both may be under way; as `pipeline`, a collective."""
        if self._site_collectives is None:
            self._site_collectives = Collectives(self._context.spec.timeouts.process_group_s)
        return self._site_collectives

    def close(self) -> None:
        """End the pipeline. Idempotent."""
        if self._pipeline is not None:
            self._pipeline.close()

    @property
    def deadline_s(self) -> float:
        """For every wait.

        A peer that is gone is noticed by the gateway; this bounds what is slow, as compilation is.
        """
        timeouts = self._context.spec.timeouts
        return max(timeouts.process_group_s, timeouts.start_s)

    def _transfer(self, collectives: Collectives) -> Transfer:
        device = self._context.device
        return CudaTransfer(collectives, device) if device.type == "cuda" else Transfer(collectives)

    def _open(self) -> BucketPipeline:
        context, exchange = self._context, self._context.spec.job.exchange
        self.encoder = self._make_encoder()
        return BucketPipeline(
            self.link,
            self._transfer(self.collectives),
            rank=context.rank,
            world_size=context.world_size,
            deadline_s=self.deadline_s,
            overlaps=exchange.schedule != "serial",
            encoder=self.encoder,
            shared=self.shared,
            members=self._members,
            finite=FiniteWatch(self._record_not_finite, stops=exchange.non_finite == "stop"),
            measures_own=context.spec.job.noise_scale,
        )

    def _make_encoder(self) -> ShardEncoder | None:
        welcome = self._context.welcome
        if welcome.encoding is None:
            return None
        return ShardEncoder(
            welcome.encoding,
            site_index=welcome.site_index,
            rank=self._context.rank,
            ranks_per_site=welcome.ranks_per_site,
            device=self._context.device,
        )

    def _record_not_finite(self, tensor: str, reason: str, is_averaged: bool) -> None:
        # Under `delayed` a step's gradient begins to cross once the step is counted.
        is_counted = self._regime.now.kind == "delayed"
        step = self._steps.num_steps + (0 if is_counted else 1)
        labels = {metrics.TENSOR: tensor, metrics.REASON: f"in step {step} {reason}"}
        self._records.record(
            metrics.NON_FINITE, step, {metrics.AVERAGED: float(is_averaged)}, labels
        )

    # ---------------------------------------------------------------- averages

    @property
    def lists(self) -> TensorAverage:
        """What averages lists of tensors."""
        if self._lists is None:
            self._lists = TensorAverage(
                self.pipeline,
                bucket_bytes=self._context.spec.job.exchange.bucket_bytes,
                exactness=self.exactness,
            )
        return self._lists

    def average(
        self, tensors: Sequence[torch.Tensor], tokens: float = 1.0, *, exact: bool = True
    ) -> None:
        """Average tensors in place: a collective of all ranks of all sites."""
        with written_anywhere(tensors) as own:
            named = [(str(index), each) for index, each in enumerate(own)]
            self.lists.average(named, tokens, exact=exact)

    def average_for_script(
        self, tensors: Sequence[torch.Tensor], tokens: float, *, exact: bool
    ) -> None:
        """Average as `average` does, and record the first time, unless steps are counted."""
        self.average(tensors, tokens, exact=exact)
        if not (self._has_averaged or self._steps.has_begun):
            self._has_averaged = True
            if self._context.rank == 0:
                self._records.record(metrics.FIRST_AVERAGE, 0, {})

    def mean(self, value: float) -> float:
        """Return the mean of a number over all ranks of all sites: the same at each."""
        mean = torch.tensor([value], dtype=torch.float32, device=self._context.device)
        self.average([mean])
        return float(mean)

    def largest(self, number: int, *, limit: int) -> int:
        """Return the largest of a whole number over all ranks of all sites, `limit` at most."""
        taken = torch.zeros(limit + 1, dtype=torch.float32, device=self._context.device)
        taken[min(number, limit)] = 1.0
        self.average([taken])
        return int(taken.nonzero().max())

    def first_site(self) -> int:
        """Return whose state is everybody's: the first site, by index, that takes part.

        Once sites may be lost or rejoin, an average over sites finds it: a collective then.
        """
        context = self._context
        if self._steps.num_steps == 0 and not self._has_averaged:
            return next(at for at in range(context.num_sites) if at not in context.late_sites)
        takes_part = torch.zeros(context.num_sites, dtype=torch.float32, device=context.device)
        takes_part[context.index] = 1.0
        self.average([takes_part])
        return int(takes_part.nonzero().min())

    # ---------------------------------------------------------------- the first site's values

    def initial_state(self) -> InitialState:
        """Return what gives all ranks the first site's values.

        With `exchange.schedule: off` they are this site's own first rank's.
        """
        context = self._context
        first_site = context.index if context.exchange_is_off else self.first_site()
        return InitialState(
            self.pipeline,
            is_first=context.rank == 0 and context.index == first_site,
            device=context.device,
        )

    def equalise(self, named: Named) -> bool:
        """Give every rank of every site the first site's values; return whether any differed.

        Raises:
            IsthmusError: names, shapes or dtypes differ, or the exchange failed.
        """
        with written_anywhere([each for _, each in named]) as own:
            names = [name for name, _ in named]
            return self.initial_state().equalise([*zip(names, own, strict=True)])

    def broadcast(self, state: nn.Module | Sequence[torch.Tensor]) -> None:
        """Give every rank the first site's values of a module or of tensors.

        A module of a site that rejoins is left as it is: `checkpoint` brings the others' state.

        Raises:
            TypeError: neither of these.
            IsthmusError: as `equalise`.
        """
        if isinstance(state, nn.Module):
            if self._members.awaits_state:
                return
            self.equalise([*state.named_parameters(), *state.named_buffers()])
            return
        check_list("site.broadcast", state)
        self.equalise([(str(index), each) for index, each in enumerate(state)])

    def empty(self, sizes: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor in memory that the gateway shares, if it can: `Site.empty`."""
        if any(each < 0 for each in sizes):
            raise ValueError(f"site.empty: want sizes of 0 or more, got {sizes}")
        numel = math.prod(sizes)
        if self.shared is None or numel == 0:
            return torch.empty(sizes, dtype=torch.float32, device=self._context.device)
        return self.shared.empty(numel).view(sizes)
