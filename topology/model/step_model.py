"""How long a step takes by the topology's figures: compute, exchange, what of it is hidden. Pure.

Gradients are ready layer by layer while the last micro-batch goes backward, and leave when they
fill a bucket (topology/model/buckets.py); with `schedule: serial` all leave at its end. The WAN
takes them in that order and pauses only when there is nothing to send. So site j ends step k no
earlier than, for every site i and each of its releases r, of which all that is not yet sent has
L(r) bytes,

    end_i(k-1) + c_i - b_i(r) + RS_i(r) + x_ij(L(r)) + AG_j,

with c_i the time that i computes, b_i(r) how long before the end of that r leaves, x_ij the time of
an exchange of so many bytes from i's start to j's end (topology/model/tree_times.py; TCP starts
slowly for what leaves after a pause, with a window that depends on the pause:
topology/model/pauses.py), RS and AG the reduce-scatter and all-gather of one bucket inside
the site (topology/model/fabric.py). That is a recurrence in the algebra of max and plus: the mean
step is its largest cycle mean (topology/model/step_model.py). Sites that differ do not simply wait
for the slowest: in a gather, a late gradient finds the others' there.

No step is shorter than its bytes take on any link, at any site's network cards, or in a gateway:
for codecs (topology/codec_costs.py), and for sending and receiving. Left out: the optimizer's step.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from topology.codec_costs import usual_ratio
from topology.cost.compute import sequence_s, site_shares
from topology.job import Job
from topology.model.buckets import between, gradient_bytes, knots, releases, within_s
from topology.model.pauses import RestedLinks
from topology.model.reduction_plans import plan_reduction
from topology.model.tree_times import bytes_of_hops, crossings_s, plan_times_s, rate_of
from topology.model.wire_load import Hop, cards_s, gateways_s_per_byte, wire_load, wire_loads
from topology.trees.trees import ReductionPlan
from topology.world import Topology

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


_EXCHANGES = 4
"""With which windows are followed: they settle within two or three, or go to and fro."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanStep:
    """A step in the long run. Tuples are by site, in the topology's order."""

    step_s: float
    compute_s: tuple[float, ...]
    exchange_s: float
    """Of one exchange by itself, from all sites' having their gradients to all having the mean."""
    link_s: Mapping[Hop, float]
    """How long a step's bytes keep each directed link busy."""
    gateway_s: tuple[float, ...]
    """How long a step's bytes keep the site's gateways busy."""


class StepModel:
    """Steps of one job over one reduction, for any spread of the batch over the sites."""

    def __init__(
        self, job: Job, topology: Topology, plan: ReductionPlan, ratio: float | None = None
    ) -> None:
        """Work out what does not depend on the spread.

        Args:
            job: Gives model, exchange, micro-batch. `schedule: off` is no exchange: refused.
            topology: Of the sites that take part.
            plan: Over them.
            ratio: Encoded bytes for each byte of float32; None: as codecs usually come to.
        """
        if job.exchange.schedule == "off":
            raise ValueError("schedule: want an exchange, got off")
        self._micro_batch = job.trainer.micro_batch
        self._sequence_s = [sequence_s(job, site) for site in topology.sites]
        self._releases = releases(job)
        raw_bytes = gradient_bytes(job)
        known = usual_ratio(job.exchange.codec) if ratio is None else ratio
        self.link_s: Mapping[Hop, float] = {}
        """How long a step's bytes keep each directed link busy."""
        self.link_bytes: Mapping[Hop, float] = {}
        """What a step sends over it."""
        self.gateway_s = tuple(0.0 for _ in topology.sites)
        self._windows: dict[tuple[int, ...], Floats] = {}
        """That spreads settle at; shape (1, H), topology/model/pauses.py."""
        self._rows: dict[tuple[int, int], tuple[Floats, Floats, Floats]] = {}
        self._links: RestedLinks | None = None
        """None: nothing crosses."""
        self._warm_s: Floats | None = None
        """Of what has not left before each release; by release, source and target."""
        self._is_gather = plan.is_gather
        self._within_s = within_s(topology, self._releases)
        self._share_after = np.array([each.share_after for each in self._releases])
        # Each bucket is reduced and gathered, one after another, for every site.
        self._floor_s = float(2 * self._within_s.sum(axis=1).max())
        if plan.num_sites > 1:
            load = wire_load(job, topology, plan, raw_bytes, known)
            self.link_bytes = bytes_of_hops(plan, load)
            self.link_s = {
                hop: num_bytes / rate_of(topology, hop)
                for hop, num_bytes in self.link_bytes.items()
            }
            each_s = gateways_s_per_byte(job, topology, plan, known)
            per_byte_s = [
                one_s / site.nodes for one_s, site in zip(each_s, topology.sites, strict=True)
            ]
            self.gateway_s = tuple(raw_bytes * each for each in per_byte_s)
            self._cross(job, topology, plan, known, max(per_byte_s))
            self._floor_s = max(
                self._floor_s,
                *self.link_s.values(),
                *self.gateway_s,
                *cards_s(topology, self.link_bytes),
            )

    def _cross(
        self, job: Job, topology: Topology, plan: ReductionPlan, ratio: float, per_byte_s: float
    ) -> None:
        """Work out the crossings; no gateway is faster than `per_byte_s`."""
        left_bytes = np.array([each.left_bytes for each in self._releases], dtype=np.float64)
        chosen = knots(left_bytes)
        sizes = [self._releases[index].left_bytes for index in chosen]
        loads = wire_loads(job, topology, plan, sizes, ratio)
        warm = [dataclasses.replace(each, first_window_bytes=None) for each in loads]
        crossings = crossings_s(plan, topology, warm)
        self._links = RestedLinks(plan, topology, loads[0])
        least_s = per_byte_s * left_bytes
        between_s = between(crossings, left_bytes[chosen], left_bytes)
        self._warm_s = np.where(
            np.isinf(between_s), -math.inf, np.maximum(between_s, least_s[:, None, None])
        )
        self._least_s, self._left_bytes = float(least_s[0]), left_bytes

    @functools.cached_property
    def exchange_s(self) -> float:
        """Seconds of one exchange that nothing hides, of connections that begin."""
        if self._links is None:
            return 0.0
        [first_s], _ = self._links.crossings_s(self._links.first_h[None])
        return max(0.0, float(np.maximum(first_s, self._least_s).max()))

    @property
    def floor_s(self) -> float:
        """Seconds that no step is shorter than, whatever each site computes."""
        return self._floor_s

    def compute_s(self, sequences: Sequence[int]) -> tuple[float, ...]:
        """Return how long each site computes; arguments as for `step_s`."""
        return tuple(
            count * each_s for count, each_s in zip(sequences, self._sequence_s, strict=True)
        )

    def step_s(self, sequences: Sequence[int]) -> float:
        """Return the mean seconds of a step.

        Args:
            sequences: Of the busiest rank of each site, at least 1.
        """
        [step_s] = self.steps_s([sequences])
        return step_s

    def steps_s(
        self, spreads: Sequence[Sequence[int]], like: Sequence[int] | None = None
    ) -> list[float]:
        """Return the same for many spreads of the batch, which is faster than one by one.

        Args:
            spreads: Each as for `step_s`.
            like: TCP's windows are those that this spread settles at, which is faster still, and
                what spreads are that differ little; None: each has its own.
        """
        if self._warm_s is None:
            return [max(self.compute_s(each)) for each in spreads]
        assert self._links is not None, "there is something to exchange"
        warm_bst, left_bst, used_bst = self._of_spreads(spreads)
        weights_bst = warm_bst
        if self._links.are_slow:
            if like is None:
                window_bh = self._settled(warm_bst, left_bst, used_bst)
            elif tuple(like) in self._windows:
                window_bh = self._windows[tuple(like)]
            else:
                window_bh = self._windows[tuple(like)] = self._settled(*self._of_spreads([like]))
            weights_bst, _ = self._rested(warm_bst, left_bst, window_bh)
        found: list[float] = self._at_least(largest_cycle_means(weights_bst)).tolist()
        return found

    def _settled(self, warm_bst: Floats, left_bst: Floats, used_bst: Floats) -> Floats:
        """Return the windows that steps come to; arguments are those of `_row`, shape (B, H).

        From a run's first windows on: how long a step is says how long links rest, and so with
        which windows the next one begins.
        """
        links = self._links
        assert links is not None, "there is something to exchange"
        used_bh, about_s = links.of_links(used_bst), self._about_s(warm_bst)
        _, in_use_bh = links.crossings_s(links.full_h[None])
        window_bh = links.first_h[None]
        for exchange in range(_EXCHANGES):
            idle_bh = about_s[:, None] - np.maximum(in_use_bh, used_bh)
            later_bh = links.windows_after(window_bh, idle_bh)
            if exchange and np.array_equal(later_bh, window_bh):
                break
            window_bh = later_bh
            weights_bst, in_use_bh = self._rested(warm_bst, left_bst, window_bh)
            about_s = self._about_s(weights_bst)
        return window_bh

    def _rested(
        self, warm_bst: Floats, left_bst: Floats, window_bh: Floats
    ) -> tuple[Floats, Floats]:
        """Return `_row`'s seconds with windows, and how long links are used; (B, S, T), (B, H)."""
        assert self._links is not None, "there is something to exchange"
        there_bst, in_use_bh = self._links.crossings_s(window_bh)
        there_bst = np.where(there_bst > 0, np.maximum(there_bst, self._least_s), there_bst)
        return np.maximum(warm_bst, left_bst + there_bst), in_use_bh

    def _of_spreads(self, spreads: Sequence[Sequence[int]]) -> tuple[Floats, Floats, Floats]:
        """Return what `_row` does, of all sites; shape (B, S, T) each."""
        rows = [self._rows_of(source, counts) for source, counts in enumerate(np.array(spreads).T)]
        warm_bst, left_bst, used_bst = (np.stack(each, axis=1) for each in zip(*rows, strict=True))
        return warm_bst, left_bst, used_bst

    def _about_s(self, weights: Floats) -> Floats:
        """Return steps by cycles of two sites and of one, a quick bound: seldom much below them."""
        return self._at_least((weights + weights.swapaxes(1, 2)).max(axis=(1, 2)) / 2)

    def _at_least(self, steps_s: Floats) -> Floats:
        longest_s: Floats = np.maximum(steps_s, self._floor_s)
        return longest_s

    def _rows_of(self, source: int, counts: NDArray[np.int64]) -> tuple[Floats, Floats, Floats]:
        """Return what `_row` does of many spreads, each of shape (spreads, sites)."""
        known, which = np.unique(counts, return_inverse=True)
        rows = [self._row(source, count) for count in known.tolist()]
        warm, left, used = (np.stack(each)[which] for each in zip(*rows, strict=True))
        return warm, left, used

    def _row(self, source: int, num_sequences: int) -> tuple[Floats, Floats, Floats]:
        """Return the seconds from a site's beginning of a step to each site's end: shape (sites,).

        -inf for sites that do not wait for it. Of what does not start slowly; of what does, without
        the time of the crossing; and how long the connections to each site are in use at least.
        What has been worked out is kept: searches ask again.
        """
        if (source, num_sequences) in self._rows:
            return self._rows[source, num_sequences]
        assert self._warm_s is not None, "there is something to exchange"
        assert self._links is not None, "there is something to exchange"
        compute_s = num_sequences * self._sequence_s[source]
        last = (num_sequences - 1) % self._micro_batch + 1
        window_s = self._share_after * last * self._sequence_s[source]
        left_s = compute_s - window_s + self._within_s[source]
        gather_s = self._within_s[:, -1]
        warm_s = (left_s[:, None] + self._warm_s[:, source]).max(axis=0) + gather_s
        warm_s[source] = max(warm_s[source], compute_s)
        used_s = self._links.least_uses_s(source, left_s - left_s[0], self._left_bytes)
        if self._links.are_slow and self._is_gather and len(left_s) > 1:
            late_s = self._links.late_s(source, left_s, self._left_bytes)
            warm_s = np.maximum(warm_s, late_s + gather_s)
        row = warm_s, left_s[0] + gather_s, used_s
        self._rows[source, num_sequences] = row
        return row


def step_time(job: Job, topology: Topology, ratio: float | None = None) -> MeanStep:
    """Return the time of a job's step on a topology.

    Args:
        job: With its placement, if it has one, and its own reduction.
        topology: Of the sites that take part.
        ratio: Encoded bytes for each byte of float32, where it has been measured.

    Raises:
        ConfigError: the job's reduction does not fit the topology.
        ValueError: nothing is exchanged.
    """
    model = StepModel(job, topology, plan_reduction(job, topology), ratio)
    sequences = [max(site_shares(job, topology, site)) for site in topology.sites]
    return MeanStep(
        step_s=model.step_s(sequences),
        compute_s=model.compute_s(sequences),
        exchange_s=model.exchange_s,
        link_s=model.link_s,
        gateway_s=model.gateway_s,
    )


def exchange_time_s(
    job: Job, topology: Topology, raw_bytes: int, ratio: float | None = None
) -> float:
    """Return the seconds from all sites' having `raw_bytes` to all sites' having the sum.

    Args:
        job: gives plan, codecs, chunk size.
        topology: gives the links; its `emulator`, whether there are packets and slow start (`auto`
            counts as netns, and so does a WAN that is not emulated).
        raw_bytes: float32 bytes of the whole gradient.
        ratio: encoded bytes for each of them by `exchange.codec`; needed where that compresses.

    Raises:
        ValueError: no ratio for a codec that compresses.
        ConfigError: the job's tree does not fit the topology.
    """
    return max(crossing_times_s(job, topology, raw_bytes, ratio).values(), default=0.0)


def crossing_times_s(
    job: Job, topology: Topology, raw_bytes: int, ratio: float | None = None
) -> dict[tuple[int, int], float]:
    """Return by which time after one site's start another is done, as far as the first decides.

    Arguments and errors are those of `exchange_time_s`.

    Returns:
        Seconds from the first site's having its gradient to the second's having the last of the sum
        that depends on it, by their indices. Pairs whose sites do not wait for each other are
        missing; in a tree, a site other than the root waits for its own.
    """
    plan = plan_reduction(job, topology)
    if raw_bytes == 0 or plan.num_sites == 1:
        return {}
    return plan_times_s(plan, topology, wire_load(job, topology, plan, raw_bytes, ratio))


def largest_cycle_means(weights: Floats) -> Floats:
    """Return, of each of B graphs, the largest mean weight of the edges of any cycle.

    Karp, "A characterization of the minimum cycle mean in a digraph". O(B nodes^3).

    Args:
        weights: By graph, source and target; shape (B, nodes, nodes). -inf: no edge. Every node has
            one to itself.

    Returns:
        Shape (B,).
    """
    num_graphs, num_nodes, _ = weights.shape
    heaviest = np.zeros((num_nodes + 1, num_graphs, num_nodes))
    """By number of edges: the weight of the heaviest walk of so many that ends at a node."""
    for count in range(num_nodes):
        heaviest[count + 1] = (heaviest[count][:, :, None] + weights).max(axis=1)
    lengths = np.arange(num_nodes, 0, -1)[:, None, None]
    means: Floats = ((heaviest[-1] - heaviest[:-1]) / lengths).min(axis=0).max(axis=1)
    return means
