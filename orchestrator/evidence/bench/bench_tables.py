"""Tables of a benchmark's figures for people; what is not known shows as a dash."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from orchestrator.evidence.bench.allreduce_bench import (
    AllReduceBench,
    AllReduceSetting,
    Figures,
    Gloo,
)
from orchestrator.evidence.bench.sweep_settings import Point
from orchestrator.evidence.record.bench_record import Bench, Interval, Result, Setting
from orchestrator.evidence.view import formats
from orchestrator.evidence.view.fitting_table import Column, FittingTable
from orchestrator.evidence.view.formats import UNKNOWN

EMULATORS = {
    "netns": "WAN emulated packet by packet (netns)",
    "relay": "WAN emulated in user space (relay)",
    "simulated": "simulated: nothing ran",
    "none": "no WAN emulated: links are this machine's own",
}
_SHARES = {
    "compute": "compute",
    "intra": "inside sites",
    "exposed_inter": "WAN, exposed",
    "wait": "waiting",
}
_BESIDE = {"hidden_inter_s": "WAN, hidden", "encode_s": "encode", "decode_s": "decode"}


class BenchTables:
    """Renders a benchmark: what was measured and how, then settings, splits and links."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        arrow = "->" if options.ascii_only else "→"
        plus_minus = "+-" if options.ascii_only else "±"
        settings = self._bench.settings
        yield _scaling_heading(self._bench)
        yield Text()
        if all(each.result is None for each in settings):
            yield Text("no repeat is complete yet")
            return
        yield _efficiency(settings, plus_minus)
        yield Text("\nwhere a step's time went", style="bold")
        yield _split(settings)
        links = _links(settings, arrow)
        if links is not None:
            yield Text("\nlinks, a step", style="bold")
            yield links


def _scaling_heading(bench: Bench) -> Text:
    asked = bench.question
    results = [each.result for each in bench.settings if each.result is not None]
    text = Text(f"benchmark {formats.words(bench.name)}", style="bold")
    shared = ": all sites share this machine" if asked.compute == "real" else ""
    how = [f"{asked.compute} compute{shared}"]
    how += sorted({f"exchange: {each.schedule}" for each in results})
    emulators = sorted({each.emulator for each in results})
    how += ["; ".join(EMULATORS.get(name, formats.words(name)) for name in emulators)]
    how += [
        f"{asked.steps} steps after {asked.warmup_steps} to warm up",
        f"repeats: {asked.repeats}",
    ]
    text.append("\n" + ", ".join(part for part in how if part), style="not bold")
    return text


def _efficiency(settings: Sequence[Setting], plus_minus: str) -> FittingTable:
    def column(heading: str, show: Callable[[Result], str]) -> Column:
        return Column(heading, [_cell(each.result, show) for each in settings])

    def predicted(style: Callable[[float], str], name: str) -> Callable[[Result], str]:
        return lambda result: (
            UNKNOWN if result.predicted is None else style(getattr(result.predicted, name))
        )

    return FittingTable(
        [
            *setting_columns(settings),
            column("efficiency", lambda result: _interval(result.efficiency, plus_minus)),
            column("predicted", predicted("{:.3f}".format, "efficiency")),
            column("tokens/s", lambda result: formats.count(result.tokens_per_s.mean)),
            column("step", lambda result: formats.duration(result.step_s.mean)),
            column("predicted", predicted(formats.duration, "step_s")),
            column("deviation", predicted(_signed_percent, "deviation")),
            Column("repeats", [_repeats(each) for each in settings]),
        ]
    )


def _split(settings: Sequence[Setting]) -> FittingTable:
    def share(name: str) -> Column:
        cells = [
            _cell(each.result, lambda result: formats.percent(result.shares[name]))
            for each in settings
        ]
        return Column(_SHARES[name], cells)

    def seconds(name: str) -> Column:
        cells = [
            _cell(each.result, lambda result: formats.duration(getattr(result.split, name)))
            for each in settings
        ]
        return Column(_BESIDE[name], cells)

    return FittingTable([*setting_columns(settings), *map(share, _SHARES), *map(seconds, _BESIDE)])


def _links(settings: Sequence[Setting], arrow: str) -> FittingTable | None:
    """Return one row a setting and link; nothing where there are no links with figures."""
    rows = [
        (setting, link)
        for setting in settings
        if setting.result is not None
        for link in setting.result.links
    ]
    if not rows:
        return None
    names = [
        f"{formats.words(link.source)} {arrow} {formats.words(link.target)}" for _, link in rows
    ]
    return FittingTable(
        [
            *setting_columns([setting for setting, _ in rows]),
            Column("link", names, is_text=True),
            Column("rate", [formats.rate(link.bytes_per_s) for _, link in rows]),
            Column("RTT", [formats.duration(link.rtt_s) for _, link in rows]),
            Column("bytes", [formats.size(link.bytes_per_step) for _, link in rows]),
            Column("use", [formats.percent(link.utilisation) for _, link in rows]),
            Column(
                "egress, 1e9 tokens", [_usd(link.egress_usd_per_1e9_tokens) for _, link in rows]
            ),
        ]
    )


def setting_columns(settings: Sequence[Setting | Point]) -> list[Column]:
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


def _cell(result: Result | None, show: Callable[[Result], str]) -> str:
    return UNKNOWN if result is None else show(result)


def _interval(value: Interval, plus_minus: str) -> str:
    half_width = "" if value.half_width is None else f" {plus_minus} {value.half_width:.3f}"
    return f"{value.mean:.3f}{half_width}"


def _repeats(setting: Setting) -> str:
    return "0" if setting.result is None else str(len(setting.result.efficiency.values))


def _signed_percent(value: float) -> str:
    return f"{value:+.1%}"


def _usd(value: float) -> str:
    return f"{value:.3g} USD" if value else UNKNOWN


class AllReduceTables:
    """Renders a benchmark: times and what bounds them, then what it cost, then Gloo."""

    def __init__(self, bench: AllReduceBench) -> None:
        self._bench = bench

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        arrow = "->" if options.ascii_only else "→"
        settings = self._bench.settings
        yield _allreduce_heading(self._bench)
        yield Text()
        yield _times(settings)
        yield Text("\nwhat it costs", style="bold")
        yield _costs(settings, arrow)
        if self._bench.gloo:
            yield Text("\nGloo, one process a site, on the same links", style="bold")
            yield _gloo(self._bench.gloo)


def _allreduce_heading(bench: AllReduceBench) -> Text:
    asked = bench.question
    text = Text(f"benchmark {formats.words(bench.name)}", style="bold")
    emulators = sorted({each.emulator for each in bench.settings if each.figures})
    how = ["; ".join(EMULATORS.get(name, formats.words(name)) for name in emulators)]
    how += ["one rank a site" if asked.is_one_rank_a_site else "all ranks of the topology"]
    how += ["tensors copied to shared memory"] if asked.is_copied else []
    how += [f"median of {asked.repeats} after {asked.warmup}"]
    text.append("\n" + ", ".join(part for part in how if part), style="not bold")
    return text


def _times(settings: tuple[AllReduceSetting, ...]) -> FittingTable:
    return FittingTable(
        [
            *_named(settings),
            _column("time", settings, lambda made: formats.duration(made.times.median_s)),
            _column("min", settings, lambda made: formats.duration(made.times.min_s)),
            _column("max", settings, lambda made: formats.duration(made.times.max_s)),
            _column("cold", settings, lambda made: formats.duration(made.times.cold_s)),
            _column("bound", settings, lambda made: formats.show(made.bound_s, formats.duration)),
            _column("over", settings, lambda made: formats.show(made.over_bound, "{:.2f}".format)),
            _column("fp32", settings, lambda made: _speed(made.algorithm_bytes_per_s)),
            Column("x Gloo", [formats.show(each.over_gloo, "{:.2f}".format) for each in settings]),
        ]
    )


def _costs(settings: tuple[AllReduceSetting, ...], arrow: str) -> FittingTable:
    return FittingTable(
        [
            *_named(settings),
            _column("sent a site", settings, lambda made: formats.size(made.site_sent_bytes)),
            _column("busiest link", settings, lambda made: _busiest(made, arrow), is_text=True),
            _column("use", settings, _use),
            _column("gateways", settings, lambda made: _cpu(made.gateways_cpu_s_per_gb)),
            _column("ranks", settings, lambda made: _cpu(made.ranks_cpu_s_per_gb)),
            _column("error", settings, lambda made: f"{made.relative_error:.1g}"),
            Column("reduction", [formats.words(each.plan) for each in settings], is_text=True),
        ]
    )


def _gloo(rows: tuple[Gloo, ...]) -> FittingTable:
    return FittingTable(
        [
            Column("size", [formats.size(each.size_bytes) for each in rows]),
            Column("time", [formats.duration(each.times.median_s) for each in rows]),
            Column("min", [formats.duration(each.times.min_s) for each in rows]),
            Column("max", [formats.duration(each.times.max_s) for each in rows]),
            Column("cold", [formats.duration(each.times.cold_s) for each in rows]),
            Column("fp32", [_speed(each.size_bytes / each.times.median_s) for each in rows]),
            Column("CPU", [_cpu(each.cpu_s_per_gb) for each in rows]),
        ]
    )


def _named(settings: tuple[AllReduceSetting, ...]) -> list[Column]:
    return [
        Column("size", [formats.size(each.size_bytes) for each in settings]),
        Column("codec", [each.codec for each in settings], is_text=True),
        Column("tree", [each.tree for each in settings], is_text=True),
    ]


def _column(
    heading: str,
    settings: tuple[AllReduceSetting, ...],
    show: Callable[[Figures], str],
    *,
    is_text: bool = False,
) -> Column:
    cells = [UNKNOWN if each.figures is None else show(each.figures) for each in settings]
    return Column(heading, cells, is_text=is_text)


def _busiest(made: Figures, arrow: str) -> str:
    links = [link for link in made.links if link.share is not None]
    if not links:
        return UNKNOWN
    busiest = max(links, key=lambda link: link.share or 0.0)
    return f"{formats.words(busiest.source)} {arrow} {formats.words(busiest.target)}"


def _use(made: Figures) -> str:
    shares = [link.share for link in made.links if link.share is not None]
    return formats.percent(max(shares)) if shares else UNKNOWN


def _speed(bytes_per_s: float) -> str:
    return f"{formats.count(bytes_per_s)}B/s"


def _cpu(s_per_gb: float) -> str:
    return f"{s_per_gb:.2f}s/GB"
