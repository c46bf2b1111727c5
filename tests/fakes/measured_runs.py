"""Runs that take no time.

Their metrics are written as a real run's would be, from a pace by site.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isthmus.orchestrator.documents import Pair
from isthmus.orchestrator.evidence.bench.experiment import Ended
from isthmus.orchestrator.evidence.record.bench_record import Failed
from isthmus.protos import metrics

COMPUTE_S = 0.4


def step_record(
    site: str, step: int, *, step_s: float, tokens: float, wire_bytes: float = 0.0
) -> dict[str, Any]:
    """Return a step of a site: what is not computed was exposed; half of what was sent is left."""
    values = {
        metrics.STEP_S: step_s,
        metrics.COMPUTE_S: COMPUTE_S,
        metrics.INTRA_S: 0.0,
        metrics.EXPOSED_INTER_S: step_s - COMPUTE_S,
        metrics.WAIT_S: 0.0,
        metrics.HIDDEN_INTER_S: 0.0,
        metrics.ENCODE_S: 0.001,
        metrics.DECODE_S: 0.002,
        metrics.SITE_TOKENS: tokens,
        metrics.WIRE_BYTES: wire_bytes,
        metrics.RAW_BYTES: 2 * wire_bytes,
    }
    return {"site": site, "kind": metrics.STEP, "step": step, "values": values, "labels": {}}


def link_record(
    source: str, target: str, *, sent_bytes: float, gateway: str = "0"
) -> dict[str, Any]:
    """Return the totals of a link: half of what was to be sent was left."""
    return {
        "site": source,
        "kind": metrics.LINK,
        "step": 0,
        "values": {metrics.SENT_BYTES: sent_bytes, metrics.RAW_BYTES: 2 * sent_bytes},
        "labels": {"source": source, "target": target, "gateway": gateway},
    }


def pace(pair: Pair) -> float:
    """Return the seconds of a step: a site alone computes only."""
    return COMPUTE_S if len(pair.topology.sites) == 1 else 2 * COMPUTE_S


class Told:
    """A `Watch` that keeps what it is told."""

    def __init__(self) -> None:
        """Nothing was told yet."""
        self.starts: list[tuple[int, int, float | None]] = []
        self.ends: list[str | Failed] = []

    def started(self, name: str, number: int, total: int, left_s: float | None) -> None:
        """Keep its number."""
        self.starts.append((number, total, left_s))

    def ended(self, outcome: str | Failed) -> None:
        """Keep what came of it."""
        self.ends.append(outcome)


@dataclass
class FakeLaunch:
    """A `Launch` that keeps what it was given, and writes the metrics that a subclass makes."""

    fails: Mapping[str, Failed] = field(default_factory=dict)
    """How runs end, by their `name`."""
    interrupt_at: int = -1
    """The run, from 0, during which Ctrl-C is pressed."""
    pairs: list[Pair] = field(default_factory=list)

    def name(self, pair: Pair) -> str:
        """Return what a run is called in `fails`."""
        raise NotImplementedError

    def emulated(self, pair: Pair) -> str:
        """Return what emulates its WAN."""
        raise NotImplementedError

    def records(self, pair: Pair) -> list[dict[str, Any]]:
        """Return the lines of its metrics.jsonl."""
        raise NotImplementedError

    def __call__(self, pair: Pair, home: Path, run_id: str, **_: object) -> Ended:
        """Write the run's metrics; or fail, or be interrupted."""
        self.pairs.append(pair)
        if len(self.pairs) - 1 == self.interrupt_at:
            raise KeyboardInterrupt
        if (failed := self.fails.get(self.name(pair))) is not None:
            return Ended(self.emulated(pair), failed)
        folder = home / "runs" / run_id
        folder.mkdir(parents=True)
        lines = (f"{json.dumps(each)}\n" for each in self.records(pair))
        (folder / "metrics.jsonl").write_text("".join(lines))
        return Ended(self.emulated(pair))


@dataclass
class MeasuredRuns(FakeLaunch):
    """Runs of the trainer, named by the site that is alone, or `all`."""

    step_s: Callable[[Pair], float] = pace

    @property
    def names(self) -> list[str]:
        """What ran, in order: a site, or `all`."""
        return [self.name(pair) for pair in self.pairs]

    def name(self, pair: Pair) -> str:
        """Return the site that is alone, or `all`."""
        sites = pair.topology.sites
        return sites[0].name if len(sites) == 1 else "all"

    def emulated(self, pair: Pair) -> str:
        """Return `none` for a site alone."""
        return "none" if len(pair.topology.sites) == 1 else "relay"

    def records(self, pair: Pair) -> list[dict[str, Any]]:
        """Return each site's steps, and each link's bytes."""
        sites = [site.name for site in pair.topology.sites]
        tokens = pair.job.trainer.global_batch * pair.job.trainer.model.context / len(sites)
        steps = [
            step_record(site, step, step_s=self.step_s(pair), tokens=tokens, wire_bytes=1e6)
            for step in range(1, pair.job.trainer.steps + 1)
            for site in sites
        ]
        return steps + [
            link_record(link.source, link.target, sent_bytes=1e7) for link in pair.topology.links
        ]
