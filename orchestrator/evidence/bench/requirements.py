"""What a benchmark has to reach: `efficiency>=0.96`, `egress<=1.2 USD/day`. Pure."""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from isthmus.orchestrator.evidence.record.bench_record import Bench, Result
from isthmus.orchestrator.runs.facts import DAY_S
from isthmus.topology.spec.units import parse_duration

_WORDS = re.compile(r"\s*([A-Za-z/]+)\s*(>=|<=|>|<)\s*(\S.*?)\s*")
_NUMBER = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(%|[A-Za-z].*)?")
_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


def _egress_usd(result: Result) -> float:
    return math.fsum(link.egress_usd_per_step for link in result.links)


_FIGURES: Mapping[str, Mapping[str, Callable[[Result], float]]] = {
    "efficiency": {
        "": lambda result: result.efficiency.mean,
        "%": lambda result: result.efficiency.mean * 100,
    },
    "tokens/s": {"": lambda result: result.tokens_per_s.mean},
    "step": {"s": lambda result: result.step_s.mean},
    "egress": {
        "USD/day": lambda result: _egress_usd(result) / result.step_s.mean * DAY_S,
        "USD/step": _egress_usd,
    },
}
"""The figures of a setting by name, and by unit."""
EXAMPLES = "efficiency>=0.96, tokens/s>=5000, step<=2s, egress<=1.2 USD/day"


@dataclass(frozen=True, slots=True)
class Requirement:
    """One of them."""

    text: str
    figure: str
    unit: str
    compare: str
    limit: float

    @property
    def is_of_money(self) -> bool:
        """Whether links need a price for it."""
        return self.figure == "egress"

    def unmet(self, bench: Bench) -> list[str]:
        """Return, for each setting that does not meet it, what it has instead."""
        measure, found = _FIGURES[self.figure][self.unit], []
        for setting in bench.settings:
            if setting.result is None:
                continue
            value = measure(setting.result)
            if not _COMPARE[self.compare](value, self.limit):
                where = ", ".join(f"{path}={value}" for path, value in setting.overrides.items())
                told = f"{self.text}: measured {value:.4g} {self.unit}".rstrip()
                found.append(f"{told} at {where}" if where else told)
        return found


def parse_requirement(text: str) -> Requirement:
    """Return the requirement that is written so.

    Raises:
        ValueError: it is none; says what is wrong, and what would be right.
    """
    words = _WORDS.fullmatch(text)
    if words is None:
        raise ValueError(f"want FIGURE>=NUMBER or FIGURE<=NUMBER, as {EXAMPLES}; got {text!r}")
    figure, compare, limit = words.groups()
    if figure not in _FIGURES:
        close = difflib.get_close_matches(figure, _FIGURES, n=1)
        meant = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"no figure {figure!r}{meant}: want one of {', '.join(_FIGURES)}")
    if figure == "step":
        return Requirement(text, figure, "s", compare, parse_duration(limit))
    number, units = _NUMBER.fullmatch(limit), _FIGURES[figure]
    unit = "" if number is None or number[2] is None else number[2]
    if number is None or unit not in units:
        wanted = " or ".join(f"a number {each}".strip() for each in units)
        raise ValueError(f"{figure}: want {wanted}, got {limit!r}")
    return Requirement(text, figure, unit, compare, float(number[1]))
