"""The regime of a run: how often sites exchange, and what they exchange.

In `sync` and `delayed` sites exchange gradients in every step. In the local kinds each site takes
`sync_every` (H) steps with its own optimizer, the inner one. Then sites exchange how far their
parameters have moved, the pseudo-gradient, and an outer optimizer (SGD with Nesterov momentum)
applies the mean to the global parameters. That is a round.

From: DiLoCo (arXiv 2311.08105), Streaming DiLoCo (2501.18512: fragments, delay, alpha), Scaling
Laws for DiLoCo (2503.09799: the learning rate by sites and H). Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

from isthmus.topology.spec.suggest import one_of, shown
from isthmus.topology.spec.yaml_keys import (
    BelowOne,
    Bounds,
    Count,
    Derived,
    Key,
    KeyedError,
    Read,
    Section,
    choice,
)

KINDS = ("sync", "delayed", "local_sgd", "diloco", "streaming")
"""`sync`: the mean gradient of a step is applied in that step; `delayed`: in the next one;
`local_sgd`: parameters are averaged every H steps; `diloco`: the same, through an outer optimizer;
`streaming`: DiLoCo in fragments, whose results land while training goes on."""
LOCAL = ("local_sgd", "diloco", "streaming")
"""The kinds in which each site takes steps of its own between rounds."""
SYNC_EVERY = 30
"""Default H: as good as gradients in every step at 1 B parameters (2501.18512, table 5)."""
FRAGMENTS_MAX = 8
"""Limit on the fragments where nothing is said: they are H's largest divisor up to it."""
DELAY = 2
"""Default steps from a fragment's sending to its landing; up to 10 cost less than 0.2 % of the loss
(2501.18512, figure 8)."""
ALPHA = 0.5
"""Default share of the local value that stays at a landing (2501.18512)."""
LATE = 0.25
"""Where rounds wait for nobody: the share of its own step by which a site may end a round after the
fastest one. With half of one it would end nearest to that, as often late as early; but others wait
for who is late."""
MOMENTUM = 0.9
"""Default outer momentum (2311.08105)."""


_KINDS_WITH = {
    "sync_every": LOCAL,
    "min_steps": ("local_sgd", "diloco"),
    "outer": ("diloco", "streaming"),
    "fragments": ("streaming",),
    "delay": ("streaming",),
    "alpha": ("streaming",),
    "look": ("delayed",),
}
"""The kinds that take a key."""


def _outer_lr(value: object) -> float | None:
    """Return an outer learning rate; None for `auto`."""
    if value == "auto":
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(value)
    raise ValueError(f"want auto, or a number more than 0; got {shown(value)}")


_LR_SCHEMA = {
    "anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "string", "const": "auto"}]
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterOptimizer(Section):
    """SGD with Nesterov momentum over the rounds of diloco and streaming."""

    lr: Annotated[
        float | None, Read(_outer_lr, _LR_SCHEMA, lambda value: "auto" if value is None else value)
    ] = None
    """auto: by the number of sites and sync_every."""
    momentum: BelowOne | None = None
    """Else 0.9."""
    ramp_steps: Annotated[int, Bounds(ge=0, le=1_000_000_000)] = 300
    """Inner steps over which lr goes from 1 and momentum from 0 to their values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime(Section):
    """How often sites exchange, and what."""

    kind: Annotated[str, Key("kind", is_required=True), choice(KINDS)] = "sync"
    sync_every: Annotated[Count, Derived] = 1
    """Inner steps between two rounds; else 30."""
    min_steps: Count | None = None
    """Of local_sgd and diloco: rounds end when the fastest site has taken sync_every steps, and a
    site counts that has taken so many. Else rounds wait for all sites."""
    outer: OuterOptimizer = OuterOptimizer()
    fragments: Annotated[int, Derived, Bounds(ge=1)] = 1
    """Of streaming: parts of the model that are exchanged in turn; else the largest divisor of
    sync_every up to 8."""
    delay: Annotated[int, Derived, Bounds(ge=0)] = 0
    """Of streaming: steps from a fragment's sending to its landing, less than sync_every /
    fragments; else 2, or what is possible."""
    alpha: Annotated[BelowOne, Derived] = 0.0
    """Of streaming: share of the site's own value that stays at a landing; else 0.5."""
    look: bool = True
    """Of delayed: gradients are computed at a look-ahead point."""

    @classmethod
    def of_keys(cls, **given: Any) -> Regime:  # noqa: ANN401 - each field has its type
        """Return the regime, in which what is not given has the default of its kind."""
        for key, kinds in _KINDS_WITH.items():
            if key in given and given["kind"] not in kinds:
                raise KeyedError(
                    key, f"has no use with kind: {given['kind']}, only with {one_of(kinds)}"
                )
        return regime_of(**given)

    def check(self) -> None:
        """Refuse fragments, and fewest steps, that do not fit a round."""
        if self.min_steps is not None and self.min_steps > self.sync_every:
            raise KeyedError(
                "min_steps", f"want at most sync_every, {self.sync_every}; got {self.min_steps}"
            )
        if self.kind != "streaming":
            return
        period, parts = self.sync_every, self.fragments
        if parts > period:
            raise KeyedError(
                "fragments",
                f"want at most sync_every, {period}: a step sends one at most; got {parts}",
            )
        if period % parts:
            raise KeyedError("fragments", f"want a divisor of sync_every, {period}; got {parts}")
        if self.delay >= period // parts:
            raise KeyedError(
                "delay",
                f"want less than sync_every / fragments, {period // parts}: a fragment lands "
                f"before the next one is sent; got {self.delay}",
            )

    def in_words(self) -> str:
        """Return when sites exchange: `diloco: rounds of 30 steps`."""
        match self.kind:
            case "sync":
                return "sync: each step waits for the mean gradient"
            case "delayed":
                look = "computed ahead" if self.look else "computed without looking ahead"
                return f"delayed: a gradient counts one step later, the next one is {look}"
            case "streaming":
                each = f"{self.fragments} fragments, one every {self.period} steps"
                return (
                    f"streaming: rounds of {self.sync_every} steps in {each}, "
                    f"back {self.delay} later"
                )
        if self.is_open:
            return (
                f"{self.kind}: rounds end when the fastest site has taken {self.sync_every} steps, "
                f"and {self.min_steps} count"
            )
        return f"{self.kind}: rounds of {self.sync_every} steps"

    @property
    def is_sync(self) -> bool:
        """Whether the mean gradient of each step is applied in that step."""
        return self.kind == "sync"

    @property
    def is_local(self) -> bool:
        """Whether each site takes steps of its own between rounds."""
        return self.kind in LOCAL

    @property
    def is_open(self) -> bool:
        """Whether rounds wait for nobody: sites take as many steps as each comes to."""
        return self.min_steps is not None

    @property
    def period(self) -> int:
        """Steps between two rounds: of a fragment each, where there are several."""
        return self.sync_every // self.fragments

    def lands_at(self, step: int) -> bool:
        """Whether the result of a round is there when a step ends. Steps count from 1."""
        return step > self.delay and (step - self.delay) % self.period == 0

    def meets_at(self, step: int) -> bool:
        """Whether all sites can hold the same after a step, as a checkpoint wants it.

        Nothing is under way then. Steps count from 1.
        """
        return step % self.sync_every == 0

    def fragment_sent_at(self, step: int) -> int | None:
        """Return which fragment is sent when a step has ended; None: none is."""
        if step % self.period:
            return None
        return (step // self.period - 1) % self.fragments

    def outer_rates(self, step: int, num_sites: int) -> tuple[float, float]:
        """Return the outer learning rate and momentum of a round of a local kind.

        Args:
            step: Inner steps since the regime began, at the end of the round.
            num_sites: Sites whose pseudo-gradients are in it.
        """
        if self.kind == "local_sgd":
            return 1.0, 0.0
        lr = outer_lr(num_sites, self.sync_every) if self.outer.lr is None else self.outer.lr
        ramp = min(1.0, step / self.outer.ramp_steps) if self.outer.ramp_steps else 1.0
        return lr * ramp + (1.0 - ramp), self.full_momentum * ramp

    @property
    def full_momentum(self) -> float:
        """The outer momentum once it has been ramped up."""
        if self.kind not in ("diloco", "streaming"):
            return 0.0
        return MOMENTUM if self.outer.momentum is None else self.outer.momentum


@dataclass(frozen=True, slots=True)
class Rung:
    """The regime that a run has by now, among those that it may change to."""

    number: int = 0
    """The epoch that decided it; 0: the run has the regime that it began with."""
    kind: str = ""
    """Of RunSpec.ladder; empty: as the run began."""


AS_LAUNCHED = Rung()


def regime_of(
    kind: str,
    *,
    sync_every: int | None = None,
    min_steps: int | None = None,
    outer: OuterOptimizer = OuterOptimizer(),
    fragments: int | None = None,
    delay: int | None = None,
    alpha: float | None = None,
    look: bool = True,
) -> Regime:
    """Return a regime; what is None has the kind's default."""
    if sync_every is None:
        sync_every = SYNC_EVERY if kind in LOCAL else 1
    is_streaming = kind == "streaming"
    if fragments is None:
        divisors = [count for count in range(1, FRAGMENTS_MAX + 1) if sync_every % count == 0]
        fragments = divisors[-1] if is_streaming else 1
    if delay is None:
        delay = min(DELAY, sync_every // fragments - 1) if is_streaming else 0
    if alpha is None:
        alpha = ALPHA if is_streaming else 0.0
    return Regime(
        kind=kind,
        sync_every=sync_every,
        min_steps=min_steps,
        outer=outer,
        fragments=fragments,
        delay=delay,
        alpha=alpha,
        look=look,
    )


def outer_lr(num_sites: int, sync_every: int) -> float:
    """Return the outer learning rate of `auto`.

    Interpolated from figures 7 and 8 of 2503.09799: the best one grows with H, and slightly with
    the number of sites; it does not depend on the size of the model.
    """
    if sync_every <= 10:
        lr = 0.4 if num_sites <= 2 else 0.5
    elif sync_every <= 50:
        lr = 0.6
    elif sync_every <= 200:
        lr = 0.7
    else:
        lr = 0.8
    return round(lr + 0.1, 1) if num_sites >= 8 else lr
