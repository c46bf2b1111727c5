"""The step model: predicted time of steps, with the hidden part of the exchange. Pure.

A site's gradients leave one release after another (topology/model/site_timing.py), and the WAN
takes them in that order. It pauses only when there is nothing to send. So site j ends step k no
earlier than, for every site i and each of its releases r, of which the share L(r) of all gradients
has not left before,

    end_i(k-1) + leave_i(r) + x_ij(L(r)) + tail_j,

with x_ij the time of an exchange of so much from i's start to j's end
(topology/trees/tree_times.py). TCP starts slowly for what leaves after a pause, with a window that
depends on the pause (topology/model/pauses.py).

Each rank's part crosses its own node's gateway and network card. All nodes of a site send side by
side, and the fullest node of all sites sets the pace: no exchange is shorter than it takes there.

Sites are not in step with each other. With w_ij the largest of the sums above,

    end_j(k) = max over i of (end_i(k - 1) + w_ij),

a linear recurrence in the algebra of max and plus. Whatever sites begin with, its steps take in the
long run the largest mean weight of any cycle (Baccelli et al., "Synchronization and Linearity",
theorem 3.23). So two sites that gather after they have computed for 1 s and 2 s, x apart, take
1.5 s + x, not 2 s + x: the slower one's gradient leaves late, but finds the other's already there.

No step is shorter than its bytes take on any link, or a site's own collectives.

Legend of shapes, which end names in lower case: B steps that are asked for at once, S sites
(sources), T sites (targets), R releases, G shares whose crossings are worked out.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from isthmus.topology.model.buckets import gradient_bytes, releases
from isthmus.topology.model.pauses import RestedLinks
from isthmus.topology.model.site_timing import SiteTiming, trainer_timing
from isthmus.topology.spec.compute import site_shares
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.reduction_plan import ReductionPlan
from isthmus.topology.spec.world import Topology
from isthmus.topology.trees.codec_costs import usual_ratio
from isthmus.topology.trees.link_arrays import LinkArrays, TreeArrays
from isthmus.topology.trees.link_codecs import plan_codecs
from isthmus.topology.trees.small_buckets import gathered_bytes
from isthmus.topology.trees.tree_choice import plan_reduction
from isthmus.topology.trees.tree_flow import Crossing, flow_s
from isthmus.topology.trees.tree_times import plan_times_s
from isthmus.topology.trees.wire_load import Connections, Hop, Load, Wire, gateways_s_per_byte

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_EXCHANGES = 4
"""Number of exchanges over which windows are iterated: they converge within two or three, or
oscillate."""
_GRID = 8
"""Number of gradient shares whose crossings are computed. Others are interpolated: on warm
connections the time is linear in the share, to within a chunk."""
_LEAST_SHARE = 1 / 512
"""Smallest of those shares, if sites may have any."""

Timings = Sequence[SiteTiming]
"""The timing of each site that takes part, in the topology's order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanStep:
    """The mean step in the long run."""

    step_s: float
    exchange_s: float
    """Seconds of one exchange by itself, from all sites' having their gradients to all having the
    mean."""


class ModelLinks:
    """What step models need of a topology's links; worth keeping for many plans over its sites."""

    def __init__(self, job: Job, topology: Topology) -> None:
        """Take the links of a topology, with as many connections as the job wants."""
        self.arrays = LinkArrays(topology)
        self.connections = Connections(topology, job.exchange.channels_per_link)


class StepModel:
    """The steps of one job over one reduction, whatever its sites compute."""

    def __init__(
        self,
        job: Job,
        topology: Topology,
        plan: ReductionPlan,
        ratio: float | None = None,
        links: ModelLinks | None = None,
    ) -> None:
        """Precompute everything that does not depend on the sites' compute.

        Args:
            job: model and exchange; `schedule: off` is refused.
            topology: Topology of the sites that take part.
            plan: Reduction over these sites.
            ratio: Encoded bytes per byte of float32; None: the codecs' usual ratio.
            links: Of the topology by the job, where they are known.
        """
        if job.exchange.schedule == "off":
            raise ValueError("schedule: want an exchange, got off")
        self._plan = plan
        self._rows: dict[tuple[int, SiteTiming], tuple[Floats, Floats]] = {}
        if plan.num_sites > 1:
            ratio = usual_ratio(job.exchange.codec) if ratio is None else ratio
            self._cross(job, topology, ratio, links or ModelLinks(job, topology))

    def _cross(self, job: Job, topology: Topology, ratio: float, links: ModelLinks) -> None:
        """Compute the crossings."""
        plan, raw_bytes, arrays = self._plan, gradient_bytes(job), links.arrays
        wire = Wire(job, topology, plan, ratio, links.connections)
        trees = None if plan.is_gather else TreeArrays(plan)
        described = job.workload is not None
        in_flight = min(site.num_gateways for site in topology.sites) if described else 1
        self._grid_g = _shares(job)
        self._grid = tuple(self._grid_g.tolist())
        loads = [
            wire.load(max(1, math.ceil(share * raw_bytes))).of_gateways(in_flight)
            for share in self._grid_g.tolist()
        ]
        warm = [dataclasses.replace(each, first_window_bytes=None) for each in loads]
        if trees is None:
            self._warm_gst = _gathered_s(arrays, warm)
        else:
            self._warm_gst = flow_s(Crossing(trees, arrays, warm))
        first_bytes_st = _sent_bytes(trees, arrays, loads[0])
        self._links = RestedLinks(trees, arrays, loads[0], first_bytes_st)
        self._sent_bytes_st = _sent_bytes(trees, arrays, wire.load(raw_bytes))
        self._busy_st = self._sent_bytes_st / arrays.rate_st
        self._gateway_s = np.zeros(plan.num_sites)
        if job.plan is None or job.plan.gateways == "measured" or job.workload is None:
            per_byte_s = gateways_s_per_byte(job, topology, plan, ratio)
            of_node = [site.gateways_per_node for site in topology.sites]
            self._gateway_s = raw_bytes * np.array(per_byte_s) / of_node
        crossing_s = np.maximum(self._sent_bytes_st.sum(axis=0), self._sent_bytes_st.sum(axis=1))
        self._card_s = crossing_s / [site.nic_bytes_per_s or math.inf for site in topology.sites]

    @functools.cached_property
    def link_bytes(self) -> Mapping[Hop, float]:
        """Bytes that a step sends over each directed link that it uses."""
        return self._of_hops(self._sent_bytes_st) if self._plan.num_sites > 1 else {}

    @functools.cached_property
    def link_s(self) -> Mapping[Hop, float]:
        """Seconds that a step's bytes keep each of these links busy."""
        return self._of_hops(self._busy_st) if self._plan.num_sites > 1 else {}

    def _of_hops(self, each_st: Floats) -> Mapping[Hop, float]:
        hops = np.argwhere(self._sent_bytes_st)
        return {
            (source, target): float(each_st[source, target]) for source, target in hops.tolist()
        }

    @property
    def busiest_link_s(self) -> float:
        """Seconds that a step's bytes keep the busiest link busy."""
        return float(self._busy_st.max())

    def gateway_s(self, timings: Timings) -> list[float]:
        """Return the busy seconds per step of a gateway in each site's fullest node."""
        return self._of_nodes(timings, self._gateway_s)

    def card_s(self, timings: Timings) -> list[float]:
        """Return the busy seconds of that node's network card, in the busier direction."""
        return self._of_nodes(timings, self._card_s)

    def _of_nodes(self, timings: Timings, one_s: Floats) -> list[float]:
        shares = np.array([each.node_share for each in timings])
        found: list[float] = (shares * one_s).tolist()
        return found

    def exchange_s(self, timings: Timings) -> float:
        """Return the seconds of one exchange on new connections, with nothing hidden."""
        if self._plan.num_sites == 1:
            return 0.0
        pace_s = max(*self.gateway_s(timings), *self.card_s(timings))
        return max(0.0, self._first_s, pace_s)

    @functools.cached_property
    def _first_s(self) -> float:
        [first_st], _ = self._links.crossings_s(self._links.first_h[None])
        return float(first_st.max())

    def step_s(self, timings: Timings) -> float:
        """Return the mean seconds of a step."""
        [step_s] = self.steps_s([timings])
        return step_s

    def steps_s(
        self, asked: Sequence[Timings], most: int | None = None, limit_s: float = math.inf
    ) -> list[float]:
        """Return `step_s` of several timings at once; `asked` has length B.

        Args:
            asked: Timings of the sites, for each step.
            most: Number of shortest steps to return exactly; others are infinite. None: all.
            limit_s: Length beyond which a step may be infinite, too.
        """
        if self._plan.num_sites == 1:
            return [timings[0].alone_s for timings in asked]
        steps = _Steps(self, asked)
        found: Floats = steps.at_least(largest_cycle_means(steps.warm_bst))
        if self._links.are_slow:
            kept = np.argsort(found, kind="stable")[: None if most is None else 2 * most]
            kept = np.sort(kept[found[kept] <= limit_s])
            found[:] = math.inf
            if len(kept):
                if len(kept) < len(asked):
                    steps = _Steps(self, [asked[each] for each in kept.tolist()])
                weights_bst, _ = self._rested(steps, self._settled(steps))
                found[kept] = steps.at_least(largest_cycle_means(weights_bst))
        return [float(each) for each in found]

    def warm_step_s(self, timings: Timings) -> float:
        """Return the mean seconds of a step with warm connections: a lower bound."""
        if self._plan.num_sites == 1:
            return timings[0].alone_s
        steps = _Steps(self, [timings])
        [step_s] = steps.at_least(largest_cycle_means(steps.warm_bst)).tolist()
        return float(step_s)

    def _settled(self, steps: _Steps) -> Floats:
        """Return the windows to which steps converge; shape (B, H).

        Iterates from a run's first windows: the length of a step gives the pauses of links, and so
        the windows with which the next step begins.
        """
        links = self._links
        used_bh, about_s = links.of_links(steps.used_bst), steps.about_s(steps.warm_bst)
        _, in_use_bh = links.crossings_s(links.full_h[None])
        window_bh = links.first_h[None]
        for exchange in range(_EXCHANGES):
            idle_bh = about_s[:, None] - np.maximum(in_use_bh, used_bh)
            later_bh = links.windows_after(window_bh, idle_bh)
            if exchange and np.array_equal(later_bh, window_bh):
                break
            window_bh = later_bh
            weights_bst, in_use_bh = self._rested(steps, window_bh)
            about_s = steps.about_s(weights_bst)
        return window_bh

    def _rested(self, steps: _Steps, window_bh: Floats) -> tuple[Floats, Floats]:
        """Return the weights of steps and the links' busy times for given windows."""
        there_bst, in_use_bh = self._links.crossings_s(window_bh)
        return steps.with_crossing(there_bst), in_use_bh

    def rows(self, asked: Sequence[Timings]) -> tuple[Floats, Floats]:
        """Return sites' arrival times over warm connections, and lower bounds of links' use.

        Results are cached by site and timing, because searches repeat calls.

        Returns:
            Shape (B, S, T) each: seconds from the beginning of the site's step, -inf for sites that
            do not wait for it; and how long the connections to each site are in use at least.
        """
        known = self._rows
        new = {
            (source, timing): None
            for timings in asked
            for source, timing in enumerate(timings)
            if (source, timing) not in known
        }
        alike: dict[tuple[float, ...], list[tuple[int, SiteTiming]]] = {}
        for source, timing in new:
            shares, _ = self._corners(timing)
            alike.setdefault(shares, []).append((source, timing))
        for shares, keys in alike.items():
            known.update(zip(keys, self._new_rows(shares, keys), strict=True))
        found = [[known[each] for each in enumerate(timings)] for timings in asked]
        there_bst = np.array([[there_t for there_t, _ in rows] for rows in found])
        return there_bst, np.array([[used_t for _, used_t in rows] for rows in found])

    def _new_rows(
        self, shares: tuple[float, ...], keys: Sequence[tuple[int, SiteTiming]]
    ) -> Iterator[tuple[Floats, Floats]]:
        """Yield the rows of sites whose gradients leave in the same shares."""
        sources = [source for source, _ in keys]
        leave_nr = np.array([self._corners(timing)[1] for _, timing in keys])
        warm_rst = _between(self._warm_gst, self._grid_g, np.array(shares))
        warm_nt = (leave_nr.T[..., None] + warm_rst[:, sources]).max(axis=0)
        since_nr = leave_nr - leave_nr[:, :1]
        busy_nt = self._links.busy_st[sources]
        used_nt = (since_nr.T[..., None] + np.multiply.outer(shares, busy_nt)).max(axis=0)
        used_nt[busy_nt == 0] = 0.0
        for (source, timing), warm_t, used_t in zip(keys, warm_nt, used_nt, strict=True):
            if self._links.are_slow and self._plan.is_gather and len(timing.leave_s) > 1:
                leave_r, share_r = np.array(timing.leave_s), np.array(timing.left_share)
                warm_t = np.maximum(warm_t, self._links.late_s(source, leave_r, share_r))
            yield warm_t, used_t

    def _corners(self, timing: SiteTiming) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return corners(timing.left_share, timing.leave_s, self._grid)


@functools.lru_cache(maxsize=4096)
def corners(
    shares: tuple[float, ...], leave_s: tuple[float, ...], grid: tuple[float, ...]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the releases that may end last, whatever the crossings are: their shares and times.

    Between two shares of the grid crossings are linear in the share, so only releases on the upper
    convex hull of (share, time) there can be last. The first and the last one are always kept.

    Args:
        shares: Share of all gradients in each release and all later ones, falling.
        leave_s: Seconds at which they leave, rising.
        grid: Shares, falling, between which crossings are interpolated.
    """
    kept: list[int] = []
    hull: list[int] = []
    step = 0
    for index, share in enumerate(shares):
        while step < len(grid) - 2 and share < grid[step + 1]:
            step += 1
            kept += hull
            hull = hull[-1:]
        while len(hull) > 1 and _is_below(hull[-2], hull[-1], index, shares, leave_s):
            hull.pop()
        hull.append(index)
    places = list(dict.fromkeys((*kept, *hull)))
    return tuple(shares[each] for each in places), tuple(leave_s[each] for each in places)


def _is_below(
    before: int, each: int, after: int, shares: Sequence[float], leave_s: Sequence[float]
) -> bool:
    """Return whether a point lies on or below the line between two others."""
    rise_s = (leave_s[after] - leave_s[before]) * (shares[before] - shares[each])
    return (leave_s[each] - leave_s[before]) * (shares[before] - shares[after]) <= rise_s


class _Steps:
    """The parts of B steps of one model, side by side."""

    def __init__(self, model: StepModel, asked: Sequence[Timings]) -> None:
        self._alone_bs = np.array([[each.alone_s for each in timings] for timings in asked])
        self._tail_bt = np.array([[each.tail_s for each in timings] for timings in asked])
        self._first_bs = np.array([[each.leave_s[0] for each in timings] for timings in asked])
        share_bs = np.array([[each.node_share for each in timings] for timings in asked])
        busiest_s = np.maximum(model._gateway_s, model._card_s)
        self._pace_b = (share_bs * busiest_s).max(axis=1)
        inside_b = np.array([max(each.inside_s for each in timings) for timings in asked])
        self._floor_b = np.maximum(np.maximum(self._pace_b, inside_b), model.busiest_link_s)
        there_bst, self.used_bst = model.rows(asked)
        paced_bs = _paced(asked, self._pace_b)
        self._waits_bst = np.isfinite(there_bst)
        paced_bst = np.where(self._waits_bst, paced_bs[..., None], -math.inf)
        self.warm_bst = self._with_own(np.maximum(there_bst, paced_bst))
        """Weights w_ij of connections that are warm; shape (B, S, T)."""

    def with_crossing(self, there_bst: Floats) -> Floats:
        """Return the weights if all gradients arrive at `there_bst` after the first release."""
        there_bst = np.maximum(there_bst, self._pace_b[:, None, None])
        there_bst = np.where(self._waits_bst, there_bst, -math.inf)
        return np.maximum(self.warm_bst, self._with_own(self._first_bs[..., None] + there_bst))

    def _with_own(self, there_bst: Floats) -> Floats:
        weights_bst: Floats = there_bst + self._tail_bt[:, None]
        diagonal = np.arange(weights_bst.shape[1])
        own_bs = np.maximum(weights_bst[:, diagonal, diagonal], self._alone_bs)
        weights_bst[:, diagonal, diagonal] = own_bs
        return weights_bst

    def about_s(self, weights_bst: Floats) -> Floats:
        """Return a quick lower bound of steps, from cycles of one or two sites."""
        return self.at_least((weights_bst + weights_bst.swapaxes(1, 2)).max(axis=(1, 2)) / 2)

    def at_least(self, steps_b: Floats) -> Floats:
        """Return the steps, at least as long as bytes take on a link, in a gateway or inside."""
        longest_b: Floats = np.maximum(steps_b, self._floor_b)
        return longest_b


def _paced(asked: Sequence[Timings], pace_b: Floats) -> Floats:
    """Return when the fullest node of each site is done; shape (B, S)."""
    every = dict.fromkeys(timing for timings in asked for timing in timings)
    leaves = [corners(*_of_node(timing), (1.0, 0.0)) for timing in every]
    most = max(len(leave_s) for _, leave_s in leaves)
    leave_ur, share_ur = np.full((len(every), most), -math.inf), np.zeros((len(every), most))
    for index, (shares, leave_s) in enumerate(leaves):
        leave_ur[index, : len(leave_s)], share_ur[index, : len(leave_s)] = leave_s, shares
    place = {timing: index for index, timing in enumerate(every)}
    which_bs = np.array([[place[timing] for timing in timings] for timings in asked])
    found: Floats = (leave_ur[which_bs] + share_ur[which_bs] * pace_b[:, None, None]).max(axis=2)
    return found


def _of_node(timing: SiteTiming) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if timing.node_leave_s:
        return timing.node_left_share, timing.node_leave_s
    return timing.left_share, timing.leave_s


def _gathered_s(links: LinkArrays, loads: Sequence[Load]) -> Floats:
    """Return the times of a gather over warm connections; shape (G, S, T), -inf on the diagonal."""
    bytes_g = np.array([load.num_chunks * load.chunk_bytes[0] for load in loads])
    there_gst = bytes_g[:, None, None] / links.rate_st + links.rtt_st / 2
    own = np.arange(links.num_sites)
    there_gst[:, own, own] = -math.inf
    return there_gst


def _sent_bytes(trees: TreeArrays | None, links: LinkArrays, load: Load) -> Floats:
    """Return the mean bytes of a load on each directed link; shape (S, T)."""
    bytes_k = load.num_chunks * np.array(load.chunk_bytes)
    if trees is None:
        sent_st = np.full_like(links.rate_st, bytes_k[0])
        np.fill_diagonal(sent_st, 0.0)
        return sent_st
    sent_st = np.zeros_like(links.rate_st)
    of_tree_k = bytes_k * trees.weight_k / trees.weight_k.sum()
    np.add.at(sent_st, trees.hops, of_tree_k[trees.legs[1]])
    return sent_st


def _shares(job: Job) -> Floats:
    """Return the gradient shares whose crossings are computed, descending from 1."""
    if job.workload is not None:
        return np.geomspace(1.0, _LEAST_SHARE, _GRID)
    total = gradient_bytes(job)
    left = np.array([each.left_bytes / total for each in releases(job)])
    if len(left) <= _GRID:
        return left
    wanted = np.geomspace(left[0], left[-1], _GRID)
    nearest = np.abs(np.log(left[:, None] / wanted)).argmin(axis=0)
    return left[sorted({0, len(left) - 1, *nearest.tolist()})]


def _between(known_s: Floats, at: Floats, wanted: Floats) -> Floats:
    """Interpolate crossings linearly between known shares.

    Args:
        known_s: Shape (G, S, T); -inf stays.
        at: Shares, falling; shape (G,).
        wanted: Shares; shape (R,).
    """
    if len(at) == 1 or np.array_equal(at, wanted):
        return known_s[: len(wanted)]
    after = np.clip(np.searchsorted(-at, -wanted), 1, len(at) - 1)
    part = np.clip((at[after - 1] - wanted) / (at[after - 1] - at[after]), 0.0, 1.0)
    one, other = known_s[after - 1], known_s[after]
    # With few chunks some trees carry none, and no site waits for them.
    falls = np.isfinite(one) & np.isfinite(other)
    rise = np.where(falls, other, 0.0) - np.where(falls, one, 0.0)
    alone = np.where(part[:, None, None] < 1, one, other)
    found: Floats = np.where(falls, one + part[:, None, None] * rise, alone)
    return found


def step_time(job: Job, topology: Topology, ratio: float | None = None) -> MeanStep:
    """Return the time of a step of the shipped trainer.

    Args:
        job: The job, with its placement, if any, and its own reduction.
        topology: Topology of the sites that take part.
        ratio: Encoded bytes per byte of float32, if measured.

    Raises:
        ConfigError: the job's reduction does not fit the topology.
        ValueError: the job has no exchange.
    """
    model = StepModel(job, topology, plan_reduction(job, topology), ratio)
    timings = [
        trainer_timing(job, site, max(site_shares(job, topology, site))) for site in topology.sites
    ]
    return MeanStep(step_s=model.step_s(timings), exchange_s=model.exchange_s(timings))


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
    plan = plan_reduction(job, topology)
    if raw_bytes == 0 or plan.num_sites == 1:
        return 0.0
    if raw_bytes <= gathered_bytes(topology, plan, plan_codecs(job, topology, plan)):
        plan = plan.gathering()
    load = Wire(job, topology, plan, ratio).load(raw_bytes)
    return max(plan_times_s(plan, topology, load).values())


def largest_cycle_means(weights: Floats) -> Floats:
    """Return the largest mean edge weight of a cycle, for each of B graphs.

    Karp, "A characterization of the minimum cycle mean in a digraph". O(B nodes^3).

    Args:
        weights: By graph, source and target; shape (B, nodes, nodes). -inf: no edge. Every node has
            one to itself.

    Returns:
        Shape (B,).
    """
    num_graphs, num_nodes, _ = weights.shape
    heaviest = np.zeros((num_nodes + 1, num_graphs, num_nodes))
    """The weight of the heaviest walk of each number of edges that ends at a node."""
    for count in range(num_nodes):
        heaviest[count + 1] = (heaviest[count][:, :, None] + weights).max(axis=1)
    lengths = np.arange(num_nodes, 0, -1)[:, None, None]
    means: Floats = ((heaviest[-1] - heaviest[:-1]) / lengths).min(axis=0).max(axis=1)
    return means
