"""What of simulations has no place in a benchmark's tables.

Pipelines inside sites, and failures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from orchestrator.evidence.simulate.question import Point
from orchestrator.evidence.view import figures
from orchestrator.evidence.view.figures import UNKNOWN
from orchestrator.evidence.view.tables import Column, FittingTable
from topology.planner.parallelism import in_words
from topology.simulator.described_site import Inside
from topology.simulator.run import SimulatedRun

Rows = Sequence[tuple[Point, SimulatedRun]]


def further_tables(made: Rows, *, fails: bool) -> Iterator[RenderableType]:
    """Yield what is to be printed after a benchmark's tables.

    Args:
        made: each setting, and its run.
        fails: sites fail.
    """
    cut = [(point, inside) for point, run in made for inside in run.work.inside]
    if cut:
        yield Text("\ninside each site, without the others", style="bold")
        yield _inside(cut)
        yield from map(Text, _cuts(made))
    if fails:
        yield Text("\nfailures", style="bold")
        yield _goodput(made)


def inside_data(inside: Inside) -> dict[str, Any]:
    """Return how a site cuts the model, and what its step is without the others, in seconds."""
    return {
        "site": inside.site,
        "cut": in_words(inside.degrees),
        "micro_batches": inside.step.num_micro_batches,
        "pipeline_s": inside.pipeline.step_s,
        "bubble": inside.pipeline.bubble,
        "stages_busy_s": inside.pipeline.busy_s,
        "reduction_s": inside.step.gradients.busy_s,
        "after_s": inside.step.parameters.exposed_s + inside.step.optimizer_s,
    }


def _inside(rows: Sequence[tuple[Point, Inside]]) -> FittingTable:
    def seconds(name: str) -> list[str]:
        return [figures.duration(inside_data(inside)[name]) for _, inside in rows]

    has_stages = [inside.degrees.pipeline > 1 for _, inside in rows]
    return FittingTable(
        [
            *_setting_columns([point for point, _ in rows]),
            Column("site", [figures.words(inside.site) for _, inside in rows], is_text=True),
            Column("micro-batches", [str(inside.step.num_micro_batches) for _, inside in rows]),
            Column("passes", seconds("pipeline_s")),
            Column(
                "bubble",
                [
                    f"{inside.pipeline.bubble:.1%}" if stages else UNKNOWN
                    for (_, inside), stages in zip(rows, has_stages, strict=True)
                ],
            ),
            Column("reduction", seconds("reduction_s")),
            Column("after it", seconds("after_s")),
        ]
    )


def _cuts(made: Rows) -> Iterator[str]:
    """Yield how sites cut the model, each cut of a setting once."""
    for point, run in made:
        sites: dict[str, list[str]] = {}
        for inside in run.work.inside:
            sites.setdefault(in_words(inside.degrees), []).append(figures.words(inside.site))
        setting = "".join(f"{path}={value}, " for path, value in point.overrides.items())
        yield from (f"{setting}{', '.join(names)}: {cut}" for cut, names in sites.items())


def _goodput(made: Rows) -> FittingTable:
    runs = [run for _, run in made]
    return FittingTable(
        [
            *_setting_columns([point for point, _ in made]),
            Column("wall time", [figures.duration(run.wall_s) for run in runs]),
            Column("failures", [str(len(run.outages)) for run in runs]),
            Column(
                "steps lost", [str(sum(each.lost_steps for each in run.outages)) for run in runs]
            ),
            Column("goodput", [f"{run.goodput:.1%}" for run in runs]),
        ]
    )


def _setting_columns(points: Sequence[Point]) -> list[Column]:
    return [
        Column(
            figures.words(path),
            [figures.words(point.overrides[path]) for point in points],
            is_text=True,
        )
        for path in points[0].overrides
    ]
