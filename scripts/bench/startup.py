"""Measure how long the command line takes to answer: the median of several processes.

`isthmus --help` has a budget of 0.25 s; with more than that the exit status is 1.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import subprocess
import tempfile

from isthmus.protos.own_processes import own_command
from scripts.bench.timing import times_s

HELP_BUDGET_S = 0.25


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what may be asked for."""
    parser.add_argument("--repeat", type=int, default=10)


def run(options: argparse.Namespace) -> int:
    """Print a row a command; return 1 if --help is over its budget."""
    with tempfile.TemporaryDirectory() as folder:
        rows = {
            "--help": ["--help"],
            "init": ["init", folder, "--force"],
            "validate": ["validate", f"{folder}/job.yaml"],
            "launch --help": ["launch", "--help"],
            "status --all": ["status", "--all", "--home", folder],
        }
        medians_s = {}
        for name, arguments in rows.items():
            command = own_command("isthmus.orchestrator.cli.main", *arguments)
            answer = functools.partial(
                subprocess.run, command, capture_output=True, check=True, timeout=60
            )
            medians_s[name] = statistics.median(times_s(answer, options.repeat))
            print(f"isthmus {name:<14} {medians_s[name] * 1e3:6.0f} ms", flush=True)
    return int(medians_s["--help"] > HELP_BUDGET_S)
