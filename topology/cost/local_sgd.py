"""The time of rounds of local SGD: DiLoCo, and streaming in fragments. Pure.

Replicas take H steps of T seconds by themselves, then exchange pseudo-gradients (Douillard et al.,
"DiLoCo" and "Streaming DiLoCo"). In P fragments, one is sent every H/P steps, and its result may be
applied tau steps later:

    exposed a fragment = max(0, T_wan(N/P) - tau T),   round = H T + P times that

DiLoCo itself is P = 1, tau = 0. A fragment occupies the WAN until the next is sent, so the exchange
keeps up only where T_wan(N/P) <= (H/P) T plus what is exposed. Compute utilisation is H T over the
round.

In rounds that wait for nobody the fastest site takes H steps, and another one as many as end before
that, or LATE of its step after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.topology.spec.regime import LATE, Regime


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round: H steps, and the exchange that belongs to them."""

    steps: float
    """Steps of the whole batch; where sites take unlike many, as much as that."""
    compute_s: float
    """Seconds of compute of all the round's steps; the mean of the sites."""
    exposed_s: float
    """Seconds that replicas wait for the WAN."""

    @property
    def round_s(self) -> float:
        """The seconds from one round's start to the next one's."""
        return self.compute_s + self.exposed_s

    @property
    def utilisation(self) -> float:
        """Share of the round's time that is compute, 0 to 1."""
        return self.compute_s / self.round_s

    @property
    def step_s(self) -> float:
        """The mean seconds of a step, with its part of the exchange."""
        return self.round_s / self.steps


def local_round(
    steps: int,
    step_s: float,
    fragment_s: float,
    num_fragments: int = 1,
    overlap_steps: int = 0,
    tail_s: float = 0.0,
) -> Round:
    """Return a round in the long run.

    Args:
        steps: H, between two exchanges of the same fragment.
        step_s: T, of a step without exchange.
        fragment_s: T_wan, of one fragment's exchange.
        num_fragments: P, at most H; evenly spread over the round.
        overlap_steps: tau, after which a fragment's result is applied: at most H/P.
        tail_s: of the last backward pass, during which finished gradients are already sent.
    """
    exposed_s = max(0.0, fragment_s - overlap_steps * step_s - tail_s)
    return Round(
        steps=steps,
        compute_s=steps * step_s,
        exposed_s=num_fragments * exposed_s,
    )


def regime_step_s(regime: Regime, alone_s: float, exchange_s: float) -> float:
    """Return the mean seconds of a step under a regime that is not `sync`.

    Args:
        regime: `delayed`, of which a step hides an exchange; or a local one, in rounds.
        alone_s: Of a step in which nothing crosses.
        exchange_s: Of an exchange that nothing hides.
    """
    if not regime.is_local:
        return max(alone_s, exchange_s)
    return regime_round(regime, alone_s, exchange_s).step_s


def regime_round(regime: Regime, alone_s: float, exchange_s: float) -> Round:
    """Return the round of a local regime; arguments as of `regime_step_s`."""
    fragment_s = exchange_s / regime.fragments
    return local_round(regime.sync_every, alone_s, fragment_s, regime.fragments, regime.delay)


def open_round(
    regime: Regime, alone_s: Sequence[float], parts: Sequence[float], exchange_s: float
) -> Round:
    """Return a round that waits for nobody, in the long run.

    Args:
        regime: With `min_steps`.
        alone_s: Of each site's step in which nothing crosses.
        parts: Each site's part of the batch, in any unit.
        exchange_s: Of an exchange that nothing hides.
    """
    fastest_s = regime.sync_every * min(alone_s)
    taken = [min(regime.sync_every, math.floor(fastest_s / each + LATE + 1e-9)) for each in alone_s]
    counted = [steps if steps >= (regime.min_steps or 0) else 0 for steps in taken]
    ends_s = [steps * each for steps, each in zip(counted, alone_s, strict=True)]
    compute_s = sum(ends_s) / len(ends_s)
    return Round(
        steps=sum(steps * part for steps, part in zip(counted, parts, strict=True)) / sum(parts),
        compute_s=compute_s,
        exposed_s=max(ends_s) + exchange_s - compute_s,
    )
