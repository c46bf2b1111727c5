"""Chooses the regime of a plan, among those that the job permits. Pure.

The search (search.py) plans exchange in every step. Here that plan, and the one over all sites, are
compared with `delayed`, with DiLoCo's rounds, and with streaming in fragments: their steps by the
closed form (topology/cost/local_sgd.py), the loss that they are expected to cost by published
priors (topology/spec/loss_gaps.py). Sites, trees, codecs and the spread of the batch stay those of
the search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from isthmus.topology.cost.local_sgd import open_round, regime_round, regime_step_s
from isthmus.topology.cost.memory import outer_optimizer_bytes
from isthmus.topology.planner.choice import Choice, over_budget
from isthmus.topology.spec.loss_gaps import loss_gap
from isthmus.topology.spec.plan_wishes import PlanWishes
from isthmus.topology.spec.regime import Regime, regime_of
from isthmus.topology.spec.units import format_duration, format_fraction, format_size, significant

_UTILISED = 0.95
"""Target share of a round's time that is compute."""
_GAIN = 0.02
"""Smallest gain, as a share of a step, for which a plan leaves a more exact regime."""
_FRAGMENTS = 8
"""Largest number of fragments in streaming."""
_DELAY = 10
"""Largest delay of a fragment in steps: up to it the loss differs by less than 0.2 %
(arXiv 2501.18512, figure 8)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A plan's sites without their exchange, and the exchange by itself."""

    choice: Choice
    alone_s: float
    """Seconds of a step in which nothing crosses."""
    exchange_s: float
    """Seconds of an exchange that nothing hides."""
    parameters: float
    """Parameters of the whole model."""
    parameters_of_rank: float
    """Parameters for which one rank keeps an outer optimizer."""
    usd_per_s: float
    """Price of all accelerators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One regime over some sites."""

    regime: Regime
    timed: Timed
    step_s: float
    """The mean seconds of a step of the whole batch, with its part of the exchange."""
    utilisation: float
    """Share of the time that is compute."""
    usd_per_step: float
    """In the mean: accelerators, and what crosses."""
    gap: float
    """Loss beyond that of `sync`, as a share of it: a prior."""

    @property
    def what(self) -> str:
        """The regime in words, with its sites."""
        return f"{self.regime.in_words()}, over {', '.join(self.timed.choice.sites)}"

    def decision(self) -> dict[str, Any]:
        """Return the job's `regime` section."""
        written: dict[str, Any] = {"kind": self.regime.kind}
        if self.regime.is_local:
            written["sync_every"] = self.regime.sync_every
        if self.regime.kind == "streaming":
            written |= {"fragments": self.regime.fragments, "delay": self.regime.delay}
        return written


def chosen(
    own: Regime, wishes: PlanWishes, sync: Choice, timed: Sequence[Timed]
) -> tuple[Candidate | None, list[Candidate]]:
    """Return the regime to run, and all that were compared, the best first.

    None: exchange in every step stays, for nothing else is permitted or gains enough.

    Args:
        own: The job's own regime; where it is not `sync`, there is nothing to choose.
        wishes: What the job permits.
        sync: The plan that exchanges in every step.
        timed: Sets of sites that may run it, of more than one site each.
    """
    if not own.is_sync:
        fixed = [_candidate(own, each) for each in timed[:1]]
        return (fixed[0] if fixed else None), fixed
    found = [
        candidate
        for each in timed
        for candidate in _candidates(each, wishes.max_sync_period)
        if _is_permitted(candidate, wishes)
    ]
    figure: Callable[[Choice | Candidate], float] = _usd if wishes.objective == "cost" else _time
    found.sort(key=figure)
    good = [
        each for each in found if sync.is_over_budget or figure(each) < (1 - _GAIN) * figure(sync)
    ]
    if not good:
        return None, found
    near = [each for each in good if figure(each) <= (1 + _GAIN) * figure(good[0])]
    return min(near, key=lambda each: (each.gap, each.regime.sync_every, figure(each))), found


def _time(plan: Choice | Candidate) -> float:
    return plan.step_s


def _usd(plan: Choice | Candidate) -> float:
    return plan.usd_per_step


def is_asked(own: Regime, wishes: PlanWishes) -> bool:
    """Whether another regime than `sync` is given or permitted at the start."""
    if wishes.replan is not None and wishes.replan.regime == "follow":
        return False
    return not own.is_sync or wishes.max_sync_period > 1 or wishes.max_loss_gap is not None


def sentences(
    best: Candidate | None, found: Sequence[Candidate], wishes: PlanWishes, sync: Choice
) -> list[str]:
    """Return what is to be said of the choice, a sentence or two an entry."""
    permitted = f"plan.max_sync_period permits {wishes.max_sync_period} steps between exchanges"
    if wishes.max_loss_gap is not None:
        permitted += f", plan.max_loss_gap {format_fraction(wishes.max_loss_gap)} more loss"
    if best is None:
        least = f"; the best of them, {found[0].what}, takes {_seconds(found[0].step_s)}" * bool(
            found
        )
        return [
            f"The regime stays sync. {permitted}: nothing that this permits is 2 % better{least}."
        ]
    texts = [
        f"The regime is {best.what}: {_seconds(best.step_s)} a step in the mean, "
        f"{format_fraction(round(best.utilisation, 3))} of it compute. Exchange in every step takes "
        f"{_seconds(sync.step_s)}."
    ]
    if best.gap > 0:
        texts.append(
            f"It is expected to end with {format_fraction(round(best.gap, 4))} more loss than sync: a "
            "prior from published models (docs/planning.md), not a measurement of yours."
        )
    if best.regime.is_local:
        size = format_size(outer_optimizer_bytes(best.timed.parameters_of_rank))
        texts.append(f"Its outer optimizer takes {size} a rank, in the host's memory.")
    return texts


def waits(best: Candidate) -> str:
    """Return the cause that limits the step."""
    if best.utilisation >= _UTILISED:
        return "compute"
    share = format_fraction(round(1 - best.utilisation, 3))
    return f"the exchange between sites: for {share} of the time sites wait for it"


def _candidates(timed: Timed, most: int) -> Iterator[Candidate]:
    yield _candidate(regime_of("delayed"), timed)
    if most > 1:
        for regime in rounds(timed.alone_s, timed.exchange_s, most):
            yield _candidate(regime, timed)


def _candidate(regime: Regime, timed: Timed) -> Candidate:
    sync = timed.choice
    if regime.is_open:
        alone_s = [each.alone_s for each in sync.timings]
        round_ = open_round(regime, alone_s, sync.sequences, timed.exchange_s)
        step_s, utilisation = round_.step_s, round_.utilisation
    else:
        step_s = regime_step_s(regime, timed.alone_s, timed.exchange_s)
        utilisation = min(1.0, timed.alone_s / step_s)
    egress_usd = max(0.0, sync.usd_per_step - timed.usd_per_s * sync.step_s)
    return Candidate(
        regime=regime,
        timed=timed,
        step_s=step_s,
        utilisation=utilisation,
        usd_per_step=timed.usd_per_s * step_s + egress_usd / regime.sync_every,
        gap=loss_gap(regime, timed.parameters, len(sync.sites)),
    )


def _is_permitted(candidate: Candidate, wishes: PlanWishes) -> bool:
    if wishes.max_loss_gap is not None and candidate.gap > wishes.max_loss_gap:
        return False
    step_s = candidate.step_s
    egress_usd = candidate.usd_per_step - candidate.timed.usd_per_s * step_s
    return over_budget(egress_usd, step_s, wishes.budget_usd_per_s) <= 1


def rounds(step_s: float, exchange_s: float, most: int) -> list[Regime]:
    """Return DiLoCo, and streaming where there is room for it, of at most `most` steps a round.

    Rounds are only as long as needed for a share _UTILISED of compute.

    Args:
        step_s: Seconds of a step without exchange.
        exchange_s: Seconds of an exchange that nothing hides.
        most: Steps, 2 at least.
    """
    diloco = [regime_of("diloco", sync_every=steps) for steps in range(2, most + 1)]
    fragments = min(_FRAGMENTS, most // 2)
    streaming = [
        regime_of(
            "streaming",
            sync_every=fragments * period,
            fragments=fragments,
            delay=min(_DELAY, period - 1),
        )
        for period in range(2, most // fragments + 1)
    ]
    return [_shortest(each, step_s, exchange_s) for each in (diloco, streaming) if each]


def _shortest(regimes: Sequence[Regime], step_s: float, exchange_s: float) -> Regime:
    """Return the first with enough compute; else the last."""
    enough = (
        each for each in regimes if regime_round(each, step_s, exchange_s).utilisation >= _UTILISED
    )
    return next(enough, regimes[-1])


def _seconds(value: float) -> str:
    return format_duration(significant(value, 4))
