"""One round: its buckets, what is known of each, and what is measured of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import xxhash

from isthmus.protos.errors import ScriptError
from isthmus.sites.local.rank_messages import Reduced, ReductionTimes
from isthmus.sites.local.squares import NUM_WORDS, norm_of, total_of, units_of_words
from isthmus.sites.worker.exchange.bucket_copy import Pending, Slot
from isthmus.sites.worker.exchange.collectives import Ranks, wait
from isthmus.sites.worker.exchange.finite_watch import Named
from isthmus.topology.spec.step_parts import Crossing, Interval, RoundTimes

HASHED_NUMEL = 1024
"""Elements of a site's gradient that are hashed in each round."""


@dataclass(frozen=True, slots=True)
class SharedBy:
    """Which ranks share a bucket, where that is not everybody: as `Reduce` has it."""

    participants: tuple[tuple[int, ...], ...] = ()
    after: int = 0


EVERYBODY = SharedBy()


class ShardWork(Protocol):
    """What is done to this rank's shard of a bucket where it lies in the host's memory."""

    def leave(self, shard: torch.Tensor, weight: float) -> None:
        """Make of the shard what crosses: float32, in place. From the posting thread.

        `weight` is the site's tokens, by which nothing has been multiplied.
        """

    def land(self, shard: torch.Tensor) -> None:
        """Make of the result what is delivered: in place. From the finishing thread."""


@dataclass(slots=True)
class BucketTimes:
    """When a bucket got how far, by this rank's clock."""

    submitted_s: float
    """When backward had computed it."""
    start_s: float = 0.0
    """When the gateway was told of it."""
    reduced_s: float = 0.0
    """When the gateway had its result."""
    finished_s: float = 0.0
    """When its result was in place; on CUDA, when that was enqueued."""


@dataclass(slots=True)
class Bucket:
    """One bucket on its way to the other sites and back."""

    number: int
    """The bucket's number at the gateway."""
    index: int
    """Its place among the round's buckets at this rank."""
    sharing: SharedBy
    slot: Slot
    pieces: Sequence[torch.Tensor]
    layout: int
    exact: bool
    is_gradient: bool
    """Its elements count in the round's norm."""
    pending: Pending
    future: torch.futures.Future[torch.Tensor]
    raw_bytes: int
    """float32 bytes of this rank's shard, without padding."""
    times: BucketTimes
    reduced: Reduced | None = None
    done: bool = False
    named: Named = ()
    """The gradients in it."""
    is_finite: torch.Tensor | None = None
    """Whether what this rank submitted is, once `pending` is over; None: nobody asks."""
    is_own: bool = True
    """It is this rank's gradient, and no shard of the site's."""
    work: ShardWork | None = None
    """What is done to the shard before it crosses and after; None: nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTerms:
    """What is averaged in a round, and how."""

    first_bucket: int = 0
    """The number of its first bucket. A lossy codec adds the residual of a bucket to the next one
    of the same number. So each sequence of buckets that comes again has numbers of its own."""
    num_slots: int | None = None
    """Buckets under way, at most: then `submit` waits; None: a backward pass goes on meanwhile, and
    all may be."""
    is_gradient: bool = False
    """An optimizer step takes what is averaged."""
    is_summed: bool = False
    """What is handed over are sums over tokens already, and no means."""
    counted_by: Ranks | None = None
    """The ranks whose tokens add up to the site's; None: all."""
    is_counted_alike: bool = False
    """They have to have counted equally many."""
    what: str = "gradient"
    """What a parameter has in it, as an error has it."""
    since: Callable[[], str] = str
    """Says since when it may not be finite, behind that; nothing, where it is of this step."""
    is_background: bool = False
    """Training goes on while it crosses, until somebody waits for it."""
    may_be_empty: bool = False
    """All sites may have counted no token: the average is 0 then."""


PLAIN = RoundTerms()
"""A weighted mean of what is no gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """A round has ended in which sites took steps of their own, and as many as each came to."""

    step: int
    """Number in the run, the same at all sites."""
    num_steps: int
    """Steps of the run since this site's one before."""
    round: int
    taken: Mapping[int, int]
    """Steps that each site took, of those that took part: the same at all ranks. 0: it was passed
    over."""
    own: int
    """Steps of this site."""
    step_s: float
    """Seconds between two numbers of steps in it, on average: the same at all ranks."""
    is_passed_over: bool = False
    """This site was."""
    is_followed: bool = False
    """The next round has ended, too, while this site was in one step."""


@dataclass(slots=True)
class Round:
    """One exchange of all sites: a sequence of buckets with one weight."""

    number: int
    tokens: float
    """Weight of this rank."""
    total: torch.Tensor
    pending: Pending
    terms: RoundTerms
    crosses: bool = True
    """Its buckets go to the other sites."""
    is_catching_up: bool = False
    """This site only gets what the others have."""
    begins_epoch: int = 0
    """0: it begins none."""
    gradient_hash: int = 0
    """What `hash_of_site` says of the first bucket of gradients, at the site's first rank."""
    site_weight: float = 0.0
    """Tokens of this site."""
    weight: float = 0.0
    """Tokens of all sites."""
    buckets: list[Bucket] = field(default_factory=list)
    by_number: dict[int, Bucket] = field(default_factory=dict)
    num_posted: int = 0
    """How many buckets, from the first on, the posting thread was given."""
    num_finished: int = 0
    read_squares: Callable[[], list[int]] | None = None
    """Tells the words of the sum of squares of the average, once that is complete; and behind them,
    if they are measured, those of the site's own gradient."""
    own_squares: int | None = 0
    """Squares of this rank's shards of the site's own gradient times its tokens, in units; None:
    not known."""
    last_submit_s: float = 0.0
    """When the last bucket was computed that backward goes on to hide; else the first."""
    end_s: float = 0.0
    waits: list[Interval] = field(default_factory=list)
    """When training waited for it, if it crosses in the background."""

    def note_computed(self, index: int, at_s: float) -> None:
        """Note when a bucket was computed: after the last one only communication is left."""
        if self.terms.num_slots is None or index == 0:
            self.last_submit_s = at_s

    def find(self, reduced: Reduced) -> Bucket | None:
        """Return the bucket that a result is of; None: of none of this round."""
        if reduced.round != self.number:
            return None
        return self.by_number.get(reduced.bucket)

    def is_void(self, *, is_own: bool) -> bool:
        """Whether what this rank hands over counts for nothing, so that no NaN in it may spread.

        `is_own`: it is of this rank alone, else of the site. Only a rank without tokens then waits
        for what the others have.
        """
        if self.tokens != 0.0:
            return False
        if not is_own:
            wait(self.pending)
        return is_own or not bool(self.total.sum())

    @property
    def raw_bytes(self) -> int:
        """float32 bytes that this rank handed over."""
        return sum(each.raw_bytes for each in self.buckets)

    @property
    def wire_bytes(self) -> int:
        """What the gateway sent for this rank's shards."""
        return sum(each.reduced.wire_bytes for each in self.buckets if each.reduced)

    @property
    def results(self) -> list[ReductionTimes]:
        """What the gateway measured of each bucket that is back."""
        return [each.reduced.times for each in self.buckets if each.reduced]

    @property
    def unfit(self) -> list[Named]:
        """The gradients of the buckets of which this rank's shard of the average is not finite."""
        gradients = (each for each in self.buckets if each.is_gradient)
        return [each.named for each in gradients if each.reduced and each.reduced.squares is None]

    @property
    def squares(self) -> int | None:
        """Squares of this rank's shards of all gradients, in units (sites/local/squares.py)."""
        gradients = (each for each in self.buckets if each.is_gradient)
        return total_of(each.reduced.squares for each in gradients if each.reduced)

    @property
    def norm(self) -> float:
        """2-norm of all gradients that were averaged: the same bits on all ranks of all sites.

        NaN where a number is not finite. On CUDA, the first look waits until results are there.
        """
        assert self.read_squares is not None, "wait comes first"
        return norm_of(units_of_words(self.read_squares()[:NUM_WORDS]))

    @property
    def site_norm(self) -> float | None:
        """2-norm of the site's own gradient, the mean over its tokens; as `norm`.

        None: it was not measured, or is not known.
        """
        words = [] if self.read_squares is None else self.read_squares()[NUM_WORDS:]
        units = units_of_words(words) if words else None
        return None if units is None or not self.site_weight else norm_of(units) / self.site_weight

    @property
    def times(self) -> RoundTimes:
        """The times of this round, on one clock."""
        crossings = tuple(
            Crossing(each.times.start_s, each.times.reduced_s, each.reduced.times.wait_s)
            for each in self.buckets
            if each.reduced and self.crosses
        )
        if self.terms.is_background:
            return RoundTimes(tuple(self.waits), crossings)
        return RoundTimes(((self.last_submit_s, self.end_s),), crossings)


def hash_of_site(region: torch.Tensor) -> int:
    """Return 52 bits that tell what a site contributes: sites with other data have others.

    Takes the first HASHED_NUMEL elements of the first rank's shard, which are the first of the
    bucket at each site. 0: they tell nothing, for other data may have the same. Where one is not
    finite, all are likely to be that NaN. Zeros, and one constant of either sign beside them, are
    what a mean loss gives a bias, whatever the data are.
    """
    values = region[:HASHED_NUMEL]
    magnitudes = values[values != 0.0].abs()
    if not magnitudes.numel() or not bool(torch.isfinite(values).all()):
        return 0
    if bool((magnitudes == magnitudes[0]).all()):
        return 0
    return xxhash.xxh3_64_intdigest(values.numpy().data) >> 12


def check_alike(current: Round) -> None:
    """Compare a rank's tokens with the site's, where all ranks have to have counted as many.

    Raises:
        ScriptError: they have not.
    """
    num_ranks = len(current.terms.counted_by or ())
    if current.terms.is_counted_alike and current.site_weight != num_ranks * current.tokens:
        raise ScriptError(
            f"this rank counted {current.tokens:g} tokens, and {num_ranks} ranks of its site "
            f"{current.site_weight:g}: experts that ranks share, and what fully_shard replicates, "
            "are reduced with equal weights, so each rank has to count as many"
        )
