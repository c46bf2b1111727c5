"""The figures of a run as far as its coordinator knows them, by the names of runs/facts.py.

They are what `isthmus status` shows, and the dashboard until it has read all metrics.
"""

from __future__ import annotations

from typing import Any

from isthmus.orchestrator.core.run_metrics import SiteMetrics
from isthmus.orchestrator.runs.facts import LinkFacts, SiteFacts, facts_of_site, known, link_facts
from isthmus.protos import metrics
from isthmus.protos.control.v1 import control_pb2
from isthmus.topology.spec.world import Link

_TOTALS = {
    "steps": metrics.STEP,
    "tokens": metrics.TOKENS,
    "step_s_recent": metrics.STEP_S,
    "loss": metrics.LOSS,
    "held_out_loss": metrics.HELD_OUT_LOSS,
    "unigram_entropy": metrics.UNIGRAM_ENTROPY,
    "noise_scale": metrics.NOISE_SCALE,
    "mfu": metrics.MFU,
    "mfu_estimate": metrics.MFU_ESTIMATE,
    "sent_bytes": metrics.WIRE_BYTES,
}
"""Fields of TotalFacts that a coordinator keeps, and their names in its messages."""
VERIFIED_STEPS = "verified_steps"


def told_totals(run: control_pb2.Run) -> dict[str, float | None]:
    """Return the figures of the whole run, and after how many steps sites were compared."""
    totals = {name: known(run.totals, key) for name, key in _TOTALS.items()}
    return {**totals, VERIFIED_STEPS: known(run.totals, VERIFIED_STEPS)}


def told_sites(run: control_pb2.Run) -> list[SiteFacts]:
    """Return the figures of each site."""
    counts_tokens = known(run.totals, metrics.COUNTS_TOKENS) != 0
    return [
        facts_of_site(
            site.site,
            SiteMetrics.of_totals(site.step, site.totals),
            site.totals,
            counts_tokens=counts_tokens,
        )
        for site in run.sites
    ]


def told_links(run: control_pb2.Run) -> list[LinkFacts]:
    """Return the figures of each link, without those that nothing is known of as yet."""
    step_s = known(run.totals, metrics.STEP_S)
    return [
        link_facts(described(link), link.latest, active_s=run.active_s, step_s=step_s)
        for link in run.links
    ]


def described(link: control_pb2.LinkStatus | Link) -> dict[str, Any]:
    """Return a link as the journal describes it."""
    return {
        "source": link.source,
        "target": link.target,
        "bytes_per_s": link.bytes_per_s,
        "rtt_s": link.rtt_s,
        "egress_usd_per_byte": link.egress_usd_per_byte,
    }
