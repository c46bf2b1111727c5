"""How long a step takes by the topology's figures alone: compute, exchange, and what of it is hidden. Pure.

Gradients are ready layer by layer while the last micro-batch goes backward, and leave when they fill a
bucket; with `schedule: serial` all leave at its end. The WAN takes them in that order and pauses only
when there is nothing to send. So site j ends step k no earlier than, for every site i and each of its
releases r, of which all that is not yet sent has L(r) bytes,

    end_i(k-1) + c_i - b_i(r) + RS_i(r) + x_ij(L(r)) + AG_j,

with c_i the time that i computes, b_i(r) how long before the end of that r leaves, x_ij the time of an
exchange of so many bytes from i's start to j's end (topology/wire_time.py; TCP starts slowly for the
first release only), RS and AG the reduce-scatter and all-gather of one bucket inside the site
(topology/fabric.py). That is a recurrence in the algebra of max and plus: the mean step is
its largest cycle mean (topology/cycle_mean.py). Sites that differ do not simply wait for the slowest:
in a gather, a late gradient finds the others' there.

No step is shorter than its bytes take on any link, at any site's network cards, or in a gateway: for
codecs (topology/codec_costs.py), and for sending and receiving. Left out: the optimizer's step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from topology.codec_costs import COSTS, GATEWAY_BYTES_PER_S, usual_ratio
from topology.compute import (
    flops_per_sequence,
    layers,
    num_parameters,
    rate_flops_per_s,
    site_shares,
)
from topology.cost.workload import workload_described
from topology.cycle_mean import largest_cycle_mean
from topology.fabric import reduce_scatter_s
from topology.job import Job
from topology.link_codecs import plan_codecs
from topology.reduction_plans import plan_reduction
from topology.tree_times import Hop, Load, bytes_of_hops, plan_times_s, rate_of
from topology.trees import ReductionPlan
from topology.wire_load import tree_ratios, wire_load, wire_loads
from topology.world import Site, Topology

FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Release:
    """Gradients that leave together."""

    num_bytes: int
    left_bytes: int
    """These, and all that leave later."""
    share_after: float
    """Of a micro-batch's compute, forward and backward: what is still to do when they leave."""


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


def sequence_s(job: Job, site: Site) -> float:
    """Return the seconds of one sequence, forward and backward, on one accelerator of `site`."""
    return flops_per_sequence(job.trainer.model) / rate_flops_per_s(site.accelerator)


def gradient_bytes(job: Job) -> int:
    """Return the float32 bytes that all sites sum up each step."""
    if job.workload is not None:
        return FLOAT32_BYTES * workload_described(job.workload).parameters
    return FLOAT32_BYTES * num_parameters(job.trainer.model)


def releases(job: Job) -> tuple[Release, ...]:
    """Return what leaves together in a step, in the order of leaving."""
    model = job.trainer.model
    left_bytes = gradient_bytes(job)
    if job.exchange.schedule == "serial":
        return (Release(left_bytes, left_bytes, 0.0),)
    parts = layers(model)
    forward_flops = math.fsum(layer.flops_per_token for layer in parts)
    after, num_bytes = 2 / 3, 0
    found = []
    for index, layer in reversed(list(enumerate(parts))):
        after -= 2 / 3 * layer.flops_per_token / forward_flops
        num_bytes += FLOAT32_BYTES * layer.parameters
        if num_bytes >= job.exchange.bucket_bytes or index == 0:
            found.append(Release(num_bytes, left_bytes, max(0.0, after)))
            left_bytes -= num_bytes
            num_bytes = 0
    return tuple(found)


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
        self._rows: dict[tuple[int, int], list[float]] = {}
        self._exchanges: list[Mapping[tuple[int, int], float]] = []
        self._within_s = [
            [reduce_scatter_s(site, each.num_bytes) for each in self._releases]
            for site in topology.sites
        ]
        # Each bucket is reduced and gathered, one after another, for every site.
        self._floor_s = max(2 * math.fsum(each) for each in self._within_s)
        if plan.num_sites > 1:
            load = wire_load(job, topology, plan, raw_bytes, known)
            self.link_bytes = bytes_of_hops(plan, load)
            self.link_s = {
                hop: num_bytes / rate_of(topology, hop)
                for hop, num_bytes in self.link_bytes.items()
            }
            per_byte_s = [
                gateway_s_per_byte(job, topology, plan, site.index, known) / site.nodes
                for site in topology.sites
            ]
            self.gateway_s = tuple(raw_bytes * each for each in per_byte_s)
            left_bytes = [each.left_bytes for each in self._releases]
            loads = wire_loads(job, topology, plan, left_bytes, known)
            # Connections have rested when the first bucket leaves; those after it find them warm.
            loads[1:] = [dataclasses.replace(each, first_window_bytes=None) for each in loads[1:]]
            self._exchanges = [
                _exchange(plan, topology, each, release.left_bytes * max(per_byte_s))
                for each, release in zip(loads, self._releases, strict=True)
            ]
            self._floor_s = max(
                self._floor_s,
                *self.link_s.values(),
                *self.gateway_s,
                *_cards_s(topology, self.link_bytes),
            )

    @property
    def exchange_s(self) -> float:
        """Seconds of one exchange that nothing hides."""
        return max(self._exchanges[0].values(), default=0.0) if self._exchanges else 0.0

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
        if not self._exchanges:
            return max(self.compute_s(sequences))
        weights = [self._row(source, count) for source, count in enumerate(sequences)]
        return max(largest_cycle_mean(weights), self._floor_s)

    def _row(self, source: int, num_sequences: int) -> list[float]:
        """Return the seconds from a site's beginning of a step to each site's end of it.

        -inf for sites that do not wait for it. What has been worked out is kept: searches ask again.
        """
        known = self._rows.get((source, num_sequences))
        if known is not None:
            return known
        compute_s = num_sequences * self._sequence_s[source]
        last = (num_sequences - 1) % self._micro_batch + 1
        micro_batch_s = last * self._sequence_s[source]
        row = [-math.inf] * len(self._sequence_s)
        row[source] = compute_s
        for index, (release, exchange) in enumerate(
            zip(self._releases, self._exchanges, strict=True)
        ):
            left_s = compute_s - release.share_after * micro_batch_s + self._within_s[source][index]
            for target in range(len(row)):
                crossing_s = exchange.get((source, target))
                if crossing_s is not None:
                    end_s = left_s + crossing_s + self._within_s[target][-1]
                    row[target] = max(row[target], end_s)
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


def _exchange(
    plan: ReductionPlan, topology: Topology, load: Load, least_s: float
) -> Mapping[tuple[int, int], float]:
    """Return the crossings of a load: no gateway is faster than it can be, and links neither."""
    crossings_s = plan_times_s(plan, topology, load)
    return {pair: max(each_s, least_s) for pair, each_s in crossings_s.items()}


def gateway_s_per_byte(
    job: Job, topology: Topology, plan: ReductionPlan, site: int, ratio: float
) -> float:
    """Return how long one gateway works for one byte of float32, if it is its site's only one.

    In a gather it decodes everybody's part, its own included. In a tree, its children's sums and
    the result; and it sends up and down, which is as much as it receives.
    """
    codecs = plan_codecs(job, topology, plan)
    ratios = tree_ratios(job, topology, plan, ratio)
    if plan.is_gather:
        parts = [(1.0, plan.num_sites, plan.num_sites - 1)]
    else:
        total = sum(tree.weight for tree in plan.trees)
        children = [len(tree.children(site)) for tree in plan.trees]
        parts = [
            (tree.weight / total, below + 1, below + (tree.root != site))
            for tree, below in zip(plan.trees, children, strict=True)
        ]
    found = []
    for codec, each_ratio, (share, decoded, sent) in zip(codecs, ratios, parts, strict=True):
        cost = COSTS[codec]
        coding_s = 1 / cost.encode_bytes_per_s + decoded / cost.decode_bytes_per_s
        found.append(share * (coding_s + sent * each_ratio / GATEWAY_BYTES_PER_S))
    return math.fsum(found)


def _cards_s(topology: Topology, link_bytes: Mapping[Hop, float]) -> list[float]:
    """Return how long a step's bytes keep each site's network cards busy, each way."""
    busy_s = []
    for site in topology.sites:
        if site.nic_bytes_per_s is not None:
            for end in (0, 1):
                crossing = math.fsum(
                    each for hop, each in link_bytes.items() if hop[end] == site.index
                )
                busy_s.append(crossing / (site.nodes * site.nic_bytes_per_s))
    return busy_s
