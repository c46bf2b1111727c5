"""A benchmark's figures for people, as tables: what is not known shows as a dash."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from orchestrator.evidence.bench.record import Bench, Interval, Result, Setting
from orchestrator.evidence.view import figures
from orchestrator.evidence.view.figures import UNKNOWN
from orchestrator.evidence.view.tables import Column, FittingTable

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
        yield _heading(self._bench)
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


def _heading(bench: Bench) -> Text:
    asked = bench.question
    results = [each.result for each in bench.settings if each.result is not None]
    text = Text(f"benchmark {figures.words(bench.name)}", style="bold")
    shared = ": all sites share this machine" if asked.compute == "real" else ""
    how = [f"{asked.compute} compute{shared}"]
    how += sorted({f"exchange: {each.schedule}" for each in results})
    emulators = sorted({each.emulator for each in results})
    how += ["; ".join(EMULATORS.get(name, figures.words(name)) for name in emulators)]
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
            *_setting_columns(settings),
            column("efficiency", lambda result: _interval(result.efficiency, plus_minus)),
            column("predicted", predicted("{:.3f}".format, "efficiency")),
            column("tokens/s", lambda result: figures.count(result.tokens_per_s.mean)),
            column("step", lambda result: figures.duration(result.step_s.mean)),
            column("predicted", predicted(figures.duration, "step_s")),
            column("deviation", predicted(_signed_percent, "deviation")),
            Column("repeats", [_repeats(each) for each in settings]),
        ]
    )


def _split(settings: Sequence[Setting]) -> FittingTable:
    def share(name: str) -> Column:
        cells = [
            _cell(each.result, lambda result: _percent(result.shares[name])) for each in settings
        ]
        return Column(_SHARES[name], cells)

    def seconds(name: str) -> Column:
        cells = [
            _cell(each.result, lambda result: figures.duration(getattr(result.split, name)))
            for each in settings
        ]
        return Column(_BESIDE[name], cells)

    return FittingTable([*_setting_columns(settings), *map(share, _SHARES), *map(seconds, _BESIDE)])


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
        f"{figures.words(link.source)} {arrow} {figures.words(link.target)}" for _, link in rows
    ]
    return FittingTable(
        [
            *_setting_columns([setting for setting, _ in rows]),
            Column("link", names, is_text=True),
            Column("rate", [figures.rate(link.bytes_per_s) for _, link in rows]),
            Column("RTT", [figures.duration(link.rtt_s) for _, link in rows]),
            Column("bytes", [figures.size(link.bytes_per_step) for _, link in rows]),
            Column("use", [_percent(link.utilisation) for _, link in rows]),
            Column(
                "egress, 1e9 tokens", [_usd(link.egress_usd_per_1e9_tokens) for _, link in rows]
            ),
        ]
    )


def _setting_columns(settings: Sequence[Setting]) -> list[Column]:
    """Return a column for each swept path, under its last word where that says which."""
    paths = list(settings[0].overrides) if settings else []
    last = [path.rpartition(".")[2] for path in paths]
    return [
        Column(
            figures.words(path if last.count(word) > 1 else word),
            [figures.words(setting.overrides.get(path)) for setting in settings],
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


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _signed_percent(value: float) -> str:
    return f"{value:+.1%}"


def _usd(value: float) -> str:
    return f"{value:.3g} USD" if value else UNKNOWN
