"""What a run came to: the object of summary.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.core.metrics import RunMetrics
from orchestrator.core.view import RunView
from protos import metrics


def summarise(
    view: RunView, measured: RunMetrics, *, active_s: float, verified_steps: int
) -> dict[str, Any]:
    """Return a run's summary as JSON values; what was not measured is null.

    Tokens a second are over the time that steps took, of the slowest site for the run as a whole.

    Args:
        view: of the run, which has ended.
        measured: all its metrics.
        active_s: from when all sites were running until the end.
        verified_steps: steps after which all parameters were seen to be equal.
    """
    totals, sites = measured.totals(), measured.sites.values()
    sent_bytes, raw_bytes = totals[metrics.WIRE_BYTES], totals[metrics.RAW_BYTES]
    return {
        "run_id": view.run_id,
        "state": view.state.value,
        "reason_code": view.reason_code,
        "reason": view.reason,
        "notes": list(view.notes),
        "steps": measured.last_step,
        "verified_steps": verified_steps,
        "losses": [[step, loss] for step, loss in measured.losses],
        "held_out_loss": measured.held_out_loss,
        "unigram_entropy": measured.unigram_entropy,
        "tokens": totals[metrics.TOKENS],
        "tokens_per_s": _rate(totals[metrics.TOKENS], max(site.step_s for site in sites)),
        "active_s": active_s,
        "time_split": _time_split(measured),
        "sites": [
            {
                "site": name,
                "steps": site.num_steps,
                "tokens": site.tokens,
                "tokens_per_s": _rate(site.tokens, site.step_s),
            }
            for name, site in measured.sites.items()
        ],
        "links": [_link(configured, measured) for configured in view.links],
        "compression_ratio": raw_bytes / sent_bytes if sent_bytes else None,
    }


def _time_split(measured: RunMetrics) -> dict[str, float | None]:
    """Return where a step's time went: the mean over all steps of all sites."""
    num_steps = sum(site.num_steps for site in measured.sites.values())
    parts = (metrics.COMPUTE_S, metrics.INTRA_S, metrics.EXPOSED_INTER_S, metrics.WAIT_S)
    return {
        part: sum(site.parts_s[part] for site in measured.sites.values()) / num_steps
        if num_steps
        else None
        for part in parts
    }


def _link(configured: Mapping[str, Any], measured: RunMetrics) -> dict[str, Any]:
    pair = (configured["source"], configured["target"])
    latest = measured.links.get(pair, {})
    return {
        "source": pair[0],
        "target": pair[1],
        "sent_bytes": latest.get(metrics.SENT_BYTES),
        "raw_bytes": latest.get(metrics.RAW_BYTES),
        "throughput_bytes_per_s": latest.get(metrics.THROUGHPUT_BYTES_PER_S),
        "configured_bytes_per_s": configured["bytes_per_s"],
        "rtt_s": latest.get(metrics.RTT_S),
        "configured_rtt_s": configured["rtt_s"],
    }


def _rate(amount: float, time_s: float) -> float | None:
    return amount / time_s if time_s > 0 else None
