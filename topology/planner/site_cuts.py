"""The cuts of a site that may be part of a best plan, and their times for any number of sequences.

A cut that is no better than another in anything that a joint step of several sites depends on
(cuts.py) is no part of a best plan, whatever the links are, and is left out: that loses nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from operator import le
from typing import TypeVar

from topology.cost.layer_time import PassTimes, device_of, head_times, interior_of, layer_times
from topology.cost.memory import Memory, memory
from topology.cost.model_shape import Degrees, Workload
from topology.cost.parallel import StepTime, step_from_times
from topology.planner.cuts import Cut, Point, Timing, cut_of
from topology.planner.parallelism import every_cut, why_not
from topology.workload import DescribedModel
from topology.world import Site

Item = TypeVar("Item")
_CLOSEST = 400
"""Cuts that do not fit, whose times are looked at: those that lack least."""


class SiteCuts:
    """What one site can do. Keeps what it has worked out."""

    def __init__(
        self, model: DescribedModel, workload: Workload, site: Site, *, serial: bool = False
    ) -> None:
        """Work out the times of all cuts that fit.

        Args:
            model: As the job describes it.
            workload: The same, as the cost model takes it.
            site: Gives accelerators, nodes, fabric.
            serial: Nothing leaves before the backward pass has ended.
        """
        self.site = site
        self._workload = workload
        self._serial = serial
        self._device, self._inside = device_of(site.accelerator), interior_of(site)
        self._layers: dict[tuple[object, ...], tuple[PassTimes, PassTimes]] = {}
        self._timings: dict[tuple[int, int], tuple[Timing, ...]] = {}
        """By sequences, and layers whose gradients leave together."""
        self._lacking: list[tuple[float, int, Degrees]] = []
        groups: defaultdict[tuple[int, int], list[Cut]] = defaultdict(list)
        for index, degrees in enumerate(every_cut(model, site)):
            needed = memory(workload, degrees, 1)
            if needed.total > site.accelerator.memory_bytes:
                self._lacking.append((needed.total, index, degrees))
                continue
            groups[degrees.data, degrees.micro_batch].append(self._cut(degrees, needed))
        self.cuts = [cut for group in groups.values() for cut in _useful(group)]
        """That fit, with one micro-batch at least."""
        self.sequence_s = min(
            (cut.micro_batch_s / (cut.degrees.data * cut.degrees.micro_batch) for cut in self.cuts),
            default=math.inf,
        )
        """Seconds of the site for a sequence, at least; infinite if no cut fits."""
        self.node_share = min((cut.node_share for cut in self.cuts), default=1.0)
        """Of all gradients, what crosses the gateway of its fullest node, at least."""

    def timings(self, num_sequences: int, together: int = 1) -> tuple[Timing, ...]:
        """Return what may be part of a best plan, the fastest by itself first; none: impossible.

        Args:
            num_sequences: Of a step.
            together: Layers whose gradients leave together.
        """
        key = (num_sequences, together)
        if key not in self._timings:
            able = [cut.timing(*key) for cut in self._able(num_sequences)]
            best = undominated(sorted(able, key=_order), lambda each: each.point)
            self._timings[key] = tuple(best)
        return self._timings[key]

    def alone_s(self, num_sequences: int) -> float:
        """Return the seconds of the fastest step by itself; infinite if there is none."""
        found = self.timings(num_sequences)
        return found[0].alone_s if found else math.inf

    def step(self, degrees: Degrees, num_sequences: int) -> StepTime:
        """Return what the step of a cut consists of."""
        layer, head = self._layer_times(degrees)
        return step_from_times(
            self._workload, degrees, self._device, self._inside, num_sequences, layer, head
        )

    def front(self, num_sequences: int) -> list[tuple[Timing, float]]:
        """Return the cuts no other beats in time and memory, with their bytes, fastest first."""
        able = [cut.timing(num_sequences, 1) for cut in self._able(num_sequences)]
        pairs = [(each, each.cut.memory_bytes(num_sequences)) for each in sorted(able, key=_order)]
        return undominated(pairs, lambda each: (each[0].alone_s, each[1]))

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
        told = [
            why_not(self._workload, each, self.site, num_sequences)
            for _, _, each in sorted(faster.values())[:most]
        ]
        return [each for each in told if each is not None]

    def closest(self) -> str:
        """Return what lacks least memory, of a site where nothing fits."""
        if not self._lacking:
            return "the model cannot be cut over its ranks: none may be without a sequence"
        degrees = min(self._lacking)[2]
        told = why_not(self._workload, degrees, self.site, 1)
        assert told is not None, "what lacks memory does not fit"
        return told

    def _able(self, num_sequences: int) -> list[Cut]:
        """Return the cuts that give every replica a sequence and fit with so many in flight."""
        has = self.site.accelerator.memory_bytes
        return [
            cut
            for cut in self.cuts
            if cut.degrees.data <= num_sequences and cut.memory_bytes(num_sequences) <= has
        ]

    def _cut(self, degrees: Degrees, needed: Memory) -> Cut:
        one = self.step(degrees, degrees.data * degrees.micro_batch)
        return cut_of(self._workload, degrees, self.site, one, needed, serial=self._serial)

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


def _useful(cuts: Sequence[Cut]) -> list[Cut]:
    """Return the cuts of equal micro-batches that no other is as good as, however many they are.

    Bubbles bend where there are as many micro-batches as stages: between these they lie on lines.
    """
    bends = sorted({1, *(cut.degrees.pipeline for cut in cuts)})

    def point(cut: Cut) -> Point:
        return _point(cut, bends)

    return undominated(sorted(cuts, key=point), point)


def _point(cut: Cut, bends: Sequence[int]) -> Point:
    """All that cuts of equal micro-batches differ in, whatever leaves together.

    The first gradients leave at end - window (1 - share), between the end and a window before it.
    """
    ends_s = [cut.head_s(count) for count in bends]
    return (
        cut.micro_batch_s,
        *ends_s,
        *(end_s - cut.window_s for end_s in ends_s),
        *(end_s - cut.node_window_s for end_s in ends_s),
        cut.tail_s,
        cut.node_share,
        1 / cut.num_layers,
        cut.degrees.zero_stage,
        cut.least_bytes,
        cut.in_flight_bytes,
    )


def _order(timing: Timing) -> Point:
    return (timing.alone_s, *timing.point, *timing.preference)
