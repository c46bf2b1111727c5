"""Sends what a site has as a whole to the other sites, in the buckets that all agreed on.

Inside the site the ranks have averaged already: those that hold the same elements hold the same
values. So nothing is added up on the way to the gateway. Of each element one rank hands it over,
and every rank that holds it gets the result. Buckets are those that all sites agreed on
(canonical.py), whatever their layouts.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from isthmus.sites.local.regions import FLOAT_BYTES
from isthmus.sites.worker.exchange.agreement import tell_all
from isthmus.sites.worker.exchange.bucket_copy import (
    Slot,
    bring_back,
    end_in,
    read_pieces,
    start_in,
    write_pieces,
)
from isthmus.sites.worker.exchange.bucket_pipeline import BucketPipeline
from isthmus.sites.worker.exchange.collectives import Collectives, Ranks, wait
from isthmus.sites.worker.exchange.rounds import Round, RoundTerms, ShardWork, SharedBy
from isthmus.sites.worker.exchange.routes import Route, participants
from isthmus.sites.worker.exchange.sharding import local_of
from isthmus.sites.worker.exchange.tensor_average import IN_FLIGHT_BYTES, first_bucket_of
from isthmus.sites.worker.exchange.tensor_hashes import layout_of_labels
from isthmus.sites.worker.exchange.used_flags import UsedFlags
from isthmus.sites.worker.layouts.agreed_hook import AgreedHook
from isthmus.sites.worker.layouts.canonical import Agreed, BucketCut, GradientPlan
from isthmus.sites.worker.layouts.sharded_state import held_pieces

Entry = tuple[str, float | None]
"""What an optimizer keeps of a parameter under some key: the dtype of a tensor, empty for a plain
number; and the number, None for a tensor that is laid out as the parameter."""
Entries = Mapping[str, Mapping[str, Entry]]
"""Entries of each parameter, by the parameter's name and the entry's key."""
Pieces = Sequence[torch.Tensor]
"""What a rank holds of a bucket, of each of its slices in turn."""


@dataclass(frozen=True, slots=True)
class OuterBucket:
    """A bucket that this rank takes part in."""

    cut: BucketCut
    layout: int
    sharing: SharedBy
    route: Route

    def dtypes(self) -> Iterator[tuple[int, int, torch.dtype]]:
        """Yield where in this rank's shard the parameters of each dtype lie, in order."""
        if self.cut.is_rank_major:
            numels = [stop - start for start, stop in self.route.held]
            first, last = 0, self.route.shard_numel
        else:
            numels = [each.numel() for each in self.cut.slices]
            first = self.route.index * self.route.shard_numel
            last = min(first + self.route.shard_numel, self.route.numel)
        begin = 0
        for each, numel in zip(self.cut.slices, numels, strict=True):
            start, stop = max(begin, first), min(begin + numel, last)
            if start < stop:
                dtype = getattr(torch, each.entry.dtype.removeprefix("torch."))
                yield start - first, stop - first, dtype
            begin += numel


class OuterBuckets:
    """One rank's part of rounds over sites: at most one is open."""

    def __init__(
        self,
        pipeline: BucketPipeline,
        hook: AgreedHook,
        site_collectives: Collectives,
        device: torch.device,
        *,
        site: int,
        num_sites: int,
    ) -> None:
        """Send what `hook` has averaged inside the site; `agree` comes next.

        `device` is this rank's: what moves inside the site does so there, by `site_collectives`.
        `site` is this one among `num_sites`.
        """
        self._copies: dict[str, int] = {}
        """How many ranks of the site hold what this one does of a parameter."""
        self._pipeline = pipeline
        self._hook = hook
        self._site_collectives = site_collectives
        self._device = device
        self._site, self._num_sites = site, num_sites
        self._world_size = dist.get_world_size()
        self.own = hook.own
        self.twins = hook.twins
        self.is_lone = hook.is_lone
        self.data_ranks = hook.data_ranks
        self.buckets: Sequence[OuterBucket] = ()
        """The buckets that this rank has a part of."""
        self._all_numel: Mapping[int, int] = {}
        """Elements of each bucket of all ranks, by number, in order."""
        self._groups: set[Ranks] = set()
        """The ranks that share a bucket whose elements move among them."""
        self._flags: UsedFlags | None = None
        self._futures: list[torch.futures.Future[torch.Tensor]] = []

    def agree(self, agreed: Agreed, plan: GradientPlan) -> Set[Ranks]:
        """Prepare for the buckets that all sites have agreed on: as `AgreedHook.agree`."""
        rank = dist.get_rank()
        buckets, all_numel = [], {}
        for gradient_cut, sharing in plan.cuts:
            cut = dataclasses.replace(gradient_cut, is_gradient=False)
            ranks = participants(cut.parts(agreed.here))
            numel = sum(each.stop - each.start for each in cut.slices)
            all_numel[cut.number] = numel * (len(ranks) if cut.is_rank_major else 1)
            if not cut.is_rank_major:
                self._groups.add(ranks)
            if rank in ranks:
                route = cut.route(agreed.here, rank)
                buckets.append(OuterBucket(cut, gradient_cut.layout, sharing, route))
        self.buckets, self._all_numel = buckets, all_numel
        for name in self.own:
            groups_of = agreed.here.holders[name].groups
            held = next(holding for holding, sharing in groups_of if rank in sharing)
            self._copies[name] = sum(len(ranks) for other, ranks in groups_of if other == held)
        names = plan.flags.names
        own = [name for name in names if name in self.own]
        self._flags = UsedFlags(
            names, own, self._device, number=plan.flags.number, sharing=plan.flags_sharing
        )
        return self._groups

    def shard_in(self, tensors: Sequence[torch.Tensor]) -> str | None:
        """Return the parameter of which one of these is a shard, or of whose gradient."""
        return self._hook.shard_in(tensors)

    # ---------------------------------------------------------------- while training goes on

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
        self._futures = [self._submit(each, flats) for each in self.buckets]
        assert self._flags is not None, "agree comes first"
        self._flags.submit(self._pipeline, unused)
        self._pipeline.release()
        return opened

    def site_squares(self, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the sum of squares of what the site holds: float64, the same at all its ranks.

        A collective of the site.

        Args:
            values: what this rank holds of each parameter, by name; others hold copies of some.
        """
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for name, each in values.items():
            total += each.float().square().sum(dtype=torch.float64) / self._copies[name]
        wait(self._site_collectives.all_reduce(total))
        return total

    def turnout_of(self, num_steps: int, round_s: float) -> torch.Tensor:
        """Return what tells how many steps the site has taken, in how many seconds: to `exchange`.

        A number for each site, and one in which the seconds add up.
        """
        numbers = torch.zeros(self._num_sites + 1, dtype=torch.float32, device=self._device)
        if dist.get_rank() == 0:
            numbers[self._site], numbers[-1] = 1.0 + num_steps, round_s
        return numbers

    def site_sums(self, numbers: Sequence[float]) -> list[float]:
        """Return the sums of numbers over the ranks of the site: a collective."""
        total = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        wait(self._site_collectives.all_reduce(total))
        found: list[float] = total.tolist()
        return found

    @property
    def next_round(self) -> int:
        """The number of the round that is to begin next."""
        return self._pipeline.num_rounds

    def check(self) -> None:
        """Raise the first error of the exchange, if there was one."""
        self._pipeline.check()

    @property
    def can_wait(self) -> bool:
        """Whether the ranks can still bring a result to all of them: they have process groups."""
        return self._world_size == 1 or dist.is_initialized()

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

    def fragments(self, count: int) -> list[list[int]]:
        """Return the places in `buckets` of each of so many fragments, alike at all sites.

        Fragments have about equally many elements. Buckets that lie beside each other are in
        different ones, as in Streaming DiLoCo's strided fragments. There are at most as many as
        buckets, so there are none without elements; this rank may have none of these.
        """
        count = min(count, len(self._all_numel))
        sizes, fragment_of = [0] * count, {}
        for number, numel in self._all_numel.items():
            smallest = min(range(count), key=sizes.__getitem__)
            fragment_of[number] = smallest
            sizes[smallest] += numel
        found: list[list[int]] = [[] for _ in range(count)]
        for place, each in enumerate(self.buckets):
            found[fragment_of[each.cut.number]].append(place)
        return found

    def pieces_of(self, bucket: OuterBucket, flats: Mapping[str, torch.Tensor]) -> Pieces:
        """Return what this rank holds of a bucket: views of `flats`, as `send` has them."""
        return held_pieces(bucket.cut, bucket.route, flats)

    def send_some(
        self,
        tokens: float,
        flats: Mapping[str, torch.Tensor],
        buckets: Sequence[tuple[OuterBucket, Pieces, ShardWork]],
        since: Callable[[], str],
    ) -> Round:
        """Begin to exchange some of the buckets, the same ones at all ranks that have a part.

        Args:
            tokens: as `exchange`.
            flats: as `send`, of what is in `buckets`: a value that is not finite is named by them.
            buckets: each with what it is of now and gets the result, and what is done to this
                rank's shard. The pieces are anything until `wait_some`.
            since: as `exchange`.
        """
        terms = RoundTerms(
            is_gradient=True,
            what="value",
            since=since,
            is_background=True,
            may_be_empty=True,
            counted_by=self.data_ranks,
        )
        opened = self._pipeline.begin(tokens, terms)
        self._futures = [
            self._submit(each, flats, of, pieces=pieces) for each, pieces, of in buckets
        ]
        self._pipeline.release()
        return opened

    def wait_some(self, sent: Round) -> None:
        """Wait until what was sent is in place; on CUDA the current stream does, too."""
        self._pipeline.wait(sent)
        for future in self._futures:
            future.wait()
        self._futures = []

    # ---------------------------------------------------------------- while training waits

    def exchange(
        self,
        tokens: float,
        flats: Mapping[str, torch.Tensor],
        work: Sequence[ShardWork],
        since: Callable[[], str],
        turnout: torch.Tensor | None = None,
    ) -> Round:
        """Exchange what this rank holds, by what is done to its shard of each bucket in turn.

        So much is on its way at once that a long link is full, and not all of the model.

        Args:
            tokens: this rank's, by whose sum `work` weighs what crosses.
            flats: as `send`.
            work: for each of `buckets`.
            since: says, where a value is not finite, since when it may not be.
            turnout: numbers that are not weighed, by the same number of each rank; they become the
                sums over all ranks, divided by all tokens. None: there are none, at any rank.
        """
        terms = RoundTerms(
            is_gradient=True,
            what="value",
            since=since,
            may_be_empty=True,
            counted_by=self.data_ranks,
            num_slots=self._num_slots(),
        )
        self._pipeline.begin(tokens, terms)
        pairs = zip(self.buckets, work, strict=True)
        futures = [self._submit(each, flats, of) for each, of in pairs]
        if turnout is not None:
            assert self._flags is not None, "agree comes first"
            futures.append(self._flags.submit_numbers(self._pipeline, turnout))
        finished = self._pipeline.wait()
        for future in futures:
            future.wait()
        return finished

    def agree_on_entries(self, own: Entries, tokens: float) -> tuple[Entries, bool]:
        """Return what any rank of any site has told, and whether any of them has a token.

        Args:
            own: what this rank has; of an entry that several have, the first site's is returned.
            tokens: this rank's.
        """
        told: list[tuple[Entries, bool]] = [(own, tokens > 0.0)] * self._world_size
        if self._world_size > 1:
            dist.all_gather_object(told, told[0])
        data = tell_all(
            self._pipeline,
            json.dumps(_joined(told)).encode(),
            site=self._site,
            num_sites=self._num_sites,
            rank=dist.get_rank(),
            device=self._device,
            first_bucket=first_bucket_of(1),
        )
        return _joined([json.loads(each) for each in data if each])

    def average_exactly(
        self, tokens: float, flats: Mapping[str, torch.Tensor], what: str, place: int
    ) -> None:
        """Average what this rank holds as float32 over all sites, in place, weighted by tokens.

        Args:
            tokens: this rank's.
            flats: as `send`, of what is laid out as the parameters are.
            what: names it, alike at all sites.
            place: of it among all that is averaged so.
        """
        terms = RoundTerms(
            # Numbers of their own, or the gateway would drop the residuals of a regime's rounds.
            first_bucket=first_bucket_of(2 + place),
            counted_by=self.data_ranks,
            num_slots=self._num_slots(),
        )
        self._pipeline.begin(tokens, terms)
        futures = [
            self._pipeline.submit(
                held_pieces(each.cut, each.route, flats),
                layout_of_labels([f"{what} of {each.layout}"]),
                exact=True,
                route=each.route,
                number=each.cut.number,
                sharing=each.sharing,
            )
            for each in self.buckets
        ]
        self._pipeline.wait()
        for future in futures:
            future.wait()

    # ---------------------------------------------------------------- inside the site

    @torch.no_grad()
    def take_shards(self, flats: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return this rank's shard of each bucket: float32, on the host.

        A collective of the site.

        Args:
            flats: as `send`. Not modified.
        """
        self._site_collectives.make_groups(sorted(self._groups))
        found = []
        for each in self.buckets:
            slot = self._site_slot(each)
            write_pieces(held_pieces(each.cut, each.route, flats), 1.0, slot.padded)
            wait(start_in(self._site_collectives, slot))
            end_in(slot)
            found.append(slot.shard.to("cpu"))
        return found

    @torch.no_grad()
    def give_shards(
        self, shards: Sequence[torch.Tensor], flats: Mapping[str, torch.Tensor]
    ) -> None:
        """Write into `flats` what ranks of this site have in their shards of each bucket.

        A collective of the site.
        """
        for each, shard in zip(self.buckets, shards, strict=True):
            slot = self._site_slot(each)
            slot.shard.copy_(shard)
            bring_back(self._site_collectives, slot)
            read_pieces(slot.padded, held_pieces(each.cut, each.route, flats))

    def _site_slot(self, bucket: OuterBucket) -> Slot:
        """Return buffers for a bucket that stays inside the site."""
        route = bucket.route
        shard = torch.zeros(route.shard_numel, dtype=torch.float32, device=self._device)
        padded = (
            shard
            if route.there is None
            else torch.zeros(route.held_numel, dtype=torch.float32, device=self._device)
        )
        return Slot(route.numel, padded, shard, shard, route=route)

    # ---------------------------------------------------------------- a bucket

    def _num_slots(self) -> int:
        largest = max((each.route.numel for each in self.buckets), default=1)
        return max(2, IN_FLIGHT_BYTES // (FLOAT_BYTES * largest))

    def _submit(
        self,
        bucket: OuterBucket,
        flats: Mapping[str, torch.Tensor],
        work: ShardWork | None = None,
        *,
        pieces: Pieces | None = None,
    ) -> torch.futures.Future[torch.Tensor]:
        return self._pipeline.submit(
            self.pieces_of(bucket, flats) if pieces is None else pieces,
            bucket.layout,
            exact=bucket.cut.exact,
            route=bucket.route,
            number=bucket.cut.number,
            sharing=bucket.sharing,
            named=[(name, flats[name]) for name in bucket.cut.names if name in flats],
            work=work,
        )


def _joined(told: Iterable[tuple[Entries, bool]]) -> tuple[Entries, bool]:
    """Return all entries, of several of the same parameter and key the first; and any token."""
    found: dict[str, dict[str, Entry]] = {}
    has_tokens = False
    for of_one, has_some in told:
        has_tokens = has_tokens or has_some
        for name, entries in of_one.items():
            found[name] = {**entries, **found.get(name, {})}
    return found, has_tokens


@contextmanager
def written(tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Have what this rank holds of tensors be what is written into flat ones in this context."""
    with torch.no_grad():
        locals_ = {name: local_of(each) for name, each in tensors.items()}
        flats = flat_of(locals_)
        yield flats
        for name, tensor in locals_.items():
            if tensor.data_ptr() != flats[name].data_ptr():
                tensor.copy_(flats[name].view(tensor.shape))


def flat_of(locals_: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors by name as such of one dimension: what `OuterBuckets` takes."""
    return {name: each.contiguous().view(-1) for name, each in locals_.items()}
