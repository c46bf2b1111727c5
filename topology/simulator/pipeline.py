"""The simulation of pipeline parallel training: 1F1B, plain and interleaved, over any links.

Pure.

A stage does its blocks in the order that the schedule gives it (Narayanan et al., "Efficient
large-scale language model training on GPU clusters", SC'21): first as many forwards as it takes
until its first gradient can be there, then one forward and one backward in turn, then the backwards
that are left. Interleaved, each stage holds several parts of the model, and groups of micro-batches
go round the stages once for each of them. A group has as many as there are stages; where they are
no multiple, some have more, for one of fewer would wait for itself (Megatron-core refuses it).

A block begins once the stage is free and what it needs has arrived. What it makes leaves at once
over the link to the stage that needs it, one message after another in each direction, and arrives
half a round trip later. Sending keeps no stage from computing, as with CUDA streams of their own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from topology.simulator.engine import Engine, Server, SimulationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage: all parts of the model that it holds together."""

    forward_s: float
    """Seconds of the forward pass of one micro-batch."""
    backward_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLink:
    """The link to the next stage, both directions alike; the last stage's leads to the first."""

    message_s: float = 0.0
    """Seconds that one micro-batch's activations, or gradients, keep the link busy."""
    delay_s: float = 0.0
    """Seconds of delay, one way."""


@dataclass(frozen=True, slots=True)
class Block:
    """One micro-batch through one part of the model, forward or backward."""

    is_forward: bool
    micro_batch: int
    part: int
    """The part of the model that it goes through, counted from 0 within the stage."""


@dataclass(slots=True)
class PipelineTime:
    """One step of a pipeline."""

    step_s: float
    busy_s: list[float] = field(default_factory=list)
    """Seconds that each stage computed."""
    gradients_s: list[list[float]] = field(default_factory=list)
    """Seconds, by stage and part, at which the last micro-batch's backward pass over it has
    ended."""

    @property
    def bubble(self) -> float:
        """The share of the stages' time in which they had nothing to do."""
        return 1 - sum(self.busy_s) / (len(self.busy_s) * self.step_s)


def turns(num_stages: int, num_micro_batches: int, num_parts: int) -> list[tuple[int, int]]:
    """Return the micro-batches and parts of a stage's forward passes, in their order."""
    num_groups = max(1, num_micro_batches // num_stages)
    cuts = [-(-num_micro_batches * each // num_groups) for each in range(num_groups + 1)]
    return [
        (micro_batch, part)
        for begin, end in itertools.pairwise(cuts)
        for part in range(num_parts)
        for micro_batch in range(begin, end)
    ]


def one_f_one_b(num_stages: int, stage: int, num_micro_batches: int, num_parts: int) -> list[Block]:
    """Return the blocks of a stage, which holds `num_parts` of the model, in their order."""
    order = turns(num_stages, num_micro_batches, num_parts)
    if num_parts == 1:
        warm_up = num_stages - stage - 1
    else:
        group = math.ceil(num_micro_batches / max(1, num_micro_batches // num_stages))
        warm_up = 2 * (num_stages - stage - 1) + (num_parts - 1) * group
    total = len(order)
    warm_up = min(warm_up, total)

    def block(index: int, *, is_forward: bool) -> Block:
        micro_batch, part = order[index]
        return Block(is_forward, micro_batch, part if is_forward else num_parts - 1 - part)

    blocks = [block(index, is_forward=True) for index in range(warm_up)]
    for index in range(total - warm_up):
        blocks.append(block(warm_up + index, is_forward=True))
        blocks.append(block(index, is_forward=False))
    blocks += [block(index, is_forward=False) for index in range(total - warm_up, total)]
    return blocks


def simulate_pipeline(
    stages: Sequence[Stage],
    links: Sequence[StageLink],
    num_micro_batches: int,
    num_parts: int = 1,
) -> PipelineTime:
    """Return how long one step takes, from the first forward to the last backward.

    Links lead from each stage to the next and, if each holds several parts of the model, also from
    the last to the first.

    Raises:
        SimulationError: a link is missing.
    """
    wanted = len(stages) if num_parts > 1 else len(stages) - 1
    if len(links) != wanted:
        raise SimulationError(f"links: want {wanted} for {len(stages)} stages, got {len(links)}")
    return _Pipeline(stages, links, num_micro_batches, num_parts).run()


class _Pipeline:
    def __init__(
        self,
        stages: Sequence[Stage],
        links: Sequence[StageLink],
        num_micro_batches: int,
        num_parts: int,
    ) -> None:
        self._engine = Engine()
        self._stages = stages
        self._links = links
        self._num_parts = num_parts
        self._wires = [(Server(), Server()) for _ in links]
        """The servers of each link, forwards and backwards."""
        self._orders = [
            one_f_one_b(len(stages), index, num_micro_batches, num_parts)
            for index in range(len(stages))
        ]
        self._next = [0] * len(stages)
        self._is_busy = [False] * len(stages)
        self._there = [
            {Block(True, each, 0) for each in range(num_micro_batches)} if index == 0 else set()
            for index in range(len(stages))
        ]
        """The blocks' inputs that each stage has received."""
        self._gradients_s = [[0.0] * num_parts for _ in stages]

    def run(self) -> PipelineTime:
        for stage in range(len(self._stages)):
            self._look(stage)
        self._engine.run()
        for stage, order in enumerate(self._orders):
            assert self._next[stage] == len(order), "a schedule that waits for itself"
        busy_s = [
            sum(self._time_s(stage, block) for block in order)
            for stage, order in enumerate(self._orders)
        ]
        return PipelineTime(self._engine.now_s, busy_s, self._gradients_s)

    def _time_s(self, stage: int, block: Block) -> float:
        times = self._stages[stage]
        return (times.forward_s if block.is_forward else times.backward_s) / self._num_parts

    def _look(self, stage: int) -> None:
        """Begin the stage's next block, if it can."""
        order, index = self._orders[stage], self._next[stage]
        if self._is_busy[stage] or index == len(order) or order[index] not in self._there[stage]:
            return
        self._is_busy[stage] = True
        self._next[stage] += 1
        block = order[index]
        done_s = self._engine.now_s + self._time_s(stage, block)
        self._engine.at(done_s, self._done, stage, block)

    def _done(self, stage: int, block: Block) -> None:
        self._is_busy[stage] = False
        if not block.is_forward:
            self._gradients_s[stage][block.part] = self._engine.now_s
        self._pass_on(stage, block)
        self._look(stage)

    def _pass_on(self, stage: int, block: Block) -> None:
        """Send what a block made to whoever needs it; the loss is the last stage's own."""
        last_stage, last_part = len(self._stages) - 1, self._num_parts - 1
        if block.is_forward:
            if stage == last_stage and block.part == last_part:
                self._arrive(stage, Block(False, block.micro_batch, block.part))
                return
            target, link = (0, last_stage) if stage == last_stage else (stage + 1, stage)
            part = block.part + (stage == last_stage)
        else:
            if stage == 0 and block.part == 0:
                return
            target, link = (last_stage, last_stage) if stage == 0 else (stage - 1, stage - 1)
            part = block.part - (stage == 0)
        message_s, delay_s = self._links[link].message_s, self._links[link].delay_s
        wire = self._wires[link][0 if block.is_forward else 1]
        now_s = self._engine.now_s
        _, left_s = wire.serve(now_s, now_s, message_s, message_s)
        needed = Block(block.is_forward, block.micro_batch, part)
        self._engine.at(left_s + delay_s, self._arrive, target, needed)

    def _arrive(self, stage: int, block: Block) -> None:
        self._there[stage].add(block)
        self._look(stage)
