"""Cut a link to a tenth while a job runs: steps before, with the old plan, and with the next one.

Runs the job of scripts/bench_replan twice, with and without `plan.replan`, and prints a Markdown
table of medians.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from isthmus.orchestrator.run_folder.run_files import METRICS, read_metrics
from isthmus.protos.own_processes import own_command

DOCUMENTS = Path(__file__).resolve().parents[1] / "bench_replan"
RUN_S = 600.0
SETTLED = 2
"""Steps after a change that are left out: one is under way, and one waits for it."""


@dataclass(frozen=True, slots=True)
class Run:
    """What one run left behind."""

    steps: list[tuple[int, float]]
    """Number and seconds, of site a."""
    cut_step: int
    """The first that began after the cut."""
    switched_step: int | None
    """The first with another plan."""
    note: str

    def show(self, name: str, first: int, last: float = float("inf")) -> None:
        """Print the median of the steps from `first` to before `last`."""
        middle_s = median(step_s for step, step_s in self.steps if first <= step < last)
        print(f"| {name} | {middle_s:.3f} s |", flush=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what may be asked for."""
    parser.add_argument("--emulator", default="auto", choices=["auto", "relay", "netns"])
    parser.add_argument("--home", type=Path, help="where runs are kept [a scratch folder]")


def run(options: argparse.Namespace) -> None:
    """Run both and print the table."""
    with tempfile.TemporaryDirectory() as scratch:
        home = options.home or Path(scratch)
        kept = launched(home / "kept", options.emulator, "--set", "plan.replan=off")
        switched = launched(home / "switched", options.emulator)
    assert switched.switched_step is not None, f"the plan was kept: {switched.note}"
    print("| steps | median |\n|---|---|")
    after_cut = switched.cut_step + SETTLED
    switched.show("before the cut", SETTLED, switched.cut_step)
    kept.show("after it, the plan is kept", kept.cut_step + SETTLED)
    switched.show("after it, until the switch", after_cut, switched.switched_step)
    switched.show("after the switch", switched.switched_step + SETTLED)
    print(f"\n{switched.note}")


def launched(home: Path, emulator: str, *arguments: str) -> Run:
    """Run the job to its end and read what it left."""
    faults = ("--faults", str(DOCUMENTS / "faults.yaml"), "--emulator", emulator)
    ended = _isthmus(
        "launch", str(DOCUMENTS / "job.yaml"), "--home", str(home), *faults, *arguments
    )
    events = _isthmus("events", "--home", str(home))["events"]
    metrics = list(read_metrics(Path(ended["folder"]) / METRICS))
    steps = [record for record in metrics if record["kind"] == "step" and record["site"] == "a"]

    def first_after(wall_s: float) -> int:
        return min(int(step["step"]) for step in steps if step["wall_s"] > wall_s)

    plans = {event["detail"]["epoch"] for event in events if event["kind"] == "run.replanned"}
    resumed = [
        event for event in events if event["kind"] == "site.resumed" and event["site"] == "a"
    ]
    begun_s = [event["wall_s"] for event in resumed if event["detail"]["epoch"] in plans]
    return Run(
        steps=[(step["step"], step["values"]["step_s"]) for step in steps],
        cut_step=first_after(next(each["wall_s"] for each in metrics if each["kind"] == "fault")),
        switched_step=first_after(begun_s[0]) if begun_s else None,
        note="; ".join(ended["notes"]),
    )


def _isthmus(*arguments: str) -> dict[str, Any]:
    """Return what a command says in JSON."""
    command = own_command("isthmus.orchestrator.cli.main", *arguments, "--json")
    ended = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S)
    if ended.returncode:
        raise SystemExit(ended.stderr)
    data: dict[str, Any] = json.loads(ended.stdout)["data"]
    return data
