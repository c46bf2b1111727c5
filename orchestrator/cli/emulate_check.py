"""Runs `isthmus emulate --check`: configured against measured, and a verdict."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from isthmus.orchestrator.cli.command_errors import CommandError
from isthmus.orchestrator.cli.output import Output
from isthmus.orchestrator.core.wan_stage import FALLBACK
from isthmus.orchestrator.documents import load_topology_file
from isthmus.orchestrator.emulator.self_check import (
    NUM_DATAGRAMS,
    QUICK_DATAGRAMS,
    Effort,
    Figure,
    Scene,
    grid,
    opened,
    scene_of,
    worst,
)
from isthmus.orchestrator.emulator.site_namespaces import netns_problem
from isthmus.orchestrator.evidence.view import formats as shown
from isthmus.orchestrator.evidence.view.fitting_table import Column, FittingTable
from isthmus.orchestrator.interruption import run_command

FULL = Effort(window_s=3.0, datagrams=NUM_DATAGRAMS)
TABLE_WIDTH = 120
"""Where no terminal sets one."""
QUICK = Effort(window_s=1.5, datagrams=QUICK_DATAGRAMS)


def run_check(
    output: Output, path: Path | None, overrides: Sequence[str], emulator: str, *, quick: bool
) -> int:
    """Measure, print the table and the verdict.

    Raises:
        CommandError: EMULATION_INEXACT, or EMULATION_FAILED where netns was asked for and cannot
            be.
        ConfigError: the topology has mistakes.
    """
    is_netns = _wants_netns(output, emulator)  # the relay has no packets that could be counted
    if path is None:
        scenes = grid(is_quick=quick, has_loss=is_netns)
    else:
        scenes = [scene_of(load_topology_file(path, overrides), has_loss=is_netns)]
        if not scenes[0].pairs:
            raise click.UsageError(f"--check: {path} has no two sites with a link each way")
    effort = QUICK if quick else FULL
    num_links = sum(len(scene.pairs) for scene in scenes)
    output.note(f"measuring {num_links} links, some seconds or half a minute each")
    measured = run_command(lambda: _measure(output, scenes, effort, is_netns=is_netns))
    return _finish(output, "netns" if is_netns else "relay", measured)


def _wants_netns(output: Output, emulator: str) -> bool:
    if emulator == "relay":
        return False
    why = netns_problem()
    if why is None:
        return True
    if emulator == "netns":
        raise CommandError(
            "EMULATION_FAILED", f"netns was asked for, and cannot be here: {why}", {}
        )
    output.note(f"{FALLBACK} {why}")
    return False


async def _measure(
    output: Output, scenes: Sequence[Scene], effort: Effort, *, is_netns: bool
) -> list[Figure]:
    measured = []
    for scene in scenes:
        async with opened(scene, is_netns=is_netns) as bench:
            async for figure in bench.measure(effort):
                measured.append(figure)
                output.note(_line(figure))
    return measured


def _finish(output: Output, name: str, measured: list[Figure]) -> int:
    failed = [figure for figure in measured if not figure.is_good]
    if not output.as_json:
        Console(width=None if sys.stdout.isatty() else TABLE_WIDTH).print(_table(measured))
    figures = [_view(each) for each in measured]
    least = worst([each for each in measured if math.isfinite(each.allowed)])
    if failed and least is not None:
        raise CommandError(
            "EMULATION_INEXACT",
            f"{name}: {len(failed)} of {len(measured)} figures are off by too much, the worst: "
            f"{_line(least)}",
            {"emulator": name, "figures": figures},
        )
    verdict = f"{name}: all {len(measured)} figures within tolerance"
    if least is not None:
        verdict += f"; the worst used {least.of_allowed:.0%} of it: {_line(least)}"
    return output.result({"emulator": name, "is_exact": True, "figures": figures}, verdict)


def _table(measured: Sequence[Figure]) -> FittingTable:
    def texts(title: str, values: Iterable[str]) -> Column:
        return Column(title, list(values), is_text=True)

    return FittingTable(
        [
            texts("link", (each.link for each in measured)),
            texts("setting", (each.setting for each in measured)),
            texts("what", (each.what for each in measured)),
            Column("expected", [_value(each, each.expected) for each in measured]),
            Column("measured", [_value(each, each.measured) for each in measured]),
            Column("off by", [_off_by(each) for each in measured]),
            texts("", map(_verdict, measured)),
            Column("emulator CPU", [shown.show(each.cpu, shown.share) for each in measured]),
        ]
    )


def _line(figure: Figure) -> str:
    return (
        f"{figure.setting}  {figure.what}: {_value(figure, figure.measured)}, expected "
        f"{_value(figure, figure.expected)} ({_off_by(figure)}, {_verdict(figure)})"
    )


def _value(figure: Figure, value: float) -> str:
    match figure.unit:
        case "s":
            return shown.duration(value)
        case "bytes/s":
            return shown.rate(value)
    return f"{value:.3%}"


def _off_by(figure: Figure) -> str:
    if figure.unit == "s":
        return f"{(figure.measured - figure.expected) * 1e3:+.2f}ms"
    return f"{figure.deviation:+.1%}"


def _verdict(figure: Figure) -> str:
    if not math.isfinite(figure.allowed):
        return "not judged"
    return "ok" if figure.is_good else "TOO FAR"


def _view(figure: Figure) -> dict[str, Any]:
    fields = dataclasses.asdict(figure)
    return {**fields, "deviation": figure.deviation, "is_good": figure.is_good}
