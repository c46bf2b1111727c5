"""Measure what a rank's checks of each step cost.

Prints the time of a step with each check, the least and the median of many, for parameters of one
element: what a check costs grows with their number, not with their size.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import nn

from isthmus.sites.worker.checks.crossing_check import CrossingCheck
from isthmus.sites.worker.checks.step_watch import StepWatch
from scripts.bench.timing import times_s

NUM_STEPS = 300


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what may be asked for."""
    parser.add_argument("--parameters", type=int, default=1000)


def run(options: argparse.Namespace) -> None:
    """Print a row without any check, and one for each."""
    model = nn.ParameterList([torch.ones(1) for _ in range(options.parameters)])
    for parameter in model:
        parameter.grad = torch.zeros(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)

    def show(name: str, step: Callable[[], object]) -> None:
        taken_s = times_s(step, NUM_STEPS)
        print(f"{name:24} {min(taken_s) * 1e6:8.0f} {statistics.median(taken_s) * 1e6:8.0f}")

    print(f"{options.parameters} parameters, {NUM_STEPS} steps: least and median of a step [us]")
    show("the optimizer alone", optimizer.step)
    watch = StepWatch(model.named_parameters(), [optimizer], is_due=lambda: True)

    def round_and_step() -> None:
        watch.note_round()
        optimizer.step()

    show("steps have rounds", round_and_step)
    watch.close()
    crossed = {id(parameter) for parameter in model}
    check = CrossingCheck(model.named_parameters, crossed, [optimizer], is_due=lambda: True)
    show("trained is what crosses", optimizer.step)
    check.close()
