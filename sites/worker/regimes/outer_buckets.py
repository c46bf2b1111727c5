"""Sends what a site has as a whole to the other sites, while training goes on.

Inside the site the ranks have averaged already: those that hold the same elements hold the same
values. So nothing is added up on the way to the gateway. Of each element one rank hands it over,
and every rank that holds it gets the result. Buckets are those that all sites agreed on
(canonical.py), whatever their layouts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
import torch.distributed as dist

from isthmus.sites.worker.exchange.bucket_pipeline import BucketPipeline
from isthmus.sites.worker.exchange.collectives import Ranks
from isthmus.sites.worker.exchange.rounds import Round, RoundTerms, SharedBy
from isthmus.sites.worker.exchange.routes import Route, participants
from isthmus.sites.worker.exchange.used_flags import UsedFlags
from isthmus.sites.worker.layouts.agreed_hook import AgreedHook
from isthmus.sites.worker.layouts.canonical import Agreed, BucketCut, GradientPlan
from isthmus.sites.worker.layouts.sharded_state import held_pieces


@dataclass(frozen=True, slots=True)
class _Bucket:
    """A bucket that this rank takes part in."""

    cut: BucketCut
    layout: int
    sharing: SharedBy
    route: Route


class OuterBuckets:
    """One rank's part of rounds over sites: at most one is open."""

    def __init__(self, pipeline: BucketPipeline, hook: AgreedHook) -> None:
        """Send what `hook` has averaged inside the site; `agree` comes next."""
        self._pipeline = pipeline
        self._hook = hook
        self.own = hook.own
        self.twins = hook.twins
        self.is_lone = hook.is_lone
        self.data_ranks = hook.data_ranks
        self._buckets: list[_Bucket] = []
        self._flags: UsedFlags | None = None
        self._futures: list[torch.futures.Future[torch.Tensor]] = []

    def agree(self, agreed: Agreed, plan: GradientPlan) -> Set[Ranks]:
        """Prepare for the buckets that all sites have agreed on: as `AgreedHook.agree`."""
        rank = dist.get_rank()
        groups: set[Ranks] = set()
        self._buckets = []
        for gradient_cut, sharing in plan.cuts:
            cut = dataclasses.replace(gradient_cut, is_gradient=False)
            ranks = participants(cut.parts(agreed.here))
            if not cut.is_rank_major:
                groups.add(ranks)
            if rank in ranks:
                route = cut.route(agreed.here, rank)
                self._buckets.append(_Bucket(cut, gradient_cut.layout, sharing, route))
        names = plan.flags.names
        own = [name for name in names if name in self.own]
        self._flags = UsedFlags(
            names, own, self.device, number=plan.flags.number, sharing=plan.flags_sharing
        )
        return groups

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors are."""
        return next((each.device for each in self.own.values()), torch.device("cpu"))

    def shard_in(self, tensors: Sequence[torch.Tensor]) -> str | None:
        """Return the parameter of which one of these is a shard, or of whose gradient."""
        return self._hook.shard_in(tensors)

    def send(
        self, tokens: float, flats: Mapping[str, torch.Tensor], unused: Iterable[str] = ()
    ) -> Round:
        """Begin to average over all sites, in place, weighted by their tokens.

        Args:
            tokens: this rank's, as it counted them for what it sends.
            flats: what this rank holds of each trained parameter's value, by name: contiguous, of
                one dimension. They are anything until `wait`.
            unused: names of those that the site has no value of; theirs are zeros.
        """
        terms = RoundTerms(is_gradient=True, is_background=True, counted_by=self.data_ranks)
        opened = self._pipeline.begin(tokens, terms)
        self._futures = [
            self._pipeline.submit(
                held_pieces(each.cut, each.route, flats),
                each.layout,
                exact=each.cut.exact,
                route=each.route,
                number=each.cut.number,
                sharing=each.sharing,
                named=[(name, flats[name]) for name in each.cut.names if name in flats],
            )
            for each in self._buckets
        ]
        assert self._flags is not None, "agree comes first"
        self._flags.submit(self._pipeline, unused)
        self._pipeline.release()
        return opened

    def wait(self, sent: Round) -> None:
        """Wait until a round that was sent is in place; on CUDA the current stream does, too."""
        if sent.read_squares is not None:
            return
        self._pipeline.wait(sent, has_norm=True)
        for future in self._futures:
            future.wait()
        self._futures = []
        if self._flags is not None:
            self._flags.wait()

    def used(self) -> set[str]:
        """Return the parameters of which any site had a value in the latest round."""
        assert self._flags is not None, "agree comes first"
        return self._flags.read()
