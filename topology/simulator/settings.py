"""The settings of a simulation, beside the job and its topology. Pure.

- Stragglers: ranks that compute longer than they should, drawn step by step. The numbers come from
  SplitMix64 (Steele et al., "Fast splittable pseudorandom number generators", OOPSLA 2014), so a
  seed means the same on every machine and in every version of Python.
- Outages: sites fail at random, the run stops, and goes on from its last checkpoint.
- Rounds of local steps: DiLoCo and Streaming DiLoCo (Douillard et al., arXiv 2311.08105 and
  2501.18512). Sites train by themselves for H steps and exchange how far their parameters have
  moved. Each of P fragments is sent once a round, at the end of a step; these steps are evenly
  spread over the round. A site begins step tau + 1 after that one only once the result is there.
  DiLoCo itself is P = 1, tau = 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from isthmus.topology.faults.script import TimedChange
from isthmus.topology.model.buckets import BUCKETS_MAX, FLOAT32_BYTES, Bucket
from isthmus.topology.spec.units import format_duration, format_fraction

FLOWS_PER_STEP = 10_000
"""Hops of flows in a step: a tenth of a second of simulation."""
_MASK = (1 << 64) - 1
_NORMAL = NormalDist()

DISTRIBUTIONS = ("exponential", "lognormal", "uniform")


class Chance:
    """A stream of random numbers."""

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def uniform(self) -> float:
        """Return the next number, uniform in (0, 1)."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        z = self._state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return (((z ^ (z >> 31)) >> 11) + 0.5) / (1 << 53)

    def exponential(self, mean: float) -> float:
        """Return a number that is exponentially distributed."""
        return -mean * math.log(self.uniform())


@dataclass(frozen=True, slots=True)
class Stragglers:
    """The random delays of ranks, step by step and rank by rank."""

    distribution: str
    """The distribution, one of DISTRIBUTIONS, of the factor by which compute is longer.

    `exponential`: 1 + x, x of mean `spread`. `uniform`: 1 to 1 + `spread`. `lognormal`: of median
    1, `spread` is the deviation of its logarithm; a rank may be faster too.
    """
    spread: float

    def factor(self, chance: Chance, num_ranks: int) -> float:
        """Return the largest of `num_ranks` random factors: ranks wait for each other.

        One number of `chance` is enough: the maximum of n has the distribution function F^n.
        """
        if self.spread == 0:
            return 1.0
        # u^(1/n) rounds to 1 for many ranks: its distance from 1 is computed instead.
        above = -math.expm1(math.log(chance.uniform()) / num_ranks)
        match self.distribution:
            case "exponential":
                return 1 - self.spread * math.log(above)
            case "uniform":
                return 1 + self.spread * (1 - above)
            case "lognormal":
                return math.exp(-self.spread * _NORMAL.inv_cdf(above))
            case other:
                raise ValueError(f"distribution: want one of {DISTRIBUTIONS}, got {other!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outages:
    """The random failures of sites, and the time of recovery.

    Times between failures are exponential.
    """

    mtbf_s: float
    """Mean seconds between two failures of one site."""
    recovery_s: float
    """Seconds from a failure until all sites compute again."""
    checkpoint_every: int = 1
    """Steps between two checkpoints. Steps since the last one are repeated."""

    def __post_init__(self) -> None:
        if not self.mtbf_s > 0 or self.recovery_s < 0 or self.checkpoint_every < 1:
            raise ValueError(
                "outages: want mtbf_s > 0, recovery_s >= 0 and checkpoint_every >= 1; "
                f"got {self.mtbf_s}, {self.recovery_s}, {self.checkpoint_every}"
            )


@dataclass(frozen=True, slots=True)
class Outage:
    """One failure, and the steps that it lost."""

    at_s: float
    """Seconds since the simulation began."""
    until_s: float
    site: str
    lost_steps: int
    """Number of steps that have to be repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """The rounds of local steps: how seldom sites exchange."""

    steps: int
    """Steps H between two exchanges of the same fragment."""
    fragments: int = 1
    """The number P of fragments, which have equal size."""
    overlap_steps: int = 0
    """Steps tau by which a result may be delayed."""
    min_steps: int | None = None
    """A round ends when the fastest site has taken its steps, and others count with so many; None:
    it waits for all."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps: want 1 at least, got {self.steps}")
        if not 1 <= self.fragments <= self.steps:
            raise ValueError(
                f"fragments: want 1 to {self.steps}, the steps of a round; got {self.fragments}"
            )
        if not 0 <= self.overlap_steps <= self.steps:
            raise ValueError(
                f"overlap_steps: want 0 to {self.steps}, the steps of a round; "
                f"got {self.overlap_steps}"
            )

    def sent_after(self, fragment: int) -> int:
        """Return the step of a round, from 1, at whose end a fragment is sent."""
        return self.steps * (fragment + 1) // self.fragments

    def num_sent(self, fragment: int, steps: int) -> int:
        """Return how often a fragment is sent in the first `steps` steps of a run."""
        first = self.sent_after(fragment)
        return 0 if steps < first else (steps - first) // self.steps + 1

    def in_words(self) -> str:
        """Return rounds in words: `rounds of 100 steps, 4 fragments, each back 1 step later`."""
        words = [f"rounds of {self.steps} steps"]
        if self.fragments > 1:
            words.append(f"{self.fragments} fragments")
        if self.overlap_steps:
            plural = "s" if self.overlap_steps > 1 else ""
            words.append(f"each back {self.overlap_steps} step{plural} later")
        if self.min_steps is not None:
            words.append("which wait for nobody")
        return ", ".join(words)


def fragment_buckets(
    total_bytes: int, rounds: Rounds, bucket_bytes: int
) -> tuple[tuple[Bucket, ...], tuple[int, ...]]:
    """Return all buckets of a round, and the fragment of each bucket.

    `total_bytes` is the model in float32. A bucket has at most `bucket_bytes`, or more where there
    would be more than a few hundred.
    """
    elements = total_bytes // FLOAT32_BYTES
    cuts = [elements * each // rounds.fragments for each in range(rounds.fragments + 1)]
    buckets: list[Bucket] = []
    owners: list[int] = []
    for fragment, (begin, end) in enumerate(itertools.pairwise(cuts)):
        size_bytes = FLOAT32_BYTES * (end - begin)
        count = math.ceil(size_bytes / max(bucket_bytes, total_bytes / BUCKETS_MAX))
        edges = [begin + (end - begin) * each // count for each in range(count + 1)]
        buckets += [
            Bucket(FLOAT32_BYTES * (last - first), 0) for first, last in itertools.pairwise(edges)
        ]
        owners += [fragment] * count
    return tuple(buckets), tuple(owners)


@dataclass(frozen=True, slots=True)
class RoundWork:
    """The part of a step's work that belongs to rounds.

    Buckets are those that cross in a round, all fragments'.
    """

    rounds: Rounds
    owners: tuple[int, ...]
    """The fragment of each bucket."""
    gather_s: tuple[tuple[float, ...], ...]
    """Seconds that a bucket's result takes inside the site, by site and bucket."""

    def due(self) -> dict[int, tuple[int, ...]]:
        """Return the buckets that leave at the end of a step, by its number in a round, from 0."""
        by_step: dict[int, tuple[int, ...]] = {}
        for bucket, fragment in enumerate(self.owners):
            step = self.rounds.sent_after(fragment) - 1
            by_step[step] = (*by_step.get(step, ()), bucket)
        return by_step

    def exchanged(self, buckets: Sequence[Bucket], steps: int) -> float:
        """Return the traffic of the first `steps` steps, in units of a mean step."""
        total = sum(each.raw_bytes for each in buckets)
        sent = sum(
            each.raw_bytes * self.rounds.num_sent(fragment, steps)
            for each, fragment in zip(buckets, self.owners, strict=True)
        )
        return self.rounds.steps * sent / total


SHARINGS = ("fifo", "fair")
"""The ways in which flows share a link: one after another in the order of buckets, or as many at
once as there are connections, each with its max-min fair share
(topology/simulator/wan_links.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of how a job is simulated."""

    steps: int = 20
    """Number of steps to complete, whatever is lost meanwhile."""
    seed: int = 0
    """The seed of stragglers and outages: the same seed gives the same times on every machine."""
    sharing: str = "fifo"
    """One of SHARINGS."""
    slow_start: bool | None = None
    """Whether TCP starts slowly after a pause; None: where there are packets
    (topology/trees/wire_load.py)."""
    ratio: float | None = None
    """Encoded bytes per byte of float32; None: the codecs' usual ratio
    (topology/trees/codec_costs.py)."""
    gateways_take_time: bool = True
    """Whether gateways take time; False: encoding, decoding and sending cost nothing."""
    stragglers: Stragglers | None = None
    outages: Outages | None = None
    changes: tuple[TimedChange, ...] = ()
    """The changes of links, by time since the beginning: rates, delays, cuts, and ends of them
    (topology/faults/script.py)."""
    rounds: Rounds | None = None
    """The rounds in which sites exchange parameters; None: gradients in every step."""
    flows_per_step: int = FLOWS_PER_STEP
    """Approximate number of hops of flows in a step, at most (topology/simulator/step_work.py)."""
    reuse_steps: bool = True
    """Whether periodic steps are simulated only once (topology/simulator/training.py)."""

    def __post_init__(self) -> None:
        if self.sharing not in SHARINGS:
            raise ValueError(f"sharing: want one of {', '.join(SHARINGS)}; got {self.sharing!r}")
        if self.changes and self.outages is not None:
            raise ValueError("changes: of links or outages of sites, not both")
        if self.rounds is not None and self.steps % self.rounds.steps:
            raise ValueError(f"steps: want whole rounds of {self.rounds.steps}, got {self.steps}")
        if (
            self.rounds is not None
            and self.outages is not None
            and self.outages.checkpoint_every % self.rounds.steps
        ):
            raise ValueError(
                f"checkpoint_every: want whole rounds of {self.rounds.steps} steps, "
                f"got {self.outages.checkpoint_every}"
            )
        if self.steps < 1:
            raise ValueError(f"steps: want 1 at least, got {self.steps}")

    @property
    def may_reuse_steps(self) -> bool:
        """Whether steps can be periodic, and repeated ones are not simulated again."""
        return self.reuse_steps and self.stragglers is None and not self.changes

    def in_words(self) -> list[str]:
        """Return the settings that differ from the defaults, in words."""
        words = []
        if self.rounds is not None:
            words.append(self.rounds.in_words())
        if self.sharing != "fifo":
            words.append(f"links shared: {self.sharing}")
        if self.stragglers is not None:
            spread = format_fraction(self.stragglers.spread)
            words.append(f"stragglers: {self.stragglers.distribution}, {spread}")
        if self.outages is not None:
            words.append(
                f"a site fails every {format_duration(self.outages.mtbf_s)} in the mean, recovery "
                f"takes {format_duration(self.outages.recovery_s)}, checkpoints every "
                f"{self.outages.checkpoint_every} steps"
            )
        return words
