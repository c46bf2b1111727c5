"""Training that synchronises seldom: data parallel, DiLoCo, and Streaming DiLoCo with overlap.

Pure.

The graph of Douillard et al., "Streaming DiLoCo with overlapping communication" (arXiv 2501.18512),
for two or more replicas that are alike: in each step a layer goes forward, then backward for its
activations (the first one not) and for its parameters, one after another on the accelerator; a
layer that is due is reduced after that, one after another on the link. Its forward pass in step s +
1 + overlap waits for what step s reduced.

A layer is due every `every` steps. Fragments are layers a stride apart, and take turns evenly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from isthmus.topology.simulator.engine import Server, SimulationError

GRADIENT_BITS = 16
_STEPS_MIN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSgd:
    """One way to synchronise replicas."""

    num_layers: int
    step_s: float
    """Of one inner step, compute alone; a third of it forward."""
    num_parameters: float
    every: int = 1
    """Inner steps of a round; 1: data parallel."""
    fragment_layers: int | None = None
    """Layers of a fragment; None: all layers are due in the same step."""
    overlap_steps: int = 0
    """That a fragment's result may come later."""
    bits: int = GRADIENT_BITS
    """A parameter, on the wire."""
    num_replicas: int = 2

    def __post_init__(self) -> None:
        if self.num_layers < 1 or self.every < 1 or self.num_replicas < 2:
            raise ValueError("want a layer, an inner step and two replicas at least")
        if self.overlap_steps < 0 or self.overlap_steps >= self.every > 1:
            raise ValueError(
                f"overlap_steps: want less than a round, {self.every}; got {self.overlap_steps}"
            )

    @property
    def num_fragments(self) -> int:
        """That take turns."""
        if self.fragment_layers is None:
            return 1
        return math.ceil(self.num_layers / self.fragment_layers)

    def fragment(self, layer: int) -> int:
        """Return which fragment a layer belongs to: a stride apart, as the paper found best."""
        return layer % self.num_fragments

    def is_due(self, fragment: int, step: int) -> bool:
        """Whether a fragment is reduced after a step, which counts from 0."""
        offset = self.every * (fragment + 1) // self.num_fragments
        return (step + 1 - offset) % self.every == 0


def utilisation(way: LocalSgd, bits_per_s: float, rtt_s: float = 0.0, rounds: int = 2) -> float:
    """Return the share of the time in which replicas compute, 0 to 1.

    Args:
        way: how they synchronise.
        bits_per_s: of each replica's link.
        rtt_s: half of it later a result arrives.
        rounds: that are looked at, after one that warms up.
    """
    if bits_per_s <= 0:
        raise SimulationError("bits_per_s: want more than 0")
    # An all-reduce among R sends 2 (1 - 1/R) of the bytes over each link (Patarasuk and Yuan,
    # 2009).
    sent = 2 * (1 - 1 / way.num_replicas)
    reduce_s = sent * way.bits * way.num_parameters / way.num_layers / bits_per_s
    node_s = way.step_s / (3 * way.num_layers - 1)
    link = Server()
    layers = range(way.num_layers)
    due = [
        {each for each in range(way.num_fragments) if way.is_due(each, step)}
        for step in range(way.every)
    ]
    arrives_s: dict[tuple[int, int], float] = {}
    """By step and layer: when the result that its forward pass waits for is there."""
    # Data parallel has rounds of a step: some of them to see the long run.
    first = max(way.every, _STEPS_MIN)
    now_s = began_s = 0.0
    for step in range((rounds + 1) * first):
        if step == first:
            began_s = now_s
        fragments = due[step % way.every]
        if not fragments and not arrives_s:
            now_s += way.step_s
            continue
        for layer in layers:
            now_s = max(now_s, arrives_s.pop((step, layer), 0.0)) + node_s
        for layer in reversed(layers):
            now_s += node_s if layer == 0 else 2 * node_s
            if way.fragment(layer) in fragments:
                _, left_s = link.serve(now_s, now_s, reduce_s, reduce_s)
                arrives_s[step + 1 + way.overlap_steps, layer] = left_s + rtt_s / 2
    return rounds * first * way.step_s / (now_s - began_s)
