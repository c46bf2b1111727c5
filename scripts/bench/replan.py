"""A link is cut to a tenth while a job runs: its steps before, with the old plan, and the next one.

Usage: python scripts/bench_replan [--emulator relay] [--home DIR]
Runs the job twice, with and without `plan.replan`, and prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from isthmus.orchestrator.run_folder.run_files import METRICS, read_metrics
from isthmus.protos.own_processes import own_command

HERE = Path(__file__).resolve().parent
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

    def median_s(self, first: int, last: float) -> float:
        """Return the median of the steps from `first` to before `last`."""
        return median(step_s for step, step_s in self.steps if first <= step < last)


def main(argv: list[str]) -> int:
    """Run both and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--emulator", default="auto", choices=["auto", "relay", "netns"])
    parser.add_argument("--home", type=Path, help="where runs are kept [a scratch folder]")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        home = options.home or Path(scratch)
        kept = run(home / "kept", options.emulator, "--set", "plan.replan=off")
        switched = run(home / "switched", options.emulator)
    assert switched.switched_step is not None, f"the plan was kept: {switched.note}"
    print("| steps | median |\n|---|---|")
    for name, of, first, last in (
        ("before the cut", switched, SETTLED, switched.cut_step),
        ("after it, the plan is kept", kept, kept.cut_step + SETTLED, float("inf")),
        (
            "after it, until the switch",
            switched,
            switched.cut_step + SETTLED,
            switched.switched_step,
        ),
        ("after the switch", switched, switched.switched_step + SETTLED, float("inf")),
    ):
        print(f"| {name} | {of.median_s(first, last):.3f} s |")
    print(f"\n{switched.note}")
    return 0


def run(home: Path, emulator: str, *arguments: str) -> Run:
    """Run the job to its end and read what it left."""
    home.mkdir(parents=True)
    command = (
        *own_command("isthmus.orchestrator.cli.main", "launch", str(HERE / "job.yaml")),
        *("--faults", str(HERE / "faults.yaml"), "--emulator", emulator),
        *("--home", str(home), "--json", *arguments),
    )
    ended = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S)
    if ended.returncode:
        raise SystemExit(ended.stderr)
    folder = Path(json.loads(ended.stdout)["data"]["folder"])
    notes = json.loads(ended.stdout)["data"]["notes"]
    return read(list(read_metrics(folder / METRICS)), notes, events(home))


def events(home: Path) -> list[dict[str, Any]]:
    """Return the run's events."""
    command = own_command("isthmus.orchestrator.cli.main", "events", "--home", str(home))
    out = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout
    found: list[dict[str, Any]] = json.loads(out)["data"]["events"]
    return found


def read(metrics: list[Mapping[str, Any]], notes: list[str], told: list[dict[str, Any]]) -> Run:
    """Return a run's steps, and when what happened to it."""
    steps = [each for each in metrics if each["kind"] == "step" and each["site"] == "a"]
    cut_s = next(each["wall_s"] for each in metrics if each["kind"] == "fault")
    switched = {each["detail"]["epoch"] for each in told if each["kind"] == "run.replanned"}
    begun = [
        each
        for each in told
        if each["kind"] == "site.resumed"
        and each["site"] == "a"
        and each["detail"]["epoch"] in switched
    ]

    def first_after(wall_s: float) -> int:
        return min(int(each["step"]) for each in steps if each["wall_s"] > wall_s)

    return Run(
        steps=[(each["step"], each["values"]["step_s"]) for each in steps],
        cut_step=first_after(cut_s),
        switched_step=first_after(begun[0]["wall_s"]) if begun else None,
        note="; ".join(notes),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
