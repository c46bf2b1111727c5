"""A run's measurements as they come in, and what they come to in summary.json.

Kept are the latest of each site and link, and sums over the run. Memory is bounded, however long
the run: a curve of losses keeps every second point once it is full.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from isthmus.orchestrator.core.link_totals import LinkTotals
from isthmus.orchestrator.core.model_flops import Done, Mfu, ModelFlops, ModelReport, by_name
from isthmus.orchestrator.core.noise_scale import NoiseScale
from isthmus.orchestrator.core.slow_ranks import SlowRanks
from isthmus.orchestrator.core.slow_sites import SlowPeriod, SlowSites
from isthmus.protos import metrics

MAX_SLOW_RANKS = 8
"""In a run's status: those that cost most."""
MAX_LOSSES = 4096
"""Points of the curve; a plot shows fewer."""
CURVE_POINTS = 40
"""Means that the curve has in a run's status: a terminal's line shows no more."""
RECENT_STEPS = 20
"""Steps over which the present time of a step is averaged."""
OPEN_STEPS = 256
"""Steps for which some site's loss may be missing."""
PARTS = {
    metrics.COMPUTE_S: "compute",
    metrics.INTRA_S: "inside sites",
    metrics.EXPOSED_INTER_S: "WAN, exposed",
    metrics.WAIT_S: "waiting for others",
}
"""What a step's time is split into, and what people call it: they add up."""
_TIMES = (*PARTS, metrics.HIDDEN_INTER_S, metrics.ENCODE_S, metrics.DECODE_S)


@dataclass(slots=True)
class SiteMetrics:
    """What one site has measured."""

    num_steps: int = 0
    step: int = 0
    """The last one."""
    latest: dict[str, float] = field(default_factory=dict)
    tokens: float = 0.0
    """Tokens that this site trained on, over the run."""
    step_s: float = 0.0
    """Time in its steps, over the run: without start-up and evaluation."""
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    """Times of its last steps."""
    times_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_TIMES, 0.0))
    """Sums over the run, by the names of protos/metrics.py: the step's parts, and what is beside
    them."""

    def totals(self) -> dict[str, float]:
        """Return the sums over the run, by the names of protos/metrics.py."""
        return {
            metrics.NUM_STEPS: float(self.num_steps),
            metrics.SITE_TOKENS: self.tokens,
            metrics.STEP_S: self.step_s,
            **self.times_s,
        }

    @classmethod
    def of_totals(cls, step: int, totals: Mapping[str, float]) -> SiteMetrics:
        """Return what `totals` were made of, as far as they tell."""
        return cls(
            num_steps=int(totals.get(metrics.NUM_STEPS, 0)),
            step=step,
            tokens=totals.get(metrics.SITE_TOKENS, 0.0),
            step_s=totals.get(metrics.STEP_S, 0.0),
            times_s={name: totals.get(name, 0.0) for name in _TIMES},
        )


@dataclass(slots=True)
class _OpenStep:
    weighted: float = 0.0
    tokens: float = 0.0
    sites: set[str] = field(default_factory=set)


class ComparedGradients:
    """How often all ranks have compared the gradients of one micro-batch, and what that took."""

    def __init__(self) -> None:
        """Begin with no comparison."""
        self._latest: dict[int, tuple[float, float]] = {}
        """Ranks, and the longest time, by the latest steps after which they compared."""
        self._num_steps, self._total_s = 0, 0.0

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Count a comparison of gradients by a site's ranks: the slowest site's time counts."""
        num_ranks, before_s = self._latest.get(step, (0.0, 0.0))
        length_s = max(before_s, values.get(metrics.COMPARED_S, 0.0))
        self._num_steps += step not in self._latest
        self._total_s += length_s - before_s
        self._latest[step] = max(num_ranks, values.get(metrics.COMPARED_RANKS, 0.0)), length_s
        while len(self._latest) > OPEN_STEPS:
            del self._latest[min(self._latest)]

    def totals(self) -> dict[str, float]:
        """Return the figures by the names of protos/metrics.py; none before the first."""
        if not self._latest:
            return {}
        return {
            metrics.COMPARED_STEPS: float(self._num_steps),
            metrics.COMPARED_S: self._total_s,
            metrics.COMPARED_RANKS: self._latest[max(self._latest)][0],
        }


class RunMetrics:
    """All that a run has measured. Pure: metrics in, figures out."""

    def __init__(
        self,
        sites: tuple[str, ...],
        flops: ModelFlops | None = None,
        on_loss: Callable[[int, float], None] | None = None,
        *,
        is_brief: bool = False,
    ) -> None:
        """Begin with nothing measured.

        Args:
            sites: All of the run.
            flops: Finds MFUs; None: there are none.
            on_loss: Told every step whose loss is known, and that loss.
            is_brief: Leave out the noise scale and who is slow, which take half of the time.
        """
        self._on_loss = on_loss
        self.sites = {site: SiteMetrics() for site in sites}
        self._flops = flops
        self._reports: dict[str, ModelReport] = {}
        """What sites have said of their models."""
        self._is_brief = is_brief
        self._noise_scale = NoiseScale()
        self._compared = ComparedGradients()
        self._slow_sites, self._slow_ranks = SlowSites(), SlowRanks()
        self._machines: dict[str, tuple[str, str]] = {}
        """What tells a site's machine from others, and its name, by site."""
        self._members = frozenset(sites)
        self.losses: list[tuple[int, float]] = []
        """Step, and the mean loss of its global batch, of the steps that were complete; ascending.

        The last one is the run's loss, in its status, its summary and its report. NaN: that of a
        site was not finite.
        """
        self.held_out_loss: float | None = None
        self.unigram_entropy: float | None = None
        self.last_step = 0
        self._open: dict[int, _OpenStep] = {}
        self._loss_stride = 1
        self._links = LinkTotals()
        self._evaluated_step = -1

    def add(
        self,
        site: str,
        kind: str,
        step: int,
        values: Mapping[str, float],
        labels: Mapping[str, str],
    ) -> bool:
        """Take one metric; of a kind that nobody here knows nothing is made.

        Return whether it is new. An agent sends steps again that a coordinator has taken, and was
        killed before it said so.
        """
        if kind == metrics.STEP:
            of_site = self.sites[site]
            if of_site.num_steps and step <= of_site.step:
                return False
            self._add_step(site, step, values)
        elif kind == metrics.EVALUATION and step >= self._evaluated_step:
            self._evaluated_step = step
            self.held_out_loss = values.get(metrics.HELD_OUT_LOSS, self.held_out_loss)
            self.unigram_entropy = values.get(metrics.UNIGRAM_ENTROPY, self.unigram_entropy)
        elif kind == metrics.MODEL:
            self._reports[site] = ModelReport.of(values, labels)
        elif kind == metrics.MACHINE and (boot := labels.get(metrics.BOOT)):
            self._machines[site] = boot, labels.get(metrics.HOST, "")
        elif kind == metrics.GRADIENTS:
            self._compared.add(step, values)
        elif kind == metrics.RANKS:
            self._slow_ranks.add(site, step, values, labels)
        elif kind == metrics.LINK:
            self._links.add(site, values, labels)
        return True

    def count(self, members: frozenset[str]) -> None:
        """Take which sites count from now on; empty: as before.

        A step's loss is known once these have sent theirs: what only lacks the loss of a site that
        counts no more, is complete.
        """
        if not members or members == self._members:
            return
        self._members = members
        for step in sorted(self._open):
            if step in self._open and self._open[step].sites >= members:
                self._keep_loss(step)

    @property
    def links(self) -> dict[tuple[str, str], dict[str, float]]:
        """What each directed link has carried over the run. Nobody may change them."""
        return self._links.all()

    def link(self, pair: tuple[str, str]) -> dict[str, float]:
        """Return the same of one link that has been measured."""
        return self._links.of(pair)

    def mfu(self, *sites: str) -> Mfu | None:
        """Return the MFU of sites over the run, by default of all that have taken a step."""
        done = {
            name: Done(self.sites[name].tokens, self.sites[name].step_s)
            for name in sites or [name for name, site in self.sites.items() if site.num_steps]
        }
        return None if self._flops is None else self._flops.mfu(done, self._reports)

    def _latest_mfu(self, site: str) -> dict[str, float]:
        """Return the MFU of a site's latest step, by its name; empty: it is not known."""
        latest = self.sites[site].latest
        done = Done(latest.get(metrics.SITE_TOKENS, 0.0), latest.get(metrics.STEP_S, 0.0))
        found = None if self._flops is None else self._flops.mfu({site: done}, self._reports)
        return by_name(found)

    def totals(self) -> dict[str, float]:
        """Return figures of the whole run, by the names of protos/metrics.py."""
        links = self.links.values()
        totals = {
            metrics.STEP: float(self.last_step),
            metrics.TOKENS: sum(site.tokens for site in self.sites.values()),
            metrics.WIRE_BYTES: sum(link.get(metrics.SENT_BYTES, 0.0) for link in links),
            metrics.RAW_BYTES: sum(link.get(metrics.RAW_BYTES, 0.0) for link in links),
        }
        recent_s = [
            math.fsum(self.sites[name].recent_s) / len(self.sites[name].recent_s)
            for name in self._members & self.sites.keys()
            if self.sites[name].recent_s
        ]
        if recent_s:
            totals[metrics.STEP_S] = max(recent_s)
        if self.counts_tokens is not None:
            totals[metrics.COUNTS_TOKENS] = float(self.counts_tokens)
        if self.losses:
            totals[metrics.LOSS] = self.losses[-1][1]
        if self.held_out_loss is not None:
            totals[metrics.HELD_OUT_LOSS] = self.held_out_loss
        if self.unigram_entropy is not None:
            totals[metrics.UNIGRAM_ENTROPY] = self.unigram_entropy
        if self._noise_scale.tokens is not None:
            totals[metrics.NOISE_SCALE] = self._noise_scale.tokens
        totals |= self._compared.totals()
        return totals | by_name(self.mfu())

    @property
    def counts_tokens(self) -> bool | None:
        """Whether what sites tell as tokens are some; None: not known.

        Of a script that counts none, each rank's step counts as one.
        """
        if not self._reports:
            return None
        is_shipped = self._flops is not None and self._flops.knows_tokens
        return is_shipped or all(each.counts_tokens for each in self._reports.values())

    @property
    def slow(self) -> Sequence[SlowPeriod]:
        """Which sites have kept the others waiting, and how long."""
        return self._accused(self._slow_sites.periods, self._slow_ranks.periods)[0]

    @property
    def slow_ranks(self) -> Sequence[SlowPeriod]:
        """Which ranks have kept others of their site waiting."""
        return self._accused(self._slow_sites.periods, self._slow_ranks.periods)[1]

    def _accused(
        self, sites: Sequence[SlowPeriod], ranks: Sequence[SlowPeriod]
    ) -> tuple[list[SlowPeriod], list[SlowPeriod]]:
        """Return those to tell of, the most expensive first; of a machine that sites share, one."""
        told: set[str] = set()
        found: tuple[list[SlowPeriod], list[SlowPeriod]] = [], []
        for kept, periods in zip(found, (sites, ranks), strict=True):
            for period in sorted(periods, key=lambda each: -each.total_s):
                boot, host = self._machines.get(period.site, ("", ""))
                others = [name for name, at in self._machines.items() if boot and at[0] == boot]
                period.shares_machine = len(others) > 1
                if period.shares_machine:
                    period.why = f"sites {', '.join(sorted(others))} share the machine {host}"
                    if boot in told:
                        continue
                    told.add(boot)
                kept.append(period)
        return found

    def curve(self) -> list[float]:
        """Return the losses as at most CURVE_POINTS means of equal parts, of what is finite."""
        losses = [loss for _, loss in self.losses if math.isfinite(loss)]
        if not losses:
            return []
        num_parts = min(CURVE_POINTS, len(losses))
        ends = [index * len(losses) // num_parts for index in range(num_parts + 1)]
        return [
            math.fsum(losses[begin:end]) / (end - begin) for begin, end in itertools.pairwise(ends)
        ]

    def progress(self) -> dict[str, Any]:
        """Return what people see of the metrics, as JSON values."""
        slow, slow_ranks = self._accused(self._slow_sites.now, self._slow_ranks.now)
        return {
            "totals": self.totals(),
            "loss_curve": self.curve(),
            "slow": slow_json(slow[0]) if slow else None,
            "slow_ranks": [slow_json(each) for each in slow_ranks[:MAX_SLOW_RANKS]],
            "sites": {
                name: {
                    "step": site.step,
                    "latest": {**site.latest, **self._latest_mfu(name)},
                    "totals": site.totals() | by_name(self.mfu(name)),
                }
                for name, site in self.sites.items()
            },
            "links": [
                {"source": source, "target": target, "latest": latest}
                for (source, target), latest in self.links.items()
            ],
        }

    def _add_step(self, site_name: str, step: int, values: Mapping[str, float]) -> None:
        site = self.sites[site_name]
        site.num_steps += 1
        site.step = step
        site.latest = dict(values)
        site.tokens += values.get(metrics.SITE_TOKENS, 0.0)
        site.step_s += values.get(metrics.STEP_S, 0.0)
        site.recent_s.append(values.get(metrics.STEP_S, 0.0))
        for name in _TIMES:
            site.times_s[name] += values.get(name, 0.0)
        self.last_step = max(self.last_step, step)
        if not self._is_brief:
            self._noise_scale.add(site_name, step, values, self._members)
            self._slow_sites.add(site_name, step, values, self._members)
            for slow in self._slow_sites.now:
                slow.why = self._slow_ranks.why_slow(slow) or slow.why
        if metrics.LOSS in values:
            self._add_loss(site_name, step, values)

    def _add_loss(self, site: str, step: int, values: Mapping[str, float]) -> None:
        """Average the sites' losses, weighted by their tokens, once all have sent the step's."""
        if site not in self._members or (self.losses and step <= self.losses[-1][0]):
            return  # it follows, or followed then, and what it makes of its data counts nothing
        entry = self._open.setdefault(step, _OpenStep())
        tokens = values.get(metrics.SITE_TOKENS, 0.0)
        entry.weighted += values[metrics.LOSS] * tokens
        entry.tokens += tokens
        entry.sites.add(site)
        if entry.sites >= self._members:
            self._keep_loss(step)
        elif len(self._open) > OPEN_STEPS:
            self._keep_loss(min(self._open))

    def _keep_loss(self, step: int) -> None:
        """Append to the curve; between kept points the last one moves with the run.

        Sites send their steps in order, so what an earlier one lacks never comes.
        """
        entry = self._open.pop(step)
        for earlier in [each for each in self._open if each < step]:
            del self._open[earlier]
        if entry.tokens <= 0:
            return
        loss = entry.weighted / entry.tokens
        if len(self.losses) > 1 and self.losses[-1][0] - self.losses[-2][0] < self._loss_stride:
            self.losses.pop()
        self.losses.append((step, loss))
        if self._on_loss is not None:
            self._on_loss(step, loss)
        if len(self.losses) > MAX_LOSSES:
            self.losses = self.losses[::2]
            self._loss_stride *= 2


def slow_json(period: SlowPeriod) -> dict[str, Any]:
    """Return a period as JSON values."""
    return {
        "site": period.site,
        "since_step": period.since_step,
        "last_step": period.last_step,
        "cost_s": period.cost_s,
        "share": period.share,
        "total_s": period.total_s,
        "for_s": period.for_s,
        "is_over": period.is_over,
        "rank": period.rank,
        "node": period.node,
        "host": period.host,
        "why": period.why,
    }
