"""Tables of an experiment's figures for people; what is not known shows as a dash."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from isthmus.orchestrator.core.run_metrics import PARTS
from isthmus.orchestrator.evidence.bench.allreduce_bench import (
    BASELINES,
    AllReduceBench,
    AllReduceSetting,
    Baseline,
    Figures,
    LinkUse,
    Times,
)
from isthmus.orchestrator.evidence.bench.allreduce_conditions import Conditions
from isthmus.orchestrator.evidence.bench.recovery import Recovery, RecoveryBench
from isthmus.orchestrator.evidence.bench.sweep_settings import Point
from isthmus.orchestrator.evidence.record.bench_record import Bench, Interval, Setting
from isthmus.orchestrator.evidence.view import formats
from isthmus.orchestrator.evidence.view.fitting_table import Column, FittingTable, figures, told
from isthmus.orchestrator.evidence.view.formats import show

EMULATORS = {
    "netns": "WAN emulated packet by packet (netns)",
    "relay": "WAN emulated in user space (relay)",
    "simulated": "simulated: nothing ran",
    "none": "no WAN emulated: links are as they are",
}
BOUND = (
    "bound: bytes / (0.965 * rate) + RTT/2 of the slowest link of a gather; along trees, hop by hop"
)
"""0.965 where packets are emulated: docs/benchmarks.md."""
FAIR = "fair: the bound with rate / (flows of others + 1)"
_BESIDE = {"hidden_inter_s": "WAN, hidden", "encode_s": "encode", "decode_s": "decode"}


@dataclass(frozen=True, slots=True)
class Section:
    """A table with its heading, and what is said below it."""

    title: str
    columns: Sequence[Column] = ()
    notes: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:
            yield Text(f"\n{self.title}", style="bold")
        if self.columns:
            yield FittingTable(self.columns)
        yield from map(Text, self.notes)


@dataclass(frozen=True, slots=True)
class BenchTables:
    """Renders an experiment: what was measured and how, then its figures."""

    name: str
    how: Sequence[str]
    """What was asked; what is empty is left out."""
    sections: Sequence[Section]
    """Without those of which no row knows anything."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        heading = Text(f"benchmark {formats.words(self.name)}", style="bold")
        yield heading.append("\n" + ", ".join(filter(None, self.how)), style="not bold")
        yield Text()
        yield from (each for each in self.sections if told(each.columns) or not each.columns)


def emulators(used: Iterable[str]) -> str:
    """Return in words what emulated the WAN."""
    return "; ".join(EMULATORS.get(name, formats.words(name)) for name in sorted(set(used)))


def scaling_tables(bench: Bench) -> BenchTables:
    """Return settings, splits and links of a scaling benchmark or a simulation."""
    asked = bench.question
    results = [each.result for each in bench.settings if each.result is not None]
    shared = ": all sites share this machine" if asked.compute == "real" else ""
    how = [
        f"{asked.compute} compute{shared}",
        *sorted({f"exchange: {each.schedule}" for each in results}),
        emulators(each.emulator for each in results),
        f"{asked.steps} steps after {asked.warmup_steps} to warm up",
        f"repeats: {asked.repeats}",
    ]
    sections = [
        Section("", setting_columns(bench.settings)),
        Section("where a step's time went", split_columns(bench.settings)),
        Section("links, a step", link_columns(bench.settings)),
    ]
    if not results:
        sections = [Section("", (), ["no repeat is complete yet"])]
    return BenchTables(bench.name, how, sections)


def setting_columns(settings: Sequence[Setting]) -> list[Column]:
    """Return a row a setting: what it reached, and what was predicted."""
    results = [each.result for each in settings]
    predicted = [None if each is None else each.predicted for each in results]
    repeats = ["0" if each is None else str(len(each.efficiency.values)) for each in results]
    return [
        *swept_columns(settings),
        figures("efficiency", results, lambda each: each.efficiency, _interval),
        figures("predicted", predicted, lambda each: each.efficiency, "{:.3f}".format),
        figures("tokens/s", results, lambda each: each.tokens_per_s.mean, formats.count),
        figures("step", results, lambda each: each.step_s.mean, formats.duration),
        figures("predicted", predicted, lambda each: each.step_s, formats.duration),
        figures("deviation", predicted, lambda each: each.deviation, "{:+.1%}".format),
        Column("repeats", repeats),
        figures("predicted compute", predicted, lambda each: each.compute_s, formats.duration),
        figures("exchange", predicted, lambda each: each.exchange_s, formats.duration),
    ]


def split_columns(settings: Sequence[Setting]) -> list[Column]:
    """Return a row a setting: the shares of a step, and the times that are no part of it."""
    results = [each.result for each in settings]

    def share(key: str, heading: str) -> Column:
        return figures(heading, results, lambda each: each.shares[key], formats.percent)

    def time(key: str, heading: str) -> Column:
        return figures(heading, results, lambda each: getattr(each.split, key), formats.duration)

    return [
        *swept_columns(settings),
        *(share(key.removesuffix("_s"), heading) for key, heading in PARTS.items()),
        *(time(key, heading) for key, heading in _BESIDE.items()),
    ]


def link_columns(settings: Sequence[Setting]) -> list[Column]:
    """Return a row a setting and directed link: configured, and what the steps made of it."""
    rows = [
        (setting, link)
        for setting in settings
        if setting.result is not None
        for link in setting.result.links
    ]
    links = [link for _, link in rows]
    return [
        *swept_columns([setting for setting, _ in rows]),
        figures("link", links, lambda e: formats.way(e.source, e.target), is_text=True),
        figures("rate", links, lambda each: each.bytes_per_s, formats.rate),
        figures("RTT", links, lambda each: each.rtt_s, formats.duration),
        figures("loss", links, lambda each: each.loss or None, formats.share),
        figures("bytes", links, lambda each: each.bytes_per_step, formats.size),
        figures("use", links, lambda each: each.utilisation, formats.percent),
        figures(
            "egress, 1e9 tokens",
            links,
            lambda each: each.egress_usd_per_1e9_tokens or None,
            "{:.3g} USD".format,
        ),
    ]


def swept_columns(settings: Sequence[Setting | Point]) -> list[Column]:
    """Return a column for each swept path, under its last word where that says which."""
    paths = list(settings[0].overrides) if settings else []
    last = [path.rpartition(".")[2] for path in paths]
    return [
        Column(
            formats.words(path if last.count(word) > 1 else word),
            [formats.words(setting.overrides.get(path)) for setting in settings],
            is_text=True,
        )
        for path, word in zip(paths, last, strict=True)
    ]


def _interval(value: Interval) -> str:
    half_width = "" if value.half_width is None else f" ± {value.half_width:.3f}"
    return f"{value.mean:.3f}{half_width}"


def allreduce_tables(bench: AllReduceBench) -> BenchTables:
    """Return times and what bounds them, others' traffic, costs, then baselines."""
    asked, settings = bench.question, bench.settings
    made = [each.figures for each in settings if each.figures is not None]
    how = [
        emulators(each.emulator for each in settings if each.figures),
        "one rank a site" if asked.is_one_rank_a_site else "all ranks of the topology",
        "tensors copied to shared memory" if asked.is_copied else "",
        f"median of {asked.repeats} after {asked.warmup}",
        f"a pause of {formats.duration(asked.idle_s)} before each" if asked.idle_s else "",
        *_conditions(asked.conditions),
    ]
    sections = [Section("", _times(settings), [BOUND] if any(e.bound_s for e in made) else [])]
    if any(each.fair_bound_s for each in made):
        sections.append(Section("beside the flows of others", _beside_others(settings), [FAIR]))
    sections.append(Section("what it costs", _costs(settings)))
    for name, rows in (("gloo", bench.gloo), ("tcp", bench.tcp)):
        if rows:
            title = f"{BASELINES[name]}, one process a site, on the same links"
            sections.append(Section(title, _baseline(rows)))
    return BenchTables(bench.name, how, sections)


def _conditions(asked: Conditions) -> Iterator[str]:
    """Yield the conditions that were asked for, in words."""
    if (traffic := asked.cross_traffic) is not None:
        kind = traffic.congestion or "bulk"
        yield f"{traffic.flows} {kind} flow{'s' * (traffic.flows > 1)} of others a link"
    if asked.loss is not None:
        yield f"loss {formats.loss(asked.loss)}"
    if asked.jitter_s is not None:
        yield f"jitter {formats.duration(asked.jitter_s)}"
    if asked.queue is not None:
        yield f"queues of {asked.queue}"
    if asked.described is not None:
        yield f"bandwidth described as x {asked.described:g}"
    if asked.congestion is not None:
        yield f"congestion control {asked.congestion}"
    if asked.is_varying:
        yield "rates that vary"


def _times(settings: Sequence[AllReduceSetting]) -> list[Column]:
    made = [each.figures for each in settings]
    time, *spread = _time_columns([None if each is None else each.times for each in made])
    return [
        *_named(settings),
        time,
        figures("bound", made, lambda each: each.bound_s, formats.duration),
        figures("time/bound", made, lambda each: each.over_bound, "{:.2f}".format),
        figures("x Gloo", settings, lambda each: each.over_gloo, "{:.2f}".format),
        figures("x TCP", settings, lambda each: each.over_tcp, "{:.2f}".format),
        *spread,
        figures("fp32", made, lambda each: each.algorithm_bytes_per_s, _speed),
    ]


def _beside_others(settings: Sequence[AllReduceSetting]) -> list[Column]:
    made = [each.figures for each in settings]
    return [
        *_named(settings),
        figures("time", made, lambda each: each.times.median_s, formats.duration),
        figures("fair", made, lambda each: each.fair_bound_s, formats.duration),
        figures("time/fair", made, lambda each: each.over_fair_bound, "{:.2f}".format),
        figures("a flow of others", made, lambda each: each.others_bytes_per_s, formats.rate),
    ]


def _time_columns(times: Sequence[Times | None]) -> list[Column]:
    return [
        figures("time", times, lambda each: each.median_s, formats.duration),
        figures("min", times, lambda each: each.min_s, formats.duration),
        figures("max", times, lambda each: each.max_s, formats.duration),
        figures("cold", times, lambda each: each.cold_s, formats.duration),
    ]


def _costs(settings: Sequence[AllReduceSetting]) -> list[Column]:
    made = [each.figures for each in settings]
    busiest = [None if each is None else _busiest(each) for each in made]
    return [
        *_named(settings),
        figures("sent a site", made, lambda each: each.site_sent_bytes, formats.size),
        figures("busiest link", busiest, lambda e: formats.way(e.source, e.target), is_text=True),
        figures("use", busiest, lambda each: each.share, formats.percent),
        figures("gateways", made, lambda each: each.gateways_cpu_s_per_gb, _cpu),
        figures("ranks", made, lambda each: each.ranks_cpu_s_per_gb, _cpu),
        figures("error", made, lambda each: each.relative_error, "{:.1g}".format),
        figures("reduction", settings, lambda each: each.plan, formats.words, is_text=True),
    ]


def _baseline(rows: Sequence[Baseline]) -> list[Column]:
    return [
        figures("size", rows, lambda each: each.size_bytes, formats.size),
        *_time_columns([each.times for each in rows]),
        figures("fp32", rows, lambda each: each.size_bytes / each.times.median_s, _speed),
        figures("CPU", rows, lambda each: each.cpu_s_per_gb, _cpu),
        figures("a flow of others", rows, lambda each: each.others_bytes_per_s, formats.rate),
    ]


def _named(settings: Sequence[AllReduceSetting]) -> list[Column]:
    return [
        figures("size", settings, lambda each: each.size_bytes, formats.size),
        figures("codec", settings, lambda each: each.codec, is_text=True),
        figures("tree", settings, lambda each: each.tree, is_text=True),
    ]


def _busiest(made: Figures) -> LinkUse | None:
    links = [link for link in made.links if link.share is not None]
    return max(links, key=lambda link: link.share or 0.0, default=None)


def _speed(bytes_per_s: float) -> str:
    return f"{formats.count(bytes_per_s)}B/s"


def _cpu(s_per_gb: float) -> str:
    return f"{s_per_gb:.2f}s/GB"


def recovery_tables(bench: RecoveryBench) -> BenchTables:
    """Return what each failure cost."""
    asked, failures = bench.question, bench.settings
    how = [
        f"failures at site {asked.site}",
        f"detect_within {formats.duration(asked.detect_within_s)}",
        f"an outage lasts {formats.duration(asked.outage_s)}",
    ]
    columns = [
        figures("failure", failures, lambda each: each.kind, is_text=True),
        figures("a step", failures, lambda each: each.step_s, formats.duration),
        figures("stalled", failures, lambda each: each.stalled_s, formats.duration),
        figures("steps lost", failures, lambda each: each.lost_steps),
        Column("", [each.failed.code if each.failed else "" for each in failures]),
    ]
    returned = [f"\n{_returned(each)}" for each in failures if each.away_s is not None]
    return BenchTables(bench.name, how, [Section("", columns, returned)])


def _returned(made: Recovery) -> str:
    """Return in words how a site came back."""
    return (
        f"return: site {made.site} took part again after {show(made.away_s, formats.duration)}, "
        f"with {show(made.state_bytes, formats.size)} of the others that came in "
        f"{show(made.fetch_s, formats.duration)}; meanwhile a step took "
        f"{show(made.beside_s, formats.duration)}, {show(made.longest_s, formats.duration)} at most"
    )
