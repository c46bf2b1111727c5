"""Tables of a benchmark's figures for people; what is not known shows as a dash."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from isthmus.orchestrator.core.run_metrics import PARTS
from isthmus.orchestrator.evidence.bench.allreduce_bench import (
    BASELINES,
    AllReduceBench,
    AllReduceSetting,
    Baseline,
    Figures,
    Times,
)
from isthmus.orchestrator.evidence.bench.allreduce_conditions import Conditions
from isthmus.orchestrator.evidence.bench.recovery import Recovery, RecoveryBench
from isthmus.orchestrator.evidence.bench.sweep_settings import Point
from isthmus.orchestrator.evidence.record.bench_record import Bench, Interval, Setting
from isthmus.orchestrator.evidence.view import formats
from isthmus.orchestrator.evidence.view.fitting_table import Column, FittingTable, columns_of, told
from isthmus.orchestrator.evidence.view.formats import UNKNOWN, show

T = TypeVar("T")

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


class BenchTables:
    """Renders a benchmark: what was measured and how, then settings, splits and links."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        arrow = formats.arrow(options)
        plus_minus = "+-" if options.ascii_only else "±"
        settings = self._bench.settings
        yield _scaling_heading(self._bench)
        yield Text()
        if all(each.result is None for each in settings):
            yield Text("no repeat is complete yet")
            return
        yield FittingTable(setting_columns(settings, plus_minus))
        yield Text("\nwhere a step's time went", style="bold")
        yield FittingTable(split_columns(settings))
        links = link_columns(settings, arrow)
        if told(links):
            yield Text("\nlinks, a step", style="bold")
            yield FittingTable(links)


def _scaling_heading(bench: Bench) -> Text:
    asked = bench.question
    results = [each.result for each in bench.settings if each.result is not None]
    shared = ": all sites share this machine" if asked.compute == "real" else ""
    return _heading(
        bench.name,
        f"{asked.compute} compute{shared}",
        *sorted({f"exchange: {each.schedule}" for each in results}),
        _emulators(each.emulator for each in results),
        f"{asked.steps} steps after {asked.warmup_steps} to warm up",
        f"repeats: {asked.repeats}",
    )


def _heading(name: str, *how: str) -> Text:
    text = Text(f"benchmark {formats.words(name)}", style="bold")
    return text.append("\n" + ", ".join(part for part in how if part), style="not bold")


def _emulators(used: Iterable[str]) -> str:
    return "; ".join(EMULATORS.get(name, formats.words(name)) for name in sorted(set(used)))


def setting_columns(settings: Sequence[Setting], plus_minus: str = "±") -> list[Column]:
    """Return a row a setting: what it reached, and what was predicted."""
    results = [each.result for each in settings]
    predicted = [None if each is None else each.predicted for each in results]
    repeats = ["0" if each is None else str(len(each.efficiency.values)) for each in results]
    return [
        *swept_columns(settings),
        _column("efficiency", results, lambda each: _interval(each.efficiency, plus_minus)),
        _column("predicted", predicted, lambda each: f"{each.efficiency:.3f}"),
        _column("tokens/s", results, lambda each: formats.count(each.tokens_per_s.mean)),
        _column("step", results, lambda each: formats.duration(each.step_s.mean)),
        _column("predicted", predicted, lambda each: formats.duration(each.step_s)),
        _column("deviation", predicted, lambda each: f"{each.deviation:+.1%}"),
        Column("repeats", repeats),
        _column("predicted compute", predicted, lambda each: formats.duration(each.compute_s)),
        _column("exchange", predicted, lambda each: formats.duration(each.exchange_s)),
    ]


def split_columns(settings: Sequence[Setting]) -> list[Column]:
    """Return a row a setting: the shares of a step, and the times that are no part of it."""
    results = [each.result for each in settings]

    def share(key: str, heading: str) -> Column:
        return _column(heading, results, lambda each: formats.percent(each.shares[key]))

    def time(key: str, heading: str) -> Column:
        return _column(heading, results, lambda each: formats.duration(getattr(each.split, key)))

    return [
        *swept_columns(settings),
        *(share(key.removesuffix("_s"), heading) for key, heading in PARTS.items()),
        *(time(key, heading) for key, heading in _BESIDE.items()),
    ]


def link_columns(settings: Sequence[Setting], arrow: str = "→") -> list[Column]:
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
        Column("link", [formats.way(e.source, e.target, arrow) for e in links], is_text=True),
        _column("rate", links, lambda link: formats.rate(link.bytes_per_s)),
        _column("RTT", links, lambda link: formats.duration(link.rtt_s)),
        _column("loss", links, lambda link: formats.share(link.loss) if link.loss else UNKNOWN),
        _column("bytes", links, lambda link: formats.size(link.bytes_per_step)),
        _column("use", links, lambda link: formats.percent(link.utilisation)),
        _column("egress, 1e9 tokens", links, lambda link: _usd(link.egress_usd_per_1e9_tokens)),
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


def _column(
    heading: str, rows: Iterable[T | None], show: Callable[[T], str], *, is_text: bool = False
) -> Column:
    """Return a column of what is known of each row."""
    cells = [UNKNOWN if each is None else show(each) for each in rows]
    return Column(heading, cells, is_text=is_text)


def _interval(value: Interval, plus_minus: str) -> str:
    half_width = "" if value.half_width is None else f" {plus_minus} {value.half_width:.3f}"
    return f"{value.mean:.3f}{half_width}"


def _usd(value: float) -> str:
    return f"{value:.3g} USD" if value else UNKNOWN


class AllReduceTables:
    """Renders a benchmark: times and what bounds them, others' traffic, costs, then baselines."""

    def __init__(self, bench: AllReduceBench) -> None:
        self._bench = bench

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        arrow = formats.arrow(options)
        settings = self._bench.settings
        yield _allreduce_heading(self._bench)
        yield Text()
        yield _times(settings)
        if any(each.figures is not None and each.figures.bound_s for each in settings):
            yield Text(BOUND)
        if any(each.figures is not None and each.figures.fair_bound_s for each in settings):
            yield Text("\nbeside the flows of others", style="bold")
            yield _beside_others(settings)
            yield Text(FAIR)
        yield Text("\nwhat it costs", style="bold")
        yield _costs(settings, arrow)
        for name, rows in (("gloo", self._bench.gloo), ("tcp", self._bench.tcp)):
            if rows:
                heading = f"\n{BASELINES[name]}, one process a site, on the same links"
                yield Text(heading, style="bold")
                yield _baseline(rows)


class RecoveryTables:
    """Renders what each failure cost."""

    def __init__(self, bench: RecoveryBench) -> None:
        self._bench = bench

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        del console, options
        bench = self._bench
        yield _heading(
            bench.name,
            f"failures at site {bench.site}",
            f"detect_within {formats.duration(bench.detect_within_s)}",
            f"an outage lasts {formats.duration(bench.outage_s)}",
        )
        yield Text()
        headings = ("failure", "a step", "stalled", "steps lost", "")
        rows = [
            (
                each.kind,
                UNKNOWN if each.step_s is None else formats.duration(each.step_s),
                UNKNOWN if each.stalled_s is None else formats.duration(each.stalled_s),
                UNKNOWN if each.lost_steps is None else str(each.lost_steps),
                each.failed.code if each.failed is not None else "",
            )
            for each in bench.failures
        ]
        yield FittingTable(columns_of(headings, rows))
        for each in bench.failures:
            if each.away_s is not None:
                yield Text()
                yield Text(_returned(each))


def _returned(made: Recovery) -> str:
    """Return in words how a site came back."""
    return (
        f"return: site {made.site} took part again after {show(made.away_s, formats.duration)}, "
        f"with {show(made.state_bytes, formats.size)} of the others that came in "
        f"{show(made.fetch_s, formats.duration)}; meanwhile a step took "
        f"{show(made.beside_s, formats.duration)}, {show(made.longest_s, formats.duration)} at most"
    )


def _allreduce_heading(bench: AllReduceBench) -> Text:
    asked = bench.question
    return _heading(
        bench.name,
        _emulators(each.emulator for each in bench.settings if each.figures),
        "one rank a site" if asked.is_one_rank_a_site else "all ranks of the topology",
        "tensors copied to shared memory" if asked.is_copied else "",
        f"median of {asked.repeats} after {asked.warmup}",
        f"a pause of {formats.duration(asked.idle_s)} before each" if asked.idle_s else "",
        *_conditions(asked.conditions),
    )


def _conditions(found: Conditions) -> list[str]:
    """Return the conditions that were asked for, in words."""
    told = []
    if (traffic := found.cross_traffic) is not None:
        kind = traffic.congestion or "bulk"
        told.append(f"{traffic.flows} {kind} flow{'s' * (traffic.flows > 1)} of others a link")
    if found.loss is not None:
        told.append(f"loss {formats.loss(found.loss)}")
    if found.jitter_s is not None:
        told.append(f"jitter {formats.duration(found.jitter_s)}")
    if found.queue is not None:
        told.append(f"queues of {found.queue}")
    if found.described is not None:
        told.append(f"bandwidth described as x {found.described:g}")
    if found.congestion is not None:
        told.append(f"congestion control {found.congestion}")
    if found.is_varying:
        told.append("rates that vary")
    return told


def _times(settings: tuple[AllReduceSetting, ...]) -> FittingTable:
    made = [each.figures for each in settings]
    time, *spread = _time_columns([None if each is None else each.times for each in made])
    return FittingTable(
        [
            *_named(settings),
            time,
            _column("bound", made, lambda each: formats.show(each.bound_s, formats.duration)),
            _column(
                "time/bound", made, lambda each: formats.show(each.over_bound, "{:.2f}".format)
            ),
            Column("x Gloo", [formats.show(each.over_gloo, "{:.2f}".format) for each in settings]),
            Column("x TCP", [formats.show(each.over_tcp, "{:.2f}".format) for each in settings]),
            *spread,
            _column("fp32", made, lambda each: _speed(each.algorithm_bytes_per_s)),
        ]
    )


def _beside_others(settings: tuple[AllReduceSetting, ...]) -> FittingTable:
    made = [each.figures for each in settings]
    return FittingTable(
        [
            *_named(settings),
            _column("time", made, lambda each: formats.duration(each.times.median_s)),
            _column("fair", made, lambda each: formats.show(each.fair_bound_s, formats.duration)),
            _column(
                "time/fair", made, lambda each: formats.show(each.over_fair_bound, "{:.2f}".format)
            ),
            _column("a flow of others", made, lambda each: _others(each.others_bytes_per_s)),
        ]
    )


def _time_columns(times: Sequence[Times | None]) -> list[Column]:
    return [
        _column("time", times, lambda each: formats.duration(each.median_s)),
        _column("min", times, lambda each: formats.duration(each.min_s)),
        _column("max", times, lambda each: formats.duration(each.max_s)),
        _column("cold", times, lambda each: formats.duration(each.cold_s)),
    ]


def _costs(settings: tuple[AllReduceSetting, ...], arrow: str) -> FittingTable:
    made = [each.figures for each in settings]
    return FittingTable(
        [
            *_named(settings),
            _column("sent a site", made, lambda each: formats.size(each.site_sent_bytes)),
            _column("busiest link", made, lambda each: _busiest(each, arrow), is_text=True),
            _column("use", made, _use),
            _column("gateways", made, lambda each: _cpu(each.gateways_cpu_s_per_gb)),
            _column("ranks", made, lambda each: _cpu(each.ranks_cpu_s_per_gb)),
            _column("error", made, lambda each: f"{each.relative_error:.1g}"),
            Column("reduction", [formats.words(each.plan) for each in settings], is_text=True),
        ]
    )


def _baseline(rows: tuple[Baseline, ...]) -> FittingTable:
    return FittingTable(
        [
            Column("size", [formats.size(each.size_bytes) for each in rows]),
            *_time_columns([each.times for each in rows]),
            Column("fp32", [_speed(each.size_bytes / each.times.median_s) for each in rows]),
            Column("CPU", [_cpu(each.cpu_s_per_gb) for each in rows]),
            Column("a flow of others", [_others(each.others_bytes_per_s) for each in rows]),
        ]
    )


def _named(settings: tuple[AllReduceSetting, ...]) -> list[Column]:
    return [
        Column("size", [formats.size(each.size_bytes) for each in settings]),
        Column("codec", [each.codec for each in settings], is_text=True),
        Column("tree", [each.tree for each in settings], is_text=True),
    ]


def _busiest(made: Figures, arrow: str) -> str:
    links = [link for link in made.links if link.share is not None]
    if not links:
        return UNKNOWN
    busiest = max(links, key=lambda link: link.share or 0.0)
    return formats.way(busiest.source, busiest.target, arrow)


def _use(made: Figures) -> str:
    shares = [link.share for link in made.links if link.share is not None]
    return formats.percent(max(shares)) if shares else UNKNOWN


def _others(bytes_per_s: float | None) -> str:
    return formats.show(bytes_per_s, formats.rate)


def _speed(bytes_per_s: float) -> str:
    return f"{formats.count(bytes_per_s)}B/s"


def _cpu(s_per_gb: float) -> str:
    return f"{s_per_gb:.2f}s/GB"
