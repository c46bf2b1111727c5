"""Metrics that one rank sends to the coordinator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import SupportsFloat

import torch

from isthmus.protos import metrics
from isthmus.protos.failure import one_line
from isthmus.sites.local.rank_messages import Metric
from isthmus.sites.worker.exchange.gateway_link import Link


class Records:
    """Sends metrics of any kind. Methods may be called from any thread."""

    def __init__(self, link: Link) -> None:
        """Send them over `link`."""
        self._link = link

    def record(
        self,
        kind: str,
        step: int,
        values: Mapping[str, SupportsFloat],
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """Send one metric."""
        self._link.send(
            Metric(kind=kind, step=step, values=plain_numbers(values), labels=dict(labels or {}))
        )

    def record_problem(self, kind: str, step: int, reason: str) -> None:
        """Send one that has a reason, and no numbers."""
        self.record(kind, step, {}, {metrics.REASON: one_line(reason)})


def plain_numbers(values: Mapping[str, SupportsFloat]) -> dict[str, float]:
    """Return floats; a loss may still hold its graph."""
    return {
        name: float(value.detach() if isinstance(value, torch.Tensor) else value)
        for name, value in values.items()
    }
