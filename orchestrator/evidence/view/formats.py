"""How single figures and words are shown.

A figure that is not known is None and shows as a dash.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from isthmus.orchestrator.runs.facts import known
from isthmus.protos import metrics
from isthmus.protos.control.v1 import control_pb2
from isthmus.topology.spec.units import format_duration, format_fraction

UNKNOWN = "-"
WITH_LOSSES = "WITH_LOSSES"
"""The reason code of a run that has succeeded, and has lost a site or its last checkpoint."""


def show(value: float | None, style: Callable[[float], str]) -> str:
    """Return `value` in one of the styles below, or a dash."""
    return UNKNOWN if value is None else style(value)


def loss(value: float) -> str:
    """Return `3.2104`."""
    return f"{value:.4f}"


def count(value: float) -> str:
    """Return `950`, `12.3k`, `4.56M`: three significant digits, as below."""
    return _three_digits(value, 1000, ("", "k", "M", "G", "T"))


def size(num_bytes: float) -> str:
    """Return `2.79GiB`."""
    return _three_digits(num_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def rate(bytes_per_s: float) -> str:
    """Return `167Mbit/s`."""
    units = ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s")
    return _three_digits(bytes_per_s * 8, 1000, units)


def share(value: float) -> str:
    """Return `12%`; tenths only where a whole percent would say too little."""
    return format_fraction(round(value, 2 if value >= 0.1 else 3))


def mfu(values: Mapping[str, Any]) -> str:
    """Return the MFU among a site's or a run's figures: `38%`, or `38% est.`, or a dash."""
    exact, estimate = known(values, metrics.MFU), known(values, metrics.MFU_ESTIMATE)
    return (
        f"{share(estimate)} est." if exact is None and estimate is not None else show(exact, share)
    )


def percent(value: float) -> str:
    """Return `93.4%`."""
    return f"{value:.1%}"


def dollars(amount: float) -> str:
    """Return `$0.0123`, `$12.30`."""
    return f"${amount:.2f}" if amount >= 1 or amount == 0 else f"${amount:.2g}"


def factor(value: float) -> str:
    """Return `3.97x`."""
    return f"{value:.2f}x"


def duration(value_s: float) -> str:
    """Return `31.2ms`, `12s` or `2min 5s`: whole seconds from ten on."""
    if not math.isfinite(value_s):  # a sum of what a damaged record holds
        return UNKNOWN
    if value_s < 10:
        return format_duration(float(f"{value_s:.3g}"))
    minutes, seconds = divmod(round(value_s), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h {minutes}min"
    return f"{minutes}min {seconds}s" if minutes else f"{seconds}s"


def words(value: object) -> str:
    """Return a text from elsewhere without what would steer a terminal, in one line."""
    text = "" if value is None else str(value)
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())


def visible(line: str) -> str:
    """Return a line from elsewhere with a sign in place of what would steer a terminal."""
    return "".join(
        each if each.isprintable() or each == "\t" else "\N{REPLACEMENT CHARACTER}" for each in line
    )


def way(source: object, target: object) -> str:
    """Return a link's direction."""
    return f"{words(source)} → {words(target)}"


def run_state(run: control_pb2.Run) -> str:
    """Return `ACTIVE`; a number that this build does not know, as it is."""
    if run.state not in control_pb2.RunState.values():
        return str(run.state)
    if run.state == control_pb2.RUN_STATE_UNSPECIFIED:
        return "UNKNOWN"  # nobody tells
    return control_pb2.RunState.Name(run.state).removeprefix("RUN_STATE_")


def outcome(run: control_pb2.Run) -> str:
    """Return a run's state as people are to see it: `ACTIVE`, `SUCCEEDED WITH LOSSES`."""
    return in_words(run_state(run), run.reason_code)


def in_words(state: str, reason_code: str) -> str:
    """Return a state that a reason code qualifies."""
    return f"{state} WITH LOSSES" if reason_code == WITH_LOSSES else state


def certificates(ends_wall_s: Mapping[str, float], now_wall_s: float) -> str:
    """Return which certificate ends first, and when; empty: there are none."""
    if not ends_wall_s:
        return ""
    name = min(ends_wall_s, key=lambda each: (ends_wall_s[each], each))
    days = (ends_wall_s[name] - now_wall_s) / 86_400
    left = f"ends in {days:.1f} days" if days > 0 else "has expired"
    first = f", first of {len(ends_wall_s)}" if len(ends_wall_s) > 1 else ""
    return f"{words(name)} {left}{first}"


def clock(wall_s: float) -> str:
    """Return `2026-05-01 12:00:00`, in the time of this machine."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(wall_s))


def note(wall_s: float, text: str) -> str:
    """Return what is noted of a run, in a line with its time."""
    return f"{clock(wall_s)} note: {words(text)}"


def site_state(site: control_pb2.SiteStatus) -> str:
    """Return `RUNNING`; a number that this build does not know, as it is."""
    if site.state not in control_pb2.SiteState.values():
        return str(site.state)
    return control_pb2.SiteState.Name(site.state).removeprefix("SITE_STATE_")


def _three_digits(value: float, base: int, units: tuple[str, ...]) -> str:
    """Return `value` in the largest unit of which there is at least one, after rounding."""
    if not math.isfinite(value):
        return UNKNOWN
    power = 0
    while power < len(units) - 1 and round(value / base**power) >= base:
        power += 1
    scaled = value / base**power
    decimals = max(0, 3 - len(f"{scaled:.0f}"))
    text = f"{scaled:.{decimals}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text) + units[power]
