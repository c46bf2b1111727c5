"""The cuts of a described model over each site's ranks, and which of them fit memory.

Degrees are divisors of a site's ranks: tensor groups stay within a node, and all ranks take part.
Of the shipped trainer's model, each node may also hold a copy of what ZeRO cuts (HSDP).
What is left after tensor, pipeline and context is data. Stages may differ by a layer. ZeRO 2 and 3
come without a pipeline only: cut gradients or parameters would cross the fabric again for every
micro-batch.

Timings with the same number of sequences are compared in all figures on which a joint step depends
(topology/model/site_timing.py). A dominated timing is never part of a best plan, whatever the links
are, and is left out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from operator import le
from typing import TypeVar

from isthmus.topology.cost.layer_time import (
    PassTimes,
    device_of,
    head_times,
    interior_of,
    layer_times,
)
from isthmus.topology.cost.memory import memory
from isthmus.topology.cost.parallel import StepTime, step_from_times
from isthmus.topology.model.site_timing import (
    Cut,
    Point,
    SiteTiming,
    cut_of,
    layers_together,
    trainer_timing,
)
from isthmus.topology.spec.compute import site_shares
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.job import Job, Placed
from isthmus.topology.spec.model_shape import Degrees, Workload, degrees_of, workload_described
from isthmus.topology.spec.trainer_cuts import is_planned, is_uneven
from isthmus.topology.spec.units import format_size
from isthmus.topology.spec.workload import DescribedModel, Parallel
from isthmus.topology.spec.world import Site, Topology

Item = TypeVar("Item")
_CLOSEST = 400
"""Number of cuts that do not fit but whose times are computed: those that lack least memory."""
CONTEXT_TOKENS_MIN = 2048
"""Tokens of a sequence that context parallelism leaves to a rank, at least: kernels of fewer are
mostly overhead."""
MICRO_BATCHES = (1, 2, 4, 8, 16)
"""Micro-batch sizes that are tried if the job names none."""
VIRTUAL_STAGES_MAX = 16


def every_cut(model: DescribedModel, site: Site) -> Iterator[Degrees]:
    """Yield every way to cut a model over all of a site's ranks, whether it fits memory or not.

    Of the shipped trainer's model, every way that the trainer can run.
    """
    limits = {
        name: most for name, most in dataclasses.asdict(model.at_most).items() if most is not None
    }
    for degrees in _cuts(model, site):
        if all(getattr(degrees, name) <= most for name, most in limits.items()) and (
            not model.is_trainers or is_planned(model, degrees)
        ):
            yield degrees


def _cuts(model: DescribedModel, site: Site) -> Iterator[Degrees]:
    for tensor in _divisors(math.gcd(site.accelerators_per_node, model.heads)):
        for pipeline in _pipelines(model, site.num_ranks // tensor):
            for context in _contexts(model, site.num_ranks // (tensor * pipeline)):
                data = site.num_ranks // (tensor * pipeline * context)
                base = Degrees(
                    tensor=tensor,
                    pipeline=pipeline,
                    context=context,
                    data=data,
                    sequence_parallel=tensor > 1,
                    fused_attention=model.fused_attention,
                    overlap_data=True,
                )
                if data <= model.global_batch:
                    yield from _variants(model, base, site.accelerators_per_node // tensor)


def _variants(model: DescribedModel, base: Degrees, in_node: int) -> Iterator[Degrees]:
    """Yield the variants of a cut in its other settings; `in_node` replicas are in one node."""
    sizes = MICRO_BATCHES if model.micro_batch is None else (model.micro_batch,)
    again = ("none", "full") if model.fused_attention else ("none", "selective", "full")
    for expert in _divisors(math.gcd(model.experts, base.data)):
        for zero_stage, replicate in _zero_stages(model, base, in_node):
            for virtual_stages in _virtual_stages(model, base.pipeline):
                for micro_batch in sizes:
                    if micro_batch > 1 and base.data * micro_batch > model.global_batch:
                        continue
                    for recompute in again:
                        yield dataclasses.replace(
                            base,
                            expert=expert,
                            zero_stage=zero_stage,
                            replicate=replicate,
                            virtual_stages=virtual_stages,
                            micro_batch=micro_batch,
                            recompute=recompute,
                        )


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _contexts(model: DescribedModel, ranks: int) -> list[int]:
    most = max(1, model.context // CONTEXT_TOKENS_MIN)
    return [each for each in _divisors(math.gcd(ranks, model.context)) if each <= most]


def _zero_stages(model: DescribedModel, base: Degrees, in_node: int) -> Iterator[tuple[int, int]]:
    """Yield (ZeRO stage, number of copies of the sharded state)."""
    stages = (0, 1, 2, 3) if base.pipeline == 1 else (0, 1)
    for stage in stages if base.data * base.context > 1 else (0,):
        yield stage, 1
        is_spread = 1 < in_node < base.data and base.data % in_node == 0
        if model.is_trainers and stage > 0 and is_spread:
            yield stage, base.data // in_node


def _pipelines(model: DescribedModel, ranks: int) -> list[int]:
    """Return useful numbers of pipeline stages: more stages must make the largest one smaller."""
    counts = [each for each in _divisors(ranks) if each <= model.layers]
    return [each for each in counts if math.ceil(model.layers / _widest(model, each)) == each]


def _widest(model: DescribedModel, num_parts: int) -> int:
    return math.ceil(model.layers / num_parts)


def _virtual_stages(model: DescribedModel, pipeline: int) -> list[int]:
    """Return the numbers of virtual stages that do not enlarge the largest stage."""
    if pipeline == 1:
        return [1]
    most = min(VIRTUAL_STAGES_MAX, (model.layers + 2) // pipeline)
    return [
        each
        for each in range(1, most + 1)
        if each * _widest(model, pipeline * each) == _widest(model, pipeline)
    ]


def parallel_of(degrees: Degrees) -> Parallel:
    """Return a cut as jobs and plans write it."""
    names = [field.name for field in dataclasses.fields(Parallel)]
    return Parallel(**{name: getattr(degrees, name) for name in names})


def in_words(degrees: Degrees) -> str:
    """Return a cut for people: `tensor 8, pipeline 12, data 16, ZeRO 1, micro-batch 1`."""
    words = [f"tensor {degrees.tensor}"]
    if degrees.pipeline > 1:
        words.append(f"pipeline {degrees.pipeline}")
    if degrees.virtual_stages > 1:
        words.append(f"{degrees.virtual_stages} virtual stages")
    if degrees.context > 1:
        words.append(f"context {degrees.context}")
    words.append(f"data {degrees.data}")
    if degrees.expert > 1:
        words.append(f"expert {degrees.expert}")
    if degrees.zero_stage:
        copies = f" in {degrees.replicate} copies" if degrees.replicate > 1 else ""
        words.append(f"ZeRO {degrees.zero_stage}{copies}")
    words.append(f"micro-batch {degrees.micro_batch}")
    if degrees.recompute != "none":
        words.append(f"{degrees.recompute} recompute")
    return ", ".join(words)


def why_not(workload: Workload, degrees: Degrees, site: Site, num_sequences: int) -> str | None:
    """Return why a cut does not fit memory, and the effect of recomputing; None: it fits."""
    needed = memory(workload, degrees, num_sequences).total
    has = site.accelerator.memory_bytes
    if needed <= has:
        return None
    reason = f"{in_words(degrees)} does not fit: needs {_gib(needed)} of {format_size(has)}"
    if degrees.recompute == "full":
        return reason
    full = dataclasses.replace(degrees, recompute="full")
    return f"{reason}; with full recompute {_gib(memory(workload, full, num_sequences).total)}"


def _gib(num_bytes: float) -> str:
    size = num_bytes / 2**30
    return f"{size:.0f}GiB" if size >= 100 else f"{size:.3g}GiB"


class SiteCuts:
    """The feasible cuts of one site, with cached timings."""

    def __init__(
        self,
        model: DescribedModel,
        workload: Workload,
        site: Site,
        serial: bool = False,
        given: Degrees | None = None,
    ) -> None:
        """Work out the times of all cuts that fit.

        Args:
            model: As the job describes it.
            workload: The same, as the cost model takes it.
            site: Gives accelerators, nodes, fabric.
            serial: Whether gradients leave only after the backward pass.
            given: The only cut to consider, fitting or not; None: all that fit.
        """
        self.site = site
        self._workload = workload
        self._serial = serial
        self._is_trainers = model.is_trainers
        self._device, self._inside = device_of(site.accelerator), interior_of(site)
        self._layers: dict[tuple[object, ...], tuple[PassTimes, PassTimes]] = {}
        self._timings: dict[tuple[int, int], tuple[SiteTiming, ...]] = {}
        """The timings that were worked out, by sequences and by layers whose gradients leave
        together."""
        self.cuts: list[Cut] = []
        """The cuts that fit, with one micro-batch at least."""
        self._lacking: list[tuple[float, int, Degrees]] = []
        self._is_given = given is not None
        for index, degrees in enumerate(every_cut(model, site) if given is None else (given,)):
            needed = memory(workload, degrees, 1).total
            if given is None and needed > site.accelerator.memory_bytes:
                self._lacking.append((needed, index, degrees))
                continue
            self.cuts.append(self._cut(degrees))
        self.sequence_s = min(
            (cut.micro_batch_s / (cut.degrees.data * cut.degrees.micro_batch) for cut in self.cuts),
            default=math.inf,
        )
        """Seconds of the site for a sequence, at least; infinite if no cut fits."""

    def timings(self, num_sequences: int, together: int = 1) -> tuple[SiteTiming, ...]:
        """Return the undominated timings, the fastest alone first; empty: impossible.

        Args:
            num_sequences: Of a step.
            together: Layers whose gradients leave together.
        """
        key = (num_sequences, together)
        if key not in self._timings:
            able = [cut.timing(*key) for cut in self._able(num_sequences)]
            best = undominated(sorted(able, key=_order), timing_point)
            self._timings[key] = tuple(best)
        return self._timings[key]

    def alone_s(self, num_sequences: int) -> float:
        """Return the seconds of the fastest step by itself; infinite if there is none."""
        found = self.timings(num_sequences)
        return found[0].alone_s if found else math.inf

    def step(self, degrees: Degrees, num_sequences: int) -> StepTime:
        """Return the times of a cut's step."""
        layer, head = self._layer_times(degrees)
        return step_from_times(
            self._workload, degrees, self._device, self._inside, num_sequences, layer, head
        )

    def front(self, num_sequences: int) -> list[tuple[SiteTiming, Cut, float]]:
        """Return the cuts no other beats in time and memory, with their bytes, fastest first."""
        able = [(cut.timing(num_sequences, 1), cut) for cut in self._able(num_sequences)]
        able.sort(key=lambda each: _order(each[0]))
        found = [(timing, cut, cut.memory_bytes(num_sequences)) for timing, cut in able]
        return undominated(found, lambda each: (each[0].alone_s, each[2]))

    def lacking(self, num_sequences: int, than_s: float, most: int) -> list[str]:
        """Return why cuts do not fit that would be faster than `than_s`, the fastest first."""
        degrees = [each for _, _, each in sorted(self._lacking)[:_CLOSEST]]
        able = set(map(id, self._able(num_sequences)))
        degrees += [cut.degrees for cut in self.cuts if id(cut) not in able]
        faster: dict[tuple[int, ...], tuple[float, int, Degrees]] = {}
        for index, each in enumerate(degrees):
            if each.data > num_sequences:
                continue
            step_s = self.step(each, num_sequences).step_s
            key = (each.tensor, each.pipeline, each.context, each.data)
            if step_s < than_s and (key not in faster or step_s < faster[key][0]):
                faster[key] = (step_s, index, each)
        reasons = [
            why_not(self._workload, each, self.site, num_sequences)
            for _, _, each in sorted(faster.values())[:most]
        ]
        return [each for each in reasons if each is not None]

    def closest(self) -> str:
        """Return the cut that lacks least memory, for a site where none fits."""
        if not self._lacking:
            return "the model cannot be cut over its ranks: none may be without a sequence"
        degrees = min(self._lacking)[2]
        told = why_not(self._workload, degrees, self.site, 1)
        assert told is not None, "what lacks memory does not fit"
        return told

    def _able(self, num_sequences: int) -> list[Cut]:
        """Return the cuts that give every replica a sequence and fit memory."""
        has = self.site.accelerator.memory_bytes
        return [
            cut
            for cut in self.cuts
            if self._is_given
            or (
                cut.degrees.data <= num_sequences
                and cut.memory_bytes(num_sequences) <= has
                and not (self._is_trainers and is_uneven(cut.degrees, num_sequences))
            )
        ]

    def _cut(self, degrees: Degrees) -> Cut:
        one = self.step(degrees, degrees.data * degrees.micro_batch)
        return cut_of(self._workload, degrees, self.site, one, serial=self._serial)

    def _layer_times(self, degrees: Degrees) -> tuple[PassTimes, PassTimes]:
        key = (
            degrees.tensor,
            degrees.context,
            degrees.expert,
            degrees.micro_batch,
            degrees.recompute,
        )
        if key not in self._layers:
            self._layers[key] = (
                layer_times(self._workload, degrees, self._device, self._inside),
                head_times(self._workload, degrees, self._device),
            )
        return self._layers[key]


def undominated(items: Iterable[Item], point: Callable[[Item], Point]) -> list[Item]:
    """Return the items that no earlier one is at least as good as, in every entry.

    Args:
        items: Sorted so that what is better in all comes first.
        point: Of each.
    """
    kept: list[tuple[Point, Item]] = []
    for item in items:
        mine = point(item)
        if not any(all(map(le, theirs, mine)) for theirs, _ in kept):
            kept.append((mine, item))
    return [item for _, item in kept]


def timing_point(timing: SiteTiming) -> Point:
    """Return the figures of a timing on which a joint step depends."""
    return (
        *reversed(timing.leave_s),
        timing.node_leave_s[0],
        timing.tail_s,
        timing.node_share,
        timing.left_share[-1],
        timing.node_left_share[-1],
    )


def _order(timing: SiteTiming) -> Point:
    assert timing.cut is not None, "of a model that is cut"
    return (timing.alone_s, *timing_point(timing), *timing.cut.preference)


def placed_timings(job: Job, topology: Topology) -> list[SiteTiming]:
    """Return each site's timing in a run; by its fastest cut if the cut is unknown.

    Args:
        job: With its placement, if it has one.
        topology: Of the sites that take part.

    Raises:
        ConfigError: the model fits a site in no way.
    """
    if job.workload is None:
        return [
            trainer_timing(job, site, max(site_shares(job, topology, site)))
            for site in topology.sites
        ]
    placed = {each.site: each for each in job.placement}
    workload, timings = workload_described(job.workload), []
    for site in topology.sites:
        mine = placed.get(site.name)
        even = -(-job.global_batch * site.num_ranks // topology.num_ranks)
        sequences = even if mine is None else mine.sequences
        together = layers_together(workload, job.exchange.bucket_bytes)
        cuts = site_cuts(job, site, mine)
        able = cuts.timings(sequences, together)
        if not able:
            raise ConfigError(f"site {site.name}: {cuts.closest()}")
        timings.append(able[0])
    return timings


def site_cuts(job: Job, site: Site, placed: Placed | None) -> SiteCuts:
    """Return the cuts of a site to consider: the placement's, or all."""
    assert job.workload is not None, "the job describes its model"
    given = None
    if placed is not None and placed.parallel is not None:
        given = degrees_of(placed.parallel, job.workload)
    serial = job.exchange.schedule == "serial"
    return SiteCuts(job.workload, workload_described(job.workload), site, serial, given)
