"""Averages buckets over the ranks of one site, where they lie: on their device, without a gateway.

`BucketAverages` is what hooks hand gradients to. `BucketPipeline` is one, over all sites. Under a
regime other than `sync`, gradients stay inside the site, and `SiteAverages` takes them. Where each
rank holds a shard of the site's mean, or there is one rank, there is nothing left to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from isthmus.protos.errors import ScriptError
from isthmus.sites.worker.exchange.bucket_copy import (
    Pending,
    Slot,
    bring_back,
    end_in,
    read_pieces,
    start_in,
    write_pieces,
)
from isthmus.sites.worker.exchange.collectives import Collectives, wait
from isthmus.sites.worker.exchange.finite_watch import Named
from isthmus.sites.worker.exchange.rounds import (
    EVERYBODY,
    HASHED_NUMEL,
    PLAIN,
    Round,
    RoundTerms,
    SharedBy,
    check_alike,
    hash_of_site,
)
from isthmus.sites.worker.exchange.routes import Route


class BucketAverages(Protocol):
    """Averages buckets in rounds, in the order of their submission. For the training thread."""

    before_gradients: Callable[[], None]
    """Called before a round of gradients begins."""

    def begin(self, tokens: float, terms: RoundTerms = PLAIN) -> Round:
        """Open the next round: `BucketPipeline.begin`."""

    def submit(
        self,
        pieces: Sequence[torch.Tensor],
        layout: int,
        *,
        exact: bool = False,
        route: Route | None = None,
        number: int | None = None,
        sharing: SharedBy = EVERYBODY,
        factors: Sequence[float] = (),
        is_gradient: bool = True,
        named: Named = (),
    ) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket in place: `BucketPipeline.submit`."""

    def wait(self, of: Round | None = None, *, has_norm: bool = False) -> Round:
        """Wait until every bucket of the round is in place: `BucketPipeline.wait`."""

    def site_tokens(self) -> torch.Tensor:
        """Return the tokens of all ranks of the site, this round: `BucketPipeline.site_tokens`."""


@dataclass(slots=True)
class _Moving:
    """A bucket whose elements are on their way between the ranks."""

    slot: Slot
    pieces: Sequence[torch.Tensor]
    pending: Pending
    is_divided: bool
    """What arrives is a sum over tokens."""
    future: torch.futures.Future[torch.Tensor]


class SiteAverages:
    """The averages of one rank over its site. The norm of what is averaged is not computed."""

    def __init__(
        self,
        collectives: Collectives,
        device: torch.device,
        *,
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Use these process groups, which nothing else uses."""
        self._now_s = now_s
        self._collectives = collectives
        self._device = device
        self._round: Round | None = None
        self._moving: list[_Moving] = []
        self._gradients: list[torch.Tensor] = []
        """The pieces of the round's gradients, in order."""
        self._num_rounds = 0
        self.before_gradients: Callable[[], None] = lambda: None
        """Called before a round of gradients begins."""

    @property
    def _current(self) -> Round:
        assert self._round is not None, "begin comes first"
        return self._round

    def begin(self, tokens: float, terms: RoundTerms = PLAIN) -> Round:
        """Open the next round: `BucketPipeline.begin`.

        Raises:
            ScriptError: the previous one is not complete.
        """
        if terms.is_gradient:
            self.before_gradients()
        if self._round is not None and self._round.end_s == 0.0:
            raise ScriptError("a backward pass began before the previous one was complete")
        total = torch.full((1,), tokens, dtype=torch.float64, device=self._device)
        pending = self._collectives.all_reduce(total, terms.counted_by)
        self._round = Round(self._num_rounds, tokens, total, pending, terms, crosses=False)
        self._num_rounds += 1
        self._gradients = []
        return self._round

    def site_tokens(self) -> torch.Tensor:
        """Return the tokens of all ranks of the site, this round: float64[1], on this stream."""
        wait(self._current.pending)
        return self._current.total

    @torch.no_grad()
    def submit(
        self,
        pieces: Sequence[torch.Tensor],
        layout: int,
        *,
        exact: bool = False,
        route: Route | None = None,
        number: int | None = None,
        sharing: SharedBy = EVERYBODY,
        factors: Sequence[float] = (),
        is_gradient: bool = True,
        named: Named = (),
    ) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket over the site's ranks in place: `BucketPipeline.submit`.

        Steps: 2 (P - 1) for what each of P ranks has all of; none for shards, unless what parts of
        a pipeline share is added up.
        """
        del layout, exact, number, sharing, named
        future = self._make_future()
        current = self._current
        if is_gradient:
            self._gradients += pieces
            if current.is_void(is_own=route is None):
                for each in pieces:
                    each.zero_()  # Not a product: a loss over no tokens is often NaN.
        is_summed = bool(factors) or current.terms.is_summed
        if route is None and self._collectives.world_size > 1:
            self._moving.append(self._add_up(pieces, factors, future, is_summed=is_summed))
            return future
        if is_summed and is_gradient:
            weights = factors or [1.0] * len(pieces)
            for each, weight in zip(pieces, weights, strict=True):
                each.mul_(weight / self._divisor().to(each.device))
        if route is not None and route.adds:
            self._moving.append(self._exchange(pieces, route, future))
            return future
        future.set_result(pieces[0])
        return future

    def _add_up(
        self,
        pieces: Sequence[torch.Tensor],
        factors: Sequence[float],
        future: torch.futures.Future[torch.Tensor],
        *,
        is_summed: bool,
    ) -> _Moving:
        """Start to add up over all ranks what each has weighed."""
        numel = sum(each.numel() for each in pieces)
        flat = torch.empty(numel, dtype=torch.float32, device=pieces[0].device)
        weights = factors or ([1.0] * len(pieces) if is_summed else self._current.tokens)
        write_pieces(pieces, weights, flat)
        pending = self._collectives.all_reduce(flat)
        slot = Slot(numel, flat, flat, flat)
        return _Moving(slot, pieces, pending, is_divided=True, future=future)

    def _exchange(
        self,
        pieces: Sequence[torch.Tensor],
        route: Route,
        future: torch.futures.Future[torch.Tensor],
    ) -> _Moving:
        """Start to bring to each rank its shard of the bucket, added up."""
        padded = torch.empty(route.held_numel, dtype=torch.float32, device=self._device)
        write_pieces(pieces, 1.0, padded)
        shard = torch.zeros(route.shard_numel, dtype=torch.float32, device=self._device)
        slot = Slot(route.numel, padded, shard, shard, route=route)
        pending = start_in(self._collectives, slot)
        return _Moving(slot, pieces, pending, is_divided=False, future=future)

    @torch.no_grad()
    def wait(self, of: Round | None = None, *, has_norm: bool = False) -> Round:
        """Bring every bucket of the round into place, on this stream: `BucketPipeline.wait`."""
        del of, has_norm
        current = self._current
        current.last_submit_s = self._now_s()
        for each in self._moving:
            wait(each.pending)
            if each.slot.route is not None:
                end_in(each.slot)
                bring_back(self._collectives, each.slot)
            if each.is_divided:
                each.slot.padded.div_(self._divisor())
            read_pieces(each.slot.padded, each.pieces)
            each.future.set_result(each.pieces[0])
        self._moving.clear()
        current.site_weight = current.weight = float(self.site_tokens())
        check_alike(current)
        if dist.get_rank() == 0 and current.terms.is_gradient and current.weight:
            current.gradient_hash = _hash_of(self._gradients)
        self._gradients = []
        current.end_s = self._now_s()
        return current

    def _divisor(self) -> torch.Tensor:
        """Return the site's tokens; 1 where there are none, for what they weigh are zeros."""
        tokens = self.site_tokens()[0]
        return torch.where(tokens > 0, tokens, 1.0)

    def _make_future(self) -> torch.futures.Future[torch.Tensor]:
        is_on_host = self._device.type == "cpu"
        return torch.futures.Future(devices=None if is_on_host else [self._device])


def _hash_of(pieces: Sequence[torch.Tensor]) -> int:
    """Return `hash_of_site` of the first piece that tells something; else of all their beginnings.

    A bias of one element, which often comes first, tells nothing by itself.
    """
    beginnings: list[torch.Tensor] = []
    for each in pieces:
        values = each.detach().reshape(-1)[:HASHED_NUMEL].float().cpu()
        if found := hash_of_site(values):
            return found
        beginnings.append(values[:1])
    return hash_of_site(torch.cat(beginnings)) if beginnings else 0
