"""Measure how long the command line takes to answer: the median of several processes.

Usage: python scripts/bench_startup.py [--repeat 10]
`isthmus --help` has a budget of 0.25 s; with more than that the exit status is 1.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from isthmus.protos.own_processes import own_command

ROOT = Path(__file__).resolve().parent.parent
HELP_BUDGET_S = 0.25


def measure(arguments: list[str], repeat: int) -> float:
    """Return the median wall time of `isthmus ARGUMENTS`, in seconds."""
    times_s = []
    for _ in range(repeat):
        began_s = time.perf_counter()
        command = own_command("isthmus.orchestrator.cli.main", *arguments)
        subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=60)
        times_s.append(time.perf_counter() - began_s)
    return statistics.median(times_s)


def main() -> int:
    """Print a table; return 1 if --help is over its budget."""
    parser = argparse.ArgumentParser(description="Measure the command line's start.")
    parser.add_argument("--repeat", type=int, default=10)
    repeat = parser.parse_args().repeat
    with tempfile.TemporaryDirectory() as folder:
        rows = {
            "--help": ["--help"],
            "init": ["init", folder, "--force"],
            "validate": ["validate", f"{folder}/job.yaml"],
            "launch --help": ["launch", "--help"],
            "status --all": ["status", "--all", "--home", folder],
        }
        times_s = {name: measure(arguments, repeat) for name, arguments in rows.items()}
    for name, time_s in times_s.items():
        print(f"isthmus {name:<14} {time_s * 1e3:6.0f} ms")
    return 1 if times_s["--help"] > HELP_BUDGET_S else 0


if __name__ == "__main__":
    sys.exit(main())
