"""Why a rank, or a site, is slower than others, as far as measured facts say. Pure.

A fact explains a delay if it differs from the others' by at least half of it. What no fact explains
has no cause here: nothing is guessed.
"""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.topology.spec.units import format_duration, format_fraction

EXPLAINS = 0.5
"""Part of the delay that a fact has to make up."""
SLOW_CLOCK = 0.9
"""Ratio to the others' clock below which a GPU's is slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceFacts:
    """What may slow one rank, or the ranks of a site on average; None is not known."""

    between_s: float | None = None
    """Seconds from the end of a step to the next forward pass: loading data, logging."""
    run_queue: float | None = None
    """Share of the time in which the training thread could run, and waited for a core."""
    throttled: float | None = None
    """Share of the time in which a container's CPU limit stopped it."""
    steal: float | None = None
    """Share of the machine's CPU time that its hypervisor gave to others."""
    clock_hz: float | None = None
    """Clock of the GPU's multiprocessors."""
    slowdown: str = ""
    """Why the GPU runs slower than it could, as its driver says."""


def cause(late: PaceFacts, others: PaceFacts, *, cost_s: float, step_s: float) -> str:
    """Return in words what explains a delay; empty: no fact does.

    Args:
        late: Of who is late.
        others: Of those that wait, on average.
        cost_s: The delay in seconds a step.
        step_s: Seconds of a step.
    """
    if cost_s <= 0 or step_s <= 0:
        return ""
    more_s = (late.between_s or 0.0) - (others.between_s or 0.0)
    if late.between_s is not None and more_s >= EXPLAINS * cost_s:
        took, usual = _duration(late.between_s), _duration(others.between_s or 0.0)
        return (
            f"its data loader, or what else the script does between two steps, takes {took} a "
            f"step; the others' takes {usual}"
        )
    if late.clock_hz and others.clock_hz and late.clock_hz < SLOW_CLOCK * others.clock_hz:
        why = f" ({late.slowdown})" if late.slowdown else ""
        return f"its GPU runs at {_ghz(late.clock_hz)}, the others' at {_ghz(others.clock_hz)}{why}"
    least = EXPLAINS * cost_s / step_s
    for share, usual_share, words in (
        (late.throttled, others.throttled, "its container's CPU limit stops it {} of the time"),
        (late.steal, others.steal, "its hypervisor takes {} of its machine's CPU time"),
        (late.run_queue, others.run_queue, "it waits for a CPU core {} of the time"),
    ):
        if share is not None and share - (usual_share or 0.0) >= least:
            return words.format(format_fraction(round(share, 2)))
    return ""


def _duration(value_s: float) -> str:
    return format_duration(float(f"{value_s:.3g}"))


def _ghz(clock_hz: float) -> str:
    return f"{clock_hz / 1e9:.2f} GHz"
