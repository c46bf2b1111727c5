"""Runs of the all-reduce script that take no time.

Their metrics, from how long a repetition takes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isthmus.orchestrator.documents import Pair
from isthmus.orchestrator.evidence.bench.experiment import Ended
from isthmus.orchestrator.evidence.record.bench_record import Failed
from isthmus.protos import metrics

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
class MeasuredAllReduces:
    """A `Launch` that keeps what it was given.

    A repetition takes 4 s, and everything is sent once.
    """

    fails: Mapping[str, Failed] = field(default_factory=dict)
    """How the runs of a codec end."""
    differs: str = ""
    """A codec whose results differ between sites."""
    interrupt_at: int = -1
    """The run, from 0, during which Ctrl-C is pressed."""
    emulator: str = "netns"
    pairs: list[Pair] = field(default_factory=list)

    def __call__(self, pair: Pair, home: Path, run_id: str, **_: object) -> Ended:
        """Write the run's metrics; or fail, or be interrupted."""
        self.pairs.append(pair)
        if len(self.pairs) - 1 == self.interrupt_at:
            raise KeyboardInterrupt
        codec = pair.job.exchange.codec
        if (failed := self.fails.get(codec)) is not None:
            return Ended(self.emulator, failed)
        folder = home / "runs" / run_id
        folder.mkdir(parents=True)
        size_bytes, count = map(int, pair.job.arguments[:2])  # then the memory
        records = [
            repetition(
                site.name,
                step,
                rank=rank,
                begin_s=BEGAN_S + 10 * step,
                end_s=BEGAN_S + 10 * step + 4,
                digest=site.name if codec == self.differs else "same",
            )
            for site in pair.topology.sites
            for rank in range(site.num_ranks)
            for step in range(count)
        ]
        num_bytes = float(count * size_bytes)
        records += [
            link_totals(link.source, link.target, sent_bytes=num_bytes, raw_bytes=num_bytes)
            for link in pair.topology.links
        ]
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in records))
        return Ended(self.emulator)
