"""Measured training steps, and the machines they were measured on.

`python -m tests.topology.cost_cases` prints every step of the file with its error, and how well
constants that are fitted to some of them predict others.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from isthmus.topology.cost.layer_time import A100, Device, Interior, interior
from isthmus.topology.cost.parallel import StepTime, step_time
from isthmus.topology.spec.model_shape import Degrees, Workload

_CSV = Path(__file__).parents[1] / "reference" / "vtrain_a100_steps.csv"

SELENE = interior(node_ranks=8, node_bytes_per_s=300e9, cluster_bytes_per_s=8 * 25e9)
"""NVIDIA's: eight HDR adapters of 200 Gbit/s a node (Narayanan et al., SC'21, section 5)."""
VTRAIN = interior(node_ranks=8, node_bytes_per_s=300e9, cluster_bytes_per_s=100e9)
"""800 Gbit/s a node."""
EOS = interior(node_ranks=8, node_bytes_per_s=450e9, cluster_bytes_per_s=8 * 50e9)
"""H100: eight NDR adapters of 400 Gbit/s a node."""


def gpt(
    layers: int, hidden: int, heads: int, *, vocabulary: int = 51200, gradient_bytes: int = 2
) -> Workload:
    """Return GPT-3's form at another size: sequences of 2048, biases, learned positions."""
    return Workload(
        layers=layers,
        hidden=hidden,
        heads=heads,
        sequence=2048,
        vocabulary=vocabulary,
        biases=True,
        learned_positions=True,
        gradient_bytes=gradient_bytes,
    )


def hardware_flops(workload: Workload, num_sequences: int, recompute: str) -> float:
    """Return the FLOPs that are executed, with what `recompute` does twice (SC'21, eq. 3)."""
    again = {
        "none": 0.0,
        "selective": workload.attention_flops(num_sequences),
        "full": workload.layer_flops(num_sequences),
    }
    return workload.model_flops(num_sequences) + workload.layers * again[recompute]


def bytes_per_s_needed(
    exchanged_bytes: float, step_s: float, window_s: float, efficiency: float, delay_s: float = 0.0
) -> float:
    """Return the rate at which an exchange leaves a step its efficiency; infinite if none does."""
    allowed_s = window_s + step_s * (1 / efficiency - 1) - delay_s
    return exchanged_bytes / allowed_s if allowed_s > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Case:
    """One measured step."""

    workload: Workload
    degrees: Degrees
    global_batch: int
    measured_s: float

    def predicted(self, device: Device = A100, inside: Interior = VTRAIN) -> StepTime:
        return step_time(self.workload, self.degrees, device, inside, self.global_batch)

    def error(self, device: Device = A100, inside: Interior = VTRAIN) -> float:
        """Predicted over measured, less one."""
        return self.predicted(device, inside).step_s / self.measured_s - 1


def vtrain_cases() -> list[Case]:
    """Return the steps of tests/reference/vtrain_a100_steps.csv."""
    with _CSV.open(newline="", encoding="utf-8") as file:
        return [_vtrain_case(row) for row in csv.DictReader(file)]


def _vtrain_case(row: dict[str, str]) -> Case:
    degrees = Degrees(
        tensor=int(row["tp"]),
        data=int(row["dp"]),
        pipeline=int(row["pp"]),
        micro_batch=int(row["micro_batch"]),
        recompute="full",
    )
    assert degrees.num_ranks == int(row["gpus"])
    workload = gpt(int(row["layers"]), int(row["hidden"]), int(row["heads"]))
    return Case(workload, degrees, int(row["global_batch"]), float(row["step_ms"]) / 1e3)


@dataclass(frozen=True, slots=True)
class Errors:
    """Absolute relative errors of several cases."""

    median: float
    mean: float
    largest: float


def errors(cases: Iterable[Case], device: Device = A100, inside: Interior = VTRAIN) -> Errors:
    found = [abs(case.error(device, inside)) for case in cases]
    return Errors(statistics.median(found), statistics.fmean(found), max(found))


def fitted(cases: list[Case]) -> Device:
    """Return the A100 whose two fitted constants are, of a grid, `cases`' best in the mean."""
    grid = itertools.product((0.82, 0.84, 0.86, 0.88, 0.90), (1.2, 1.4, 1.6, 1.8, 2.0))
    devices = [dataclasses.replace(A100, gemm_efficiency=one, gemm_passes=two) for one, two in grid]
    return min(devices, key=lambda device: errors(cases, device).mean)


def main() -> None:
    """Print all errors, and those of the cross-validation."""
    cases = vtrain_cases()
    print("error  measured s  billions  batch  mbs  tp  dp  pp")
    for case in sorted(cases, key=Case.error):
        degrees = case.degrees
        print(
            f"{case.error():+6.1%} {case.measured_s:10.2f} {case.workload.parameters / 1e9:9.1f}"
            f" {case.global_batch:6} {degrees.micro_batch:4} {degrees.tensor:3} {degrees.data:3}"
            f" {degrees.pipeline:3}"
        )
    print(f"all: {errors(cases)}")
    small = [case for case in cases if case.workload.parameters < 30e9]
    large = [case for case in cases if case.workload.parameters > 100e9]
    halves = (cases[::2], cases[1::2])
    for name, one, other in (
        ("odd by even rows", halves[0], halves[1]),
        ("even by odd rows", halves[1], halves[0]),
        ("175 B by 3.6 and 18.4 B", small, large),
        ("3.6 and 18.4 B by 175 B", large, small),
    ):
        device = fitted(one)
        print(
            f"{name}: efficiency {device.gemm_efficiency}, passes {device.gemm_passes}:"
            f" {errors(other, device)}"
        )


if __name__ == "__main__":
    main()
