"""Estimates the gain of exchanging less often than every step, if a job permits it. Pure.

It compares exchange in every step, DiLoCo rounds of H inner steps, and streaming in fragments, each
applied a step after it was sent (topology/cost/local_sgd.py). A plan only reports the result: it
always plans exchange in every step.
"""

from __future__ import annotations

from collections.abc import Mapping

from isthmus.topology.cost.local_sgd import Round, local_round
from isthmus.topology.cost.memory import outer_optimizer_bytes
from isthmus.topology.spec.units import format_duration, format_fraction, format_size, significant

_UTILISED = 0.95
"""Target share of a round's time that is compute."""
_GAIN = 0.01
"""Smallest gain, as a share of a step, that is reported."""
_FRAGMENTS = 8
"""Largest number of fragments in streaming."""


def regime(
    most: int,
    sites: tuple[str, ...],
    step_s: float,
    asked: Mapping[tuple[str, ...], tuple[float, float, float]],
) -> list[str]:
    """Return sentences on longer rounds; empty if the job permits none.

    Args:
        most: Permitted steps between two exchanges.
        sites: Sites of the plan, which exchanges in every step.
        step_s: Step of the plan.
        asked: By set of sites: seconds of a step without exchange, seconds of an exchange without
            overlap, and parameters per accelerator with outer state.
    """
    if most == 1 or not asked:
        return []
    by_sites = {
        who: rounds(compute_s, there_s, most) for who, (compute_s, there_s, _) in asked.items()
    }
    who, (plain, streamed) = min(
        by_sites.items(), key=lambda each: min(one.step_s for one, _ in each[1])
    )
    best = min((plain, streamed), key=lambda each: (each[0].step_s, each[1]))
    if best[0].step_s > (1 - _GAIN) * step_s:
        return [
            f"plan.max_sync_period permits {most} steps between exchanges; longer rounds than one step "
            "would gain less than 1 % here."
        ]
    texts = [
        f"{name}: {format_duration(significant(each.step_s, 4))} a step in the mean, "
        f"{format_fraction(round(each.utilisation, 3))} of it compute"
        for name, (each, _) in (
            (f"DiLoCo, {plain[0].steps} steps a round", plain),
            (f"Streaming in {streamed[1]} fragments, {streamed[0].steps} steps a round", streamed),
        )
    ]
    name = "streaming" if best is streamed else "DiLoCo"
    over = f" over {', '.join(who)}" if set(who) != set(sites) else ""
    parameters = asked[who][2]
    return [
        f"plan.max_sync_period permits {most} steps between exchanges. "
        f"{texts[0]}. {texts[1]}. Every step: "
        f"{format_duration(significant(step_s, 4))}. Recommended is {name}{over}, if your training tolerates "
        f"it; its outer optimizer takes {format_size(outer_optimizer_bytes(parameters, best[1]))} more an "
        "accelerator.",
        "This version exchanges every step all the same: nothing in it executes another period, and "
        "the plan's figures are those of every step.",
    ]


def rounds(
    step_s: float, exchange_s: float, most: int
) -> tuple[tuple[Round, int], tuple[Round, int]]:
    """Return a DiLoCo and a streaming round of at most `most` steps, with their fragments.

    Rounds are only as long as needed for a share _UTILISED of compute. A fragment's result is
    applied a step after it was sent, if there are enough steps in between.
    """

    def shortest(fragments: int, overlap_steps: int) -> Round:
        each_s = exchange_s / fragments
        between = max(1, overlap_steps)
        longer = [
            local_round(fragments * count, step_s, each_s, fragments, overlap_steps)
            for count in range(between, most // fragments + 1)
        ]
        return next((each for each in longer if each.utilisation >= _UTILISED), longer[-1])

    fragments = min(_FRAGMENTS, most)
    return (shortest(1, 0), 1), (shortest(fragments, 1), fragments)
