"""One verdict on a run, in words: how much of its time was training, and what would help. Pure.

Training is what a single site would spend, too: compute, and collectives inside the site. The rest
of a step crosses the WAN unhidden, or waits for slower sites. At most one remedy is named, and only
where the facts speak for it:

- *slow link*: while a link was the limit it carried much less than is described;
- *codec*: the bytes set the pace, and a smaller codec that keeps most of a gradient makes the step
  clearly shorter: by the step model where it knows the job, else by the bytes;
- *plan*: the planner knows a better plan, which the job does not permit;
- *link share*: the bytes set the pace, and the run may use a part of the link only;
- *micro-batches*: a few more of them between two exchanges make the exchange a small part;
- *regime*: too many of them would be needed, so sites are to exchange less often;
- *slow site*: others waited for it for a good part of the run;
- *detection*: most of the time that the run stood still, it waited to notice a loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from isthmus.orchestrator.evidence.view import formats
from isthmus.topology.trees.codec_costs import RELATIVE_ERRORS, usual_ratio

GOOD, FAIR, POOR, UNKNOWN = "good", "fair", "poor", "unknown"
GOOD_LOST = 0.05
FAIR_LOST = 0.15
"""Shares of the time that are not training, up to which a run is good, and fair."""
LEAST_STEPS = 10
"""Fewer steps say nothing: connections and caches still warm up."""
AS_PLANNED = 0.05
"""Deviation from the plan's step that is none."""
WORTH_IT = 0.05
"""Least share of a step that a remedy has to save."""
LEAST_DELIVERED = 0.7
"""Share of the described bandwidth below which a link is slow."""
MAX_ERROR = 0.05
"""Relative error of a gradient beyond which no codec is proposed: who wants one has measured it."""
_NEAR = 1.03
"""Ratio to the fastest codec's step up to which a more exact one is proposed instead."""
_SLOW_STEPS = 0.2
"""Share of the steps in which a site has to have been slow."""
_WANTED_SHARE = 0.1
"""The WAN's share of a step that more micro-batches are to bring."""
_MOST_MICRO_BATCHES = 8
"""More of them, and the batch would be another one."""
_TIMES = {2: "twice", 3: "three times", 4: "four times"}
_FORBIDDEN = " (not permitted)"
"""What the planner adds to alternatives that are better, and that the job rules out."""
_PACED = 0.5
"""Share of the time on the WAN from which its bytes set the pace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLink:
    """A link that was the limit, and carried less than is described."""

    way: str
    """`oregon → virginia`."""
    delivered_bytes_per_s: float
    described_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowShare:
    """Who kept the others waiting for longest."""

    who: str
    """`site oregon`, or a rank of it."""
    num_steps: int
    cost_s: float
    """What a step has cost each other site, on average."""
    share: float
    why: str = ""
    """Empty: the facts do not say."""
    shares_machine: bool = False
    """Whether sites share a machine: `why` says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the planner expects of a step."""

    step_s: float | None = None
    compute_s: float | None = None
    """Compute time of the slowest site, with collectives inside it."""
    alternatives_s: Mapping[str, float] = field(default_factory=dict)
    """The steps of the planner's alternatives, by what they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruptions:
    """When training stood still, and how often a site was lost."""

    num_stalls: int = 0
    stalled_s: float = 0.0
    stalled_by_loss_s: float = 0.0
    """The part of it in which a site was lost."""
    num_losses: int = 0
    detect_within_s: float | None = None
    """Time in which a loss has to be noticed; None: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictFacts:
    """All that a verdict rests on; None and empty are not known."""

    state: str = "SUCCEEDED"
    reason_code: str = ""
    steps: int = 0
    active_s: float | None = None
    step_s: float | None = None
    """The mean over sites and steps; the parts below belong to it."""
    compute_s: float = 0.0
    """With collectives inside sites."""
    exposed_s: float = 0.0
    wait_s: float = 0.0
    hidden_s: float = 0.0
    """Time on the WAN that backward hid."""
    planned: Expected = Expected()
    codec_steps_s: Mapping[str, float] = field(default_factory=dict)
    """The step that the model predicts with each codec, all else as it is."""
    codec: str = ""
    """Empty: links have their own."""
    bytes_s: float | None = None
    """Time that a step's bytes keep the busiest link busy, at its described rate."""
    busiest_link: str = ""
    link_share: float = 1.0
    """The part of that link that the run may use."""
    slow_link: SlowLink | None = None
    slow: SlowShare | None = None
    is_sync: bool = True
    """Whether sites exchange in every step."""
    interruptions: Interruptions = Interruptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What people read first."""

    grade: str
    """GOOD, FAIR, POOR or UNKNOWN."""
    headline: str
    details: tuple[str, ...] = ()
    """Sentences: against the plan, interruptions."""
    remedy: str = ""
    """The kind of what would help, as on top of this file; empty: nothing is proposed."""
    advice: str = ""
    """The same in words, to follow "What would help:"."""


def verdict(facts: VerdictFacts) -> Verdict:
    """Judge a run."""
    begun = _how_it_ended(facts)
    if not facts.step_s or facts.steps < LEAST_STEPS:
        words = "No step was completed." if not facts.steps else _too_short(facts.steps)
        return Verdict(grade=UNKNOWN, headline=f"{begun}{words}")
    exposed, wait = facts.exposed_s / facts.step_s, facts.wait_s / facts.step_s
    lost = exposed + wait
    grade = GOOD if lost <= GOOD_LOST else FAIR if lost <= FAIR_LOST else POOR
    headline = begun + _headline(grade, exposed, wait)
    remedy, advice = ("", "") if grade == GOOD else _remedy(facts, exposed, wait)
    if not remedy:
        remedy, advice = _detection(facts)
    return Verdict(
        grade=grade,
        headline=headline,
        details=tuple(filter(None, (_against_plan(facts), _interruptions(facts)))),
        remedy=remedy,
        advice=advice,
    )


def _how_it_ended(facts: VerdictFacts) -> str:
    if facts.state == "FAILED":
        return f"Failed after {_steps(facts.steps)} ({facts.reason_code}). "
    if facts.state == "CANCELLED":
        return f"Cancelled after {_steps(facts.steps)}. "
    return ""


def _steps(number: int) -> str:
    return f"{number} step" if number == 1 else f"{number} steps"


def _too_short(steps: int) -> str:
    return f"Too short to judge: {_steps(steps)}."


def _headline(grade: str, exposed: float, wait: float) -> str:
    training = formats.share(max(0.0, 1 - exposed - wait))
    lost = [
        f"{formats.share(share)} {words}"
        for share, words in sorted(
            [(exposed, "on the WAN"), (wait, "waiting for slower sites")], reverse=True
        )
        if share >= 0.005
    ]
    rest = f"; {' and '.join(lost)}" if lost else ""
    if grade == GOOD:
        return f"Efficient: {training} of the time went into training{rest}."
    if grade == FAIR:
        return f"Fair: {training} of the time went into training{rest}."
    bound = "WAN-bound" if exposed >= wait else "Held up by slow sites"
    return f"{bound}: only {training} of the time went into training{rest}."


def _against_plan(facts: VerdictFacts) -> str:
    planned_s, step_s = facts.planned.step_s, facts.step_s
    if not planned_s or not step_s:
        return ""
    took, planned = formats.duration(step_s), formats.duration(planned_s)
    ratio = step_s / planned_s
    if abs(ratio - 1) <= AS_PLANNED:
        return f"A step took {took}, as planned ({planned})."
    why = _compute_against_plan(facts) if ratio > 1 else ""
    if ratio >= 2:
        return f"A step took {took}, {ratio:.1f} times the planned {planned}{why}."
    longer = "longer" if ratio > 1 else "shorter"
    share = formats.share(abs(ratio - 1))
    return f"A step took {took}, {share} {longer} than the planned {planned}{why}."


def _compute_against_plan(facts: VerdictFacts) -> str:
    """Return that compute explains most of a longer step; empty: it does not."""
    assert facts.step_s is not None
    assert facts.planned.step_s is not None
    planned_s = facts.planned.compute_s
    if planned_s is None:
        return ""
    more_s = facts.compute_s - planned_s
    if more_s < _PACED * (facts.step_s - facts.planned.step_s):
        return ""
    took, planned = formats.duration(facts.compute_s), formats.duration(planned_s)
    return f"; most of that is compute, {took} where the topology's figures give {planned}"


def _interruptions(facts: VerdictFacts) -> str:
    parts, interruptions = [], facts.interruptions
    if interruptions.num_losses:
        parts.append(
            "A site was lost"
            if interruptions.num_losses == 1
            else f"Sites were lost {interruptions.num_losses} times"
        )
    if interruptions.num_stalls:
        times = "once" if interruptions.num_stalls == 1 else f"{interruptions.num_stalls} times"
        stood = f"training stood still {times}, for {formats.duration(interruptions.stalled_s)}"
        if facts.active_s:
            stood += f" ({formats.share(interruptions.stalled_s / facts.active_s)} of the run)"
        parts.append(stood)
    words = "; ".join(parts)
    return f"{words[0].upper()}{words[1:]}." if words else ""


def _remedy(facts: VerdictFacts, exposed: float, wait: float) -> tuple[str, str]:
    """Return what would help, its kind first: against the larger part, else the smaller one."""
    against_wan, against_wait = (exposed, _for_wan), (wait, _for_waiting)
    for share, find in sorted((against_wan, against_wait), key=lambda each: -each[0]):
        if share >= WORTH_IT:
            found = find(facts)
            if found[0]:
                return found
    return "", ""


def _for_waiting(facts: VerdictFacts) -> tuple[str, str]:
    slow = facts.slow
    if slow is None or slow.num_steps < _SLOW_STEPS * facts.steps:
        return "", ""
    cost = f"{formats.duration(slow.cost_s)} a step ({formats.share(slow.share)})"
    what = f"a faster {slow.who}" + (
        f" ({slow.why})" if slow.why else ", or less of the batch for it"
    )
    if slow.shares_machine:
        what = f"a machine for each site: {slow.why}, and {slow.who} is late there"
    return "slow site", f"{what}: it cost the others {cost} over {slow.num_steps} steps."


def _for_wan(facts: VerdictFacts) -> tuple[str, str]:
    if (link := facts.slow_link) is not None:
        delivered = formats.rate(link.delivered_bytes_per_s)
        return (
            "slow link",
            f"a faster {link.way}, or a plan that knows it: while it was the limit it carried "
            f"{delivered} of the described {formats.rate(link.described_bytes_per_s)}. "
            "`isthmus probe` measures it.",
        )
    wan_s = facts.exposed_s + facts.hidden_s
    is_paced = facts.bytes_s is not None and facts.bytes_s >= _PACED * wan_s
    if (found := _codec(facts, is_paced=is_paced)) is not None:
        return found
    if (forbidden := _forbidden(facts)) is not None:
        return forbidden
    if is_paced and facts.link_share < 1:
        return (
            "link share",
            f"a larger `share` of the link {facts.busiest_link}: its bytes set the pace, and the "
            f"run may use {formats.share(facts.link_share)} of it.",
        )
    if not facts.is_sync or facts.compute_s <= 0:
        return "", ""
    times = math.ceil(facts.exposed_s * (1 - _WANTED_SHARE) / _WANTED_SHARE / facts.compute_s)
    if times <= _MOST_MICRO_BATCHES:
        times = max(2, times)
        left = facts.exposed_s / (times * facts.compute_s + facts.exposed_s)
        return (
            "micro-batches",
            f"more compute between exchanges. With {_TIMES.get(times, f'{times} times')} the "
            f"micro-batches per step, the WAN would take about {formats.share(left)} of the time.",
        )
    return (
        "regime",
        f"A step computes {formats.duration(facts.compute_s)} and waits "
        f"{formats.duration(facts.exposed_s)} for the WAN: exchange every few steps instead "
        "(`regime` in the job; `plan: {max_sync_period: 30}` lets the planner choose).",
    )


def _forbidden(facts: VerdictFacts) -> tuple[str, str] | None:
    """Return the planner's best alternative that the job does not permit; None: none is better."""
    planned_s = facts.planned.step_s
    found = {
        what: step_s
        for what, step_s in facts.planned.alternatives_s.items()
        if what.endswith(_FORBIDDEN)
    }
    if not planned_s or not found:
        return None
    what = min(found, key=lambda each: found[each])
    saved = 1 - found[what] / planned_s
    if saved < WORTH_IT:
        return None
    return (
        "plan",
        f"to permit {what.removesuffix(_FORBIDDEN)}. The planner, which may not choose it, expects "
        f"a step that is {formats.share(saved)} shorter.",
    )


def _codec(facts: VerdictFacts, *, is_paced: bool) -> tuple[str, str] | None:
    """Return a codec with which steps are clearly shorter; None: there is none."""
    step_s = facts.step_s or 0.0
    if facts.codec not in RELATIVE_ERRORS:
        return None
    if facts.codec_steps_s.get(facts.codec):
        now_s = facts.codec_steps_s[facts.codec]
        saved = {
            codec: min(facts.exposed_s, now_s - each) / step_s
            for codec, each in facts.codec_steps_s.items()
        }
    elif is_paced and facts.bytes_s:
        now = usual_ratio(facts.codec)
        saved = {
            codec: min(facts.exposed_s, facts.bytes_s * (1 - usual_ratio(codec) / now)) / step_s
            for codec in RELATIVE_ERRORS
        }
    else:
        return None
    able = {codec: share for codec, share in saved.items() if RELATIVE_ERRORS[codec] <= MAX_ERROR}
    most = max(able.values(), default=0.0)
    if most < WORTH_IT:
        return None
    near = [codec for codec, share in able.items() if 1 - share <= (1 - most) * _NEAR]
    best = min(near, key=lambda codec: (RELATIVE_ERRORS[codec], -able[codec]))
    if able[best] < WORTH_IT or best == facts.codec:
        return None
    whence = "the model predicts" if facts.codec_steps_s.get(facts.codec) else "by its bytes"
    return (
        "codec",
        f"smaller gradients. With `codec: {best}` instead of {facts.codec} a step would be about "
        f"{formats.share(able[best])} shorter, {whence}.",
    )


def _detection(facts: VerdictFacts) -> tuple[str, str]:
    """Return that noticing losses took most of the stalls; empty: it did not."""
    interrupted = facts.interruptions
    detect_s, active_s = interrupted.detect_within_s, facts.active_s
    if not detect_s or not active_s or not interrupted.num_losses:
        return "", ""
    noticing_s = min(interrupted.stalled_by_loss_s, interrupted.num_losses * detect_s)
    if interrupted.stalled_s < WORTH_IT * active_s or noticing_s < _PACED * interrupted.stalled_s:
        return "", ""
    return (
        "detection",
        "a shorter `failure.detect_within`. Noticing the loss took most of the time that training "
        f"stood still, and it may take {formats.duration(detect_s)}.",
    )
