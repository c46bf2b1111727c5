"""What the bytes between sites cost, where the topology has prices: by link, step and day. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isthmus.orchestrator.evidence.view import formats
from isthmus.orchestrator.runs.facts import DAY_S, known
from isthmus.protos import metrics

PRICE = "egress_usd_per_byte"
"""The price of a link's bytes, among its figures."""
_LEAST_SAVED = 0.01
"""Least saving that is worth a line, as a part of what float32 would cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Egress:
    """What all links of a run cost together, in US dollars."""

    usd: float | None
    """So far, or of the whole run; None: nobody knows how long it is."""
    usd_per_step: float | None
    usd_per_day: float
    fp32_usd_per_day: float | None
    """If all that crosses were float32, for as many steps."""
    codec: str
    """Empty: links have their own."""

    def in_words(self) -> str:
        """Return `$1.20, $0.01 a step, $36.00 a day`."""
        parts = [
            "" if self.usd is None else formats.dollars(self.usd),
            "" if self.usd_per_step is None else f"{formats.dollars(self.usd_per_step)} a step",
            f"{formats.dollars(self.usd_per_day)} a day",
        ]
        return ", ".join(part for part in parts if part)

    def comparison(self) -> str:
        """Return `int8 instead of fp32 saves $96.00 a day`; empty where it saves nothing."""
        if self.fp32_usd_per_day is None or self.codec == "fp32":
            return ""
        saved = self.fp32_usd_per_day - self.usd_per_day
        if saved <= _LEAST_SAVED * self.fp32_usd_per_day:
            return ""
        codec = formats.words(self.codec) or "each link's codec"
        return f"{codec} instead of fp32 saves {formats.dollars(saved)} a day"

    def line(self) -> str:
        """Return both in a line."""
        return "; ".join(part for part in (self.in_words(), self.comparison()) if part)


def egress_of(
    links: Sequence[Mapping[str, Any]],
    *,
    active_s: float | None,
    step_s: float | None,
    codec: str,
) -> Egress | None:
    """Return what a run's links cost until now; None: no link has a price, or none was used.

    Args:
        links: By the names of protos/metrics.py, each with its PRICE.
        active_s: How long the run trains.
        step_s: The time of a step; None: not known.
        codec: Of the exchange.
    """
    priced = [link for link in links if known(link, PRICE)]
    sent = [_usd(link, metrics.SENT_BYTES) for link in priced]
    usd = math.fsum(sent)
    if not usd or not active_s:
        return None
    raw = math.fsum(_usd(link, metrics.RAW_BYTES) for link in priced)
    return Egress(
        usd=usd,
        usd_per_step=usd / active_s * step_s if step_s else None,
        usd_per_day=usd / active_s * DAY_S,
        fp32_usd_per_day=raw / active_s * DAY_S if raw else None,
        codec=codec,
    )


def _usd(link: Mapping[str, Any], key: str) -> float:
    return (known(link, PRICE) or 0.0) * (known(link, key) or 0.0)
