"""The all-reduce benchmark: its record (allreduce.json), its runs, and the figures of each.

All times are seconds, all sizes bytes. The file is written anew after each measurement.

The bound of a figure is the step model's time for the bytes that were sent. It counts what TCP
loses to packet headers: 3.5 % of the rate where packets are emulated. It counts no slow start, for
connections are warm. In a gather that is bytes ÷ (0.965 · rate) + RTT/2 of the slowest link. The
fair bound is the same with a rate that is shared with the flows of others: rate ÷ (flows + 1).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import yaml

from isthmus.orchestrator.core.link_totals import LinkTotals
from isthmus.orchestrator.documents import Pair, load_pair, load_topology_file
from isthmus.orchestrator.evidence.bench.allreduce_conditions import (
    NO_CONDITIONS,
    Conditions,
    Samples,
    Span,
    others_bytes_per_s,
    read_received,
)
from isthmus.orchestrator.evidence.bench.experiment import RUNS, Experiment, Part
from isthmus.orchestrator.evidence.record.bench_record import Failed, Made, Record
from isthmus.orchestrator.evidence.record.measured_steps import (
    MeasurementError,
    wire_ratio,
)
from isthmus.orchestrator.evidence.view import formats
from isthmus.protos import metrics
from isthmus.topology.documents.load import split_overrides
from isthmus.topology.model.step_model import exchange_time_s
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.world import Topology
from isthmus.topology.trees.tree_choice import plan_reduction

ALLREDUCE = "allreduce.json"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What was asked, of every setting alike."""

    overrides: tuple[str, ...]
    """As given with --set."""
    warmup: int
    """Repetitions before those that count."""
    repeats: int
    is_one_rank_a_site: bool
    """Else as many as the topology says."""
    is_copied: bool
    """The tensor lies in memory of the rank's own; else in what it shares with its gateway."""
    baselines: tuple[str, ...] = ()
    """What else was measured: of `gloo` and `tcp`."""
    conditions: Conditions = NO_CONDITIONS
    """What was done to the emulated links."""
    idle_s: float = 0.0
    """The pause before each repetition."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """How long each repetition took, from the last site's begin to the last one's end."""

    cold_s: float
    """The first of all: connections' windows and the memory of buffers are new."""
    all_s: tuple[float, ...]
    """The repetitions after the warm-up. The next three are of these, too."""
    median_s: float
    min_s: float
    max_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """One directed link, in the median repetition."""

    source: str
    target: str
    sent_bytes: float
    """Bytes of frames, headers included; what TCP and IP add is not counted."""
    share: float | None
    """The share of what the link could have carried in that time; null where it is not emulated."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one setting came to."""

    times: Times
    algorithm_bytes_per_s: float
    """float32 bytes of the tensor over the median time."""
    links: tuple[LinkUse, ...]
    site_sent_bytes: float
    """Bytes that the site that sends most has sent."""
    bound_s: float | None
    """What the links allow, as the module says; null where none is emulated."""
    over_bound: float | None
    """The median time over `bound_s`."""
    fair_bound_s: float | None
    """The bound with a fair share of the links, as the module says; null without cross traffic."""
    over_fair_bound: float | None
    """The median time over `fair_bound_s`."""
    others_bytes_per_s: float | None
    """What a flow of others got through during the repetitions, the mean over flows."""
    gateways_cpu_s_per_gb: float
    """The mean over sites, for each 1e9 bytes of float32."""
    ranks_cpu_s_per_gb: float
    relative_error: float
    """The error of the result, ‖x - mean‖ ÷ ‖mean‖."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What others make of the same tensor, one process a site, on links like the runs'."""

    size_bytes: int
    times: Times
    cpu_s_per_gb: float
    """The mean over sites."""
    others_bytes_per_s: float | None = None
    """As in Figures."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceSetting(Made):
    """One combination, and its run."""

    size_bytes: int
    codec: str
    tree: str
    """As asked for."""
    plan: str
    """What became of it, in words."""
    figures: Figures | None = None
    over_gloo: float | None = None
    """Gloo's median time over this one's: how many times as fast this is."""
    over_tcp: float | None = None
    """Plain TCP's median time over this one's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllReduceBench(Record[Question, AllReduceSetting]):
    """The whole file."""

    gloo: tuple[Baseline, ...] = ()
    """Gloo's all-reduce."""
    tcp: tuple[Baseline, ...] = ()
    """The bytes of the tensor over a plain TCP connection each way."""


_LOOPBACK: Final = "{bandwidth: 100Gbit/s, rtt: 100us}"
"""More than gateways reach on one machine: none waits for a link that is not there."""
_LOOPBACK_PIECES: Final = {"exchange.chunk": "8MiB", "exchange.bucket": "64MiB"}
"""Where no link has to be kept full, fewer chunks and buckets cost less: docs/benchmarks.md."""


def combinations(
    question: Question,
    topology_path: Path,
    overrides: Sequence[str],
    *,
    sizes_bytes: Sequence[int],
    codecs: Sequence[str],
    trees: Sequence[str],
    emulator: str | None,
) -> list[tuple[AllReduceSetting, Pair]]:
    """Return every combination of sizes, codecs and trees, and the documents of its run.

    Args:
        question: What holds for all of them.
        topology_path: Its topology.
        overrides: The user's own, of both documents; the arguments below win over them.
        sizes_bytes: They change slowest.
        codecs: Empty: what the job that ships says, or `overrides`; likewise `trees`.
        trees: As the job names them.
        emulator: `auto`, `relay`, `netns` or `none`; None: as the topology says. With `none`,
            sites are told of this machine's own links in place of the topology's, unless
            `overrides` speak of links, chunks or buckets themselves.

    Raises:
        ConfigError: a document has mistakes in some setting.
    """
    # An invalid topology is refused before its parts are looked at.
    topology = load_topology_file(topology_path, split_overrides(overrides)[0])
    shared = [*overrides]
    if emulator == "none":
        shared += ["emulate=false", *_loopback(topology_path, overrides)]
    elif emulator is not None:
        shared += ["emulate=true", f"emulator={emulator}"]
    links = yaml.safe_load(topology_path.read_text()).get("links") or []
    shared += question.conditions.overrides(links)
    if question.is_one_rank_a_site:
        for site in topology.sites:
            counts = ("nodes", "accelerators_per_node", "wan.gateways_per_node")
            shared += [f"sites.{site.index}.{count}=1" for count in counts]
    choices = itertools.product(
        sizes_bytes,
        [[f"exchange.codec={codec}"] for codec in codecs] or [[]],
        [[f"reduction.tree={tree}"] for tree in trees] or [[]],
    )
    count = str(question.warmup + question.repeats)
    memory = "own" if question.is_copied else "shared"
    found = []
    for size_bytes, codec, tree in choices:
        given = [str(size_bytes), count, memory, f"{question.idle_s:g}"]
        arguments = f"arguments={json.dumps(given)}"
        pair = load_pair(_job_path(), [*shared, *codec, *tree, arguments], topology_path)
        setting = AllReduceSetting(
            size_bytes=size_bytes,
            codec=pair.job.exchange.codec,
            tree="as written" if pair.job.reduction.trees else pair.job.reduction.tree,
            plan=plan_reduction(pair.job, pair.topology).why,
        )
        found.append((setting, pair))
    return found


def _loopback(topology_path: Path, overrides: Sequence[str]) -> list[str]:
    """Return what describes links of this machine, where the user says nothing of them."""
    own = [override.split("=")[0] for override in overrides]
    found = [f"{key}={size}" for key, size in _LOOPBACK_PIECES.items() if key not in own]
    if not any(key.split(".")[0] == "links" for key in own):
        links = yaml.safe_load(topology_path.read_text()).get("links") or []
        found += [f"links.{index}.measured={_LOOPBACK}" for index in range(len(links))]
    return found


def _job_path() -> Path:
    """Return the job that ships with the sites' part, without importing what is theirs."""
    found = importlib.util.find_spec("isthmus.sites")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "bench" / "allreduce.yaml"


PAYLOAD_SHARE = 0.965
"""1448 of 1500 bytes: what TCP with time stamps can use of a link of packets."""
GB = 1e9

Place = tuple[str, int]
"""A site, and a rank inside it."""
Repeats = dict[int, dict[Place, Mapping[str, Any]]]
"""Records of kind `allreduce`, by repetition and rank."""


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """What the run was to do."""

    job: Job
    topology: Topology
    size_bytes: int
    warmup: int
    repeats: int
    emulator: str
    """What emulated the WAN: `netns`, `relay` or `none`."""

    @property
    def count(self) -> int:
        """Repetitions, the warm-up included."""
        return self.warmup + self.repeats


def figures_of(
    records: Iterable[Mapping[str, Any]],
    asked: Asked,
    received: Mapping[str, Samples] = MappingProxyType({}),
) -> Figures:
    """Return what a run's metrics.jsonl says, and what sites `received` of cross traffic.

    Raises:
        MeasurementError: a rank lacks a repetition, or the results of two ranks differ, or cross
            traffic was not under way.
    """
    repeats, links = _sorted_out(records)
    _check(repeats, asked)
    spans = spans_of(
        [
            (each["values"][metrics.BEGIN_S], each["values"][metrics.END_S])
            for each in repeats[repeat].values()
        ]
        for repeat in range(asked.count)
    )
    times = times_of(spans, asked.warmup)
    sent = {pair: values[metrics.SENT_BYTES] / asked.count for pair, values in links.items()}
    bound_s = _bound_s(links, asked)
    traffic = asked.topology.emulation.cross_traffic
    fair_s = None if traffic is None else _bound_s(links, asked, traffic.flows)
    site_sent: dict[str, float] = defaultdict(float)
    for (source, _), num_bytes in sent.items():
        site_sent[source] += num_bytes
    error = repeats[asked.count - 1][asked.topology.sites[0].name, 0]["values"]
    return Figures(
        times=times,
        algorithm_bytes_per_s=asked.size_bytes / times.median_s,
        links=_links(sent, times, asked),
        site_sent_bytes=max(site_sent.values(), default=0.0),
        bound_s=bound_s,
        over_bound=times.median_s / bound_s if bound_s else None,
        fair_bound_s=fair_s,
        over_fair_bound=times.median_s / fair_s if fair_s else None,
        others_bytes_per_s=others_bytes_per_s(received, spans[asked.warmup :], asked.topology),
        gateways_cpu_s_per_gb=_cpu_s_per_gb(repeats, asked, metrics.GATEWAYS_CPU_S),
        ranks_cpu_s_per_gb=_cpu_s_per_gb(repeats, asked, metrics.RANK_CPU_S),
        relative_error=float(error.get(metrics.RELATIVE_ERROR, 0.0)),
    )


def spans_of(repeats: Iterable[Iterable[Span]]) -> list[Span]:
    """Return when each repetition began and ended: with the last site to do so.

    `repeats` are the sites' own, on one clock.
    """
    found = []
    for each in repeats:
        begins_s, ends_s = zip(*each, strict=True)
        found.append((max(begins_s), max(ends_s)))
    return found


def times_of(spans: Iterable[Span], warmup: int) -> Times:
    """Return how long repetitions took."""
    all_s = [end_s - begin_s for begin_s, end_s in spans]
    counted_s = all_s[warmup:]
    return Times(
        cold_s=all_s[0],
        all_s=tuple(counted_s),
        median_s=statistics.median(counted_s),
        min_s=min(counted_s),
        max_s=max(counted_s),
    )


def _sorted_out(
    records: Iterable[Mapping[str, Any]],
) -> tuple[Repeats, dict[tuple[str, str], dict[str, float]]]:
    """Return the repetitions, and each directed link's last totals, of all gateways together."""
    repeats: Repeats = defaultdict(dict)
    totals = LinkTotals()
    for each in records:
        kind = each.get("kind")
        if kind == metrics.ALLREDUCE:
            repeats[each["step"]][each["site"], each["rank"]] = each
        elif kind == metrics.LINK:
            totals.add(each["site"], each["values"], each.get("labels") or {})
    return repeats, totals.all()


def _check(repeats: Repeats, asked: Asked) -> None:
    """Refuse repetitions that lack a rank, or results that are not equal bit for bit at all."""
    ranks = [(site.name, rank) for site in asked.topology.sites for rank in range(site.num_ranks)]
    for repeat in range(asked.count):
        records = repeats.get(repeat, {})
        for site, rank in ranks:
            if (site, rank) not in records:
                raise MeasurementError(
                    f"rank {rank} of {site} has no record of repetition {repeat + 1} of "
                    f"{asked.count}"
                )
        digests = {place: each["labels"][metrics.DIGEST] for place, each in records.items()}
        (first, expected), *others = sorted(digests.items())
        for place, digest in others:
            if digest != expected:
                raise MeasurementError(
                    f"repetition {repeat + 1}: the results of rank {first[1]} of {first[0]} and "
                    f"rank {place[1]} of {place[0]} differ: {expected} and {digest}"
                )


def _links(
    sent: Mapping[tuple[str, str], float], times: Times, asked: Asked
) -> tuple[LinkUse, ...]:
    uses = []
    for link in asked.topology.links:
        num_bytes = sent.get((link.source, link.target), 0.0)
        bytes_per_s = link.bytes_per_s / asked.topology.emulation.described
        share = num_bytes / (bytes_per_s * times.median_s)
        uses.append(
            LinkUse(
                source=link.source,
                target=link.target,
                sent_bytes=num_bytes,
                share=None if asked.emulator == "none" else share,
            )
        )
    return tuple(uses)


def _bound_s(
    links: Mapping[tuple[str, str], Mapping[str, float]], asked: Asked, num_others: int = 0
) -> float | None:
    """Return what the links allow beside so many flows of others, each with an equal share.

    None where no link is emulated, or nothing was sent.
    """
    ratio = wire_ratio(links)
    if asked.emulator == "none" or ratio is None:
        return None
    share = PAYLOAD_SHARE if asked.emulator == "netns" else 1.0
    share /= asked.topology.emulation.described * (num_others + 1)
    usable = tuple(
        dataclasses.replace(link, bytes_per_s=share * link.bytes_per_s)
        for link in asked.topology.links
    )
    # The relay's prediction is the one without packets' headers, which are in `usable`, and without
    # slow start.
    topology = dataclasses.replace(asked.topology, links=usable, emulate=True, emulator="relay")
    return exchange_time_s(asked.job, topology, asked.size_bytes, ratio)


def _cpu_s_per_gb(repeats: Repeats, asked: Asked, name: str) -> float:
    """Return the mean over sites of what all repetitions after the warm-up used."""
    used_s: float = sum(
        record["values"][name]
        for repeat in range(asked.warmup, asked.count)
        for record in repeats[repeat].values()
    )
    num_bytes = asked.repeats * asked.size_bytes * len(asked.topology.sites)
    return used_s / (num_bytes / GB)


MeasureBaseline = Callable[[int], Baseline]
"""Measures with a tensor of so many bytes; raises MeasurementError when that fails."""
BASELINES = {"gloo": "Gloo", "tcp": "plain TCP"}
"""What the exchange can be compared with, and what people call it."""


@dataclasses.dataclass(slots=True, kw_only=True)
class AllReduce(Experiment[AllReduceBench]):
    """The all-reduce benchmark: every combination, and baselines after all of a size."""

    file: str = ALLREDUCE
    found: Sequence[tuple[AllReduceSetting, Pair]]
    """What to measure."""
    baselines: Mapping[str, MeasureBaseline]
    """Measure what a size is compared with, by their names in BASELINES."""
    faults: Sequence[str] = ()
    """What names the fault script of the runs."""

    def parts(self) -> list[Part]:
        """Return the combinations of a size, then its baselines; then those of the next."""
        parts: list[Part] = []
        for size_bytes, found in itertools.groupby(self.found, lambda each: each[0].size_bytes):
            size = formats.size(size_bytes)
            for setting, pair in found:
                name = f"{size}, {setting.codec}, {setting.tree}"
                measure = functools.partial(self._measure, setting, pair)
                parts.append(Part(f"setting {len(parts)}", name, measure))
            for name in self.baselines:
                compare = functools.partial(self._compare, size_bytes, name)
                parts.append(Part(name, f"{size}, {BASELINES[name]}", compare))
        return parts

    def _measure(self, setting: AllReduceSetting, pair: Pair) -> tuple[str, str | Failed]:
        question = self.bench.question

        def measure(records: Iterable[Mapping[str, Any]], made: Made) -> Figures:
            asked = Asked(
                pair.job,
                pair.topology,
                setting.size_bytes,
                question.warmup,
                question.repeats,
                made.emulator,
            )
            return figures_of(records, asked, read_received(self.folder / RUNS / made.run_id))

        made, figures = self.made(pair, measure, self.faults)
        setting = dataclasses.replace(setting, figures=figures, **made.fields())
        self.keep(settings=(*self.bench.settings, setting))
        if figures is None:
            assert made.failed is not None
            return made.run_id, made.failed
        return made.run_id, formats.duration(figures.times.median_s)

    def _compare(self, size_bytes: int, name: str) -> tuple[str, str | Failed]:
        try:
            made = self.baselines[name](size_bytes)
        except MeasurementError as error:
            return "", Failed(code="BENCHMARK_INCOMPLETE", message=str(error))

        def compared(setting: AllReduceSetting) -> AllReduceSetting:
            if setting.size_bytes != size_bytes or setting.figures is None:
                return setting
            ratio: Any = {f"over_{name}": made.times.median_s / setting.figures.times.median_s}
            return dataclasses.replace(setting, **ratio)

        baselines = {name: (*getattr(self.bench, name), made)}
        self.keep(settings=tuple(map(compared, self.bench.settings)), **baselines)
        return "", formats.duration(made.times.median_s)
