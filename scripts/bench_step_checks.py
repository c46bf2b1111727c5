"""Measure what a rank's checks of each step cost.

Usage: python -m scripts.bench_step_checks [--parameters 1000]

Prints the time in a step of each check, the least and the median of many, for parameters of one
element: what a check costs grows with their number, not with their size.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from isthmus.sites.worker.checks.crossing_check import CrossingCheck
from isthmus.sites.worker.checks.step_watch import StepWatch

NUM_STEPS = 300


def main() -> None:
    """Measure both, and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=1000)
    num_parameters = parser.parse_args().parameters
    model = nn.ParameterList([torch.ones(1) for _ in range(num_parameters)])
    for parameter in model:
        parameter.grad = torch.zeros(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    unchecked_s = steps_s(optimizer, lambda: None)
    watch = StepWatch(model.named_parameters(), [optimizer], is_due=lambda: True)
    watched_s = steps_s(optimizer, watch.note_round)
    watch.close()
    crossed = {id(each) for each in model}
    check = CrossingCheck(model.named_parameters, crossed, [optimizer], is_due=lambda: True)
    checked_s = steps_s(optimizer, lambda: None)
    check.close()
    print(f"{num_parameters} parameters, {NUM_STEPS} steps: least and median of a step [us]")
    for name, taken_s in (
        ("the optimizer alone", unchecked_s),
        ("steps have rounds", watched_s),
        ("trained is what crosses", checked_s),
    ):
        print(f"{name:24} {min(taken_s) * 1e6:8.0f} {statistics.median(taken_s) * 1e6:8.0f}")


def steps_s(optimizer: torch.optim.Optimizer, round_: Callable[[], None]) -> list[float]:
    """Return the seconds that each of many steps takes with its round."""
    taken_s = []
    for _ in range(NUM_STEPS):
        begin_s = time.perf_counter()
        round_()
        optimizer.step()
        taken_s.append(time.perf_counter() - begin_s)
    return taken_s


if __name__ == "__main__":
    main()
