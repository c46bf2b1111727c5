"""Shows how a benchmark goes on, on stderr.

A line a run, and on a terminal what the present one does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from orchestrator.cli.views import state_name
from orchestrator.evidence.bench.plan import Planned, Point
from orchestrator.evidence.bench.record import Run
from orchestrator.evidence.view import figures
from protos.control.v1 import control_pb2


class BenchProgress:
    """Is told of runs as they begin, go on and end."""

    def __init__(self, points: Sequence[Point]) -> None:
        self._points = points
        self._heading = ""
        console = Console(stderr=True)
        is_live = console.is_terminal and not console.is_dumb_terminal
        self._live = Live(console=console, auto_refresh=False, transient=True) if is_live else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def started(self, planned: Planned, number: int, total: int, left_s: float | None) -> None:
        """Remember what to call the run, and how much is left."""
        left = "" if left_s is None else f", about {figures.duration(left_s)} left"
        self._heading = f"[{number}/{total}{left}] {self._name(planned)}"
        self._update("starting")

    def show(self, run: control_pb2.Run) -> None:
        """Show how far the run is."""
        step = max((site.step for site in run.sites), default=0)
        self._update(f"{state_name(run).lower()}, step {step}")

    def ended(self, planned: Planned, run: Run) -> None:
        """Say in one line what it came to."""
        if run.measured is not None:
            speed = figures.count(run.measured.tokens_per_s)
            outcome = f"{speed} tokens/s, {figures.duration(run.measured.step_s)} a step"
        else:
            assert run.failed is not None
            outcome = f"FAILED, {run.failed.code}: {figures.words(run.failed.message)}"
        self._line(f"{self._heading}: {outcome}")

    def _name(self, planned: Planned) -> str:
        overrides = self._points[planned.setting].overrides
        # A solo run is shared by settings: naming one of them would say too much.
        swept = "" if planned.site else " ".join(f"{k}={v}" for k, v in overrides.items())
        what = f"{planned.site} alone" if planned.site else "all sites"
        parts = [f"repeat {planned.repeat + 1}", figures.words(swept), figures.words(what)]
        return ", ".join(part for part in parts if part)

    def _update(self, state: str) -> None:
        if self._live is not None:
            self._live.update(Text(f"{self._heading}: {state}"), refresh=True)

    def _line(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(Text(text))
        else:
            click.echo(text, err=True)
            sys.stderr.flush()
