"""Runs of the all-reduce script that take no time.

Their metrics, from how long a repetition takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from isthmus.orchestrator.documents import Pair
from isthmus.protos import metrics
from tests.fakes.measured_runs import FakeLaunch

BEGAN_S = 1_000_000.0


def repetition(
    site: str,
    step: int,
    *,
    begin_s: float,
    end_s: float,
    rank: int = 0,
    digest: str = "same",
    gateways_cpu_s: float = 0.0,
    **more: float,
) -> dict[str, Any]:
    """Return the record of one rank's repetition; its own CPU time is 0.5 s."""
    values = {
        metrics.BEGIN_S: begin_s,
        metrics.END_S: end_s,
        metrics.GATEWAYS_CPU_S: gateways_cpu_s,
        metrics.RANK_CPU_S: 0.5,
        **more,
    }
    return {
        "site": site,
        "rank": rank,
        "kind": metrics.ALLREDUCE,
        "step": step,
        "values": values,
        "labels": {metrics.DIGEST: digest},
    }


def link_totals(source: str, target: str, *, sent_bytes: float, raw_bytes: float) -> dict[str, Any]:
    """Return what a link had carried at the run's end."""
    return {
        "site": source,
        "rank": -1,
        "kind": metrics.LINK,
        "step": 0,
        "values": {metrics.SENT_BYTES: sent_bytes, metrics.RAW_BYTES: raw_bytes},
        "labels": {"source": source, "target": target, "gateway": "0"},
    }


@dataclass
class MeasuredAllReduces(FakeLaunch):
    """Runs of the all-reduce script, named by their codec.

    A repetition takes 4 s, and everything is sent once.
    """

    differs: str = ""
    """A codec whose results differ between sites."""

    def name(self, pair: Pair) -> str:
        """Return the codec."""
        return pair.job.exchange.codec

    def emulated(self, pair: Pair) -> str:
        """Return `netns`."""
        return "netns"

    def records(self, pair: Pair) -> list[dict[str, Any]]:
        """Return each rank's repetitions, and each link's totals."""
        size_bytes, count = map(int, pair.job.arguments[:2])  # then the memory
        repetitions = [
            repetition(
                site.name,
                step,
                rank=rank,
                begin_s=BEGAN_S + 10 * step,
                end_s=BEGAN_S + 10 * step + 4,
                digest=site.name if self.name(pair) == self.differs else "same",
            )
            for site in pair.topology.sites
            for rank in range(site.num_ranks)
            for step in range(count)
        ]
        num_bytes = float(count * size_bytes)
        return repetitions + [
            link_totals(link.source, link.target, sent_bytes=num_bytes, raw_bytes=num_bytes)
            for link in pair.topology.links
        ]
