"""The figures of an all-reduce benchmark for people, as tables.

What is not known shows as a dash.
"""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from orchestrator.evidence.bench.allreduce_record import AllReduceBench, Figures, Gloo, Setting
from orchestrator.evidence.bench.table import EMULATORS
from orchestrator.evidence.view import figures
from orchestrator.evidence.view.figures import UNKNOWN
from orchestrator.evidence.view.tables import Column, FittingTable


class AllReduceTables:
    """Renders a benchmark: times and what bounds them, then what it cost, then Gloo."""

    def __init__(self, bench: AllReduceBench) -> None:
        self._bench = bench

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        arrow = "->" if options.ascii_only else "→"
        settings = self._bench.settings
        yield _heading(self._bench)
        yield Text()
        yield _times(settings)
        yield Text("\nwhat it costs", style="bold")
        yield _costs(settings, arrow)
        if self._bench.gloo:
            yield Text("\nGloo, one process a site, on the same links", style="bold")
            yield _gloo(self._bench.gloo)


def _heading(bench: AllReduceBench) -> Text:
    asked = bench.question
    text = Text(f"benchmark {figures.words(bench.name)}", style="bold")
    emulators = sorted({each.emulator for each in bench.settings if each.figures})
    how = ["; ".join(EMULATORS.get(name, figures.words(name)) for name in emulators)]
    how += ["one rank a site" if asked.is_one_rank_a_site else "all ranks of the topology"]
    how += ["tensors copied to shared memory"] if asked.is_copied else []
    how += [f"median of {asked.repeats} after {asked.warmup}"]
    text.append("\n" + ", ".join(part for part in how if part), style="not bold")
    return text


def _times(settings: tuple[Setting, ...]) -> FittingTable:
    return FittingTable(
        [
            *_named(settings),
            _column("time", settings, lambda made: figures.duration(made.times.median_s)),
            _column("min", settings, lambda made: figures.duration(made.times.min_s)),
            _column("max", settings, lambda made: figures.duration(made.times.max_s)),
            _column("cold", settings, lambda made: figures.duration(made.times.cold_s)),
            _column("bound", settings, lambda made: figures.show(made.bound_s, figures.duration)),
            _column("over", settings, lambda made: figures.show(made.over_bound, "{:.2f}".format)),
            _column("fp32", settings, lambda made: _speed(made.algorithm_bytes_per_s)),
            Column("x Gloo", [figures.show(each.over_gloo, "{:.2f}".format) for each in settings]),
        ]
    )


def _costs(settings: tuple[Setting, ...], arrow: str) -> FittingTable:
    return FittingTable(
        [
            *_named(settings),
            _column("sent a site", settings, lambda made: figures.size(made.site_sent_bytes)),
            _column("busiest link", settings, lambda made: _busiest(made, arrow), is_text=True),
            _column("use", settings, _use),
            _column("gateways", settings, lambda made: _cpu(made.gateways_cpu_s_per_gb)),
            _column("ranks", settings, lambda made: _cpu(made.ranks_cpu_s_per_gb)),
            _column("error", settings, lambda made: f"{made.relative_error:.1g}"),
            Column("reduction", [figures.words(each.plan) for each in settings], is_text=True),
        ]
    )


def _gloo(rows: tuple[Gloo, ...]) -> FittingTable:
    return FittingTable(
        [
            Column("size", [figures.size(each.size_bytes) for each in rows]),
            Column("time", [figures.duration(each.times.median_s) for each in rows]),
            Column("min", [figures.duration(each.times.min_s) for each in rows]),
            Column("max", [figures.duration(each.times.max_s) for each in rows]),
            Column("cold", [figures.duration(each.times.cold_s) for each in rows]),
            Column("fp32", [_speed(each.size_bytes / each.times.median_s) for each in rows]),
            Column("CPU", [_cpu(each.cpu_s_per_gb) for each in rows]),
        ]
    )


def _named(settings: tuple[Setting, ...]) -> list[Column]:
    return [
        Column("size", [figures.size(each.size_bytes) for each in settings]),
        Column("codec", [each.codec for each in settings], is_text=True),
        Column("tree", [each.tree for each in settings], is_text=True),
    ]


def _column(
    heading: str,
    settings: tuple[Setting, ...],
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
    return f"{figures.words(busiest.source)} {arrow} {figures.words(busiest.target)}"


def _use(made: Figures) -> str:
    shares = [link.share for link in made.links if link.share is not None]
    return f"{max(shares):.1%}" if shares else UNKNOWN


def _speed(bytes_per_s: float) -> str:
    return f"{figures.count(bytes_per_s)}B/s"


def _cpu(s_per_gb: float) -> str:
    return f"{s_per_gb:.2f}s/GB"
