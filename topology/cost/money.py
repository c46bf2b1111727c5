"""What a run costs: accelerators by the hour, traffic between sites by the byte. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from topology.world import Topology

Hop = tuple[str, str]
"""From one site to another, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Money:
    """US dollars; what has no price is not counted, but named."""

    accelerators_usd: float
    egress_usd: float
    unpriced: tuple[str, ...] = ()
    """Accelerators without a price, by name."""

    @property
    def total_usd(self) -> float:
        """Both."""
        return self.accelerators_usd + self.egress_usd


def accelerators_usd(topology: Topology, ranks: Mapping[str, int], seconds: float) -> float:
    """Return the price of so many accelerators a site for a time, idle or not."""
    total = 0.0
    for name, num_ranks in ranks.items():
        price = topology.site(name).accelerator.price_usd_per_h or 0.0
        total += num_ranks * price * seconds / 3600
    return total


def egress_usd(topology: Topology, sent_bytes: Mapping[Hop, float]) -> float:
    """Return the price of what crosses each directed link.

    Raises:
        ValueError: something is sent where there is no link.
    """
    total = 0.0
    for (source, target), amount in sent_bytes.items():
        link = topology.link(source, target)
        if link is None:
            raise ValueError(f"sent_bytes: there is no link from {source} to {target}")
        total += amount * link.egress_usd_per_byte
    return total


def money(
    topology: Topology,
    ranks: Mapping[str, int],
    sent_bytes: Mapping[Hop, float],
    step_s: float,
    steps: float = 1,
) -> Money:
    """Return what `steps` steps cost.

    Args:
        topology: gives the prices.
        ranks: accelerators that take part, by site.
        sent_bytes: on each directed link, in one step.
        step_s: of one step.
        steps: how many.
    """
    used = (topology.site(name).accelerator for name, num_ranks in ranks.items() if num_ranks)
    return Money(
        accelerators_usd=accelerators_usd(topology, ranks, steps * step_s),
        egress_usd=steps * egress_usd(topology, sent_bytes),
        unpriced=tuple(sorted({each.name for each in used if each.price_usd_per_h is None})),
    )
