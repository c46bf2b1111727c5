"""Training steps that others published, none of which a constant but the contention was chosen by.

`python -m tests.topology.public_cases` prints every step of tests/reference/public_steps.csv with
its error, and how well the contention that is best for some sources predicts others.
"""

from __future__ import annotations

import csv
import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from isthmus.topology.cost.layer_time import DEVICES, Device, Interior, interior
from isthmus.topology.spec.model_shape import Degrees, Workload
from tests.topology.cost_cases import Case, Errors

_CSV = Path(__file__).parents[1] / "reference" / "public_steps.csv"

_A100, _HOPPER = "a100", "h100"
FUSED_EFFICIENCY = {
    ("flash-1", _A100): 0.30,
    ("flash-1", _HOPPER): 0.19,
    ("flash-2", _A100): 0.55,
    ("cudnn-9", _HOPPER): 0.5,
}
"""Of the peak, by the kernels a source says it ran, both passes of a causal model with heads of
128. A100: Dao, "FlashAttention-2", figure 4, about 95 and 175 of 312 TFLOP/s. H100: Shah et al.,
"FlashAttention-3", figures 5 and 6: cuDNN 484 to 539 and 465 to 518 of 989. Kernels without
Hopper's instructions reach 0.62 of the share there that they reach on an A100."""


@dataclass(frozen=True, slots=True)
class PublicCase:
    """One step, and the machine that took it."""

    source: str
    model: str
    accelerator: str
    case: Case
    device: Device
    inside: Interior

    def error(self, contention: float | None = None) -> float:
        """Predicted over measured, less one."""
        device = self.device
        if contention is not None:
            device = dataclasses.replace(device, contention=contention)
        return self.case.error(device, self.inside)


def public_cases() -> list[PublicCase]:
    """Return the steps of tests/reference/public_steps.csv."""
    with _CSV.open(newline="", encoding="utf-8") as file:
        return [_public_case(row) for row in csv.DictReader(file)]


def _public_case(row: dict[str, str]) -> PublicCase:
    whole = {key: int(text) for key, text in row.items() if text.isdecimal()}
    flags = {key: value == 1 for key, value in whole.items()}
    fused = row["attention"] != "plain"
    workload = Workload(
        layers=whole["layers"],
        hidden=whole["hidden"],
        heads=whole["heads"],
        kv_heads=whole["kv_heads"],
        ffn=whole["ffn"],
        gated=flags["gated"],
        vocabulary=whole["vocabulary"],
        tied=flags["tied"],
        learned_positions=flags["learned_positions"],
        biases=flags["biases"],
        sequence=whole["sequence"],
        gradient_bytes=whole["gradient_bytes"],
    )
    ranks = whole["tensor"] * whole["pipeline"] * whole["context"]
    assert whole["gpus"] % ranks == 0, row
    degrees = Degrees(
        tensor=whole["tensor"],
        pipeline=whole["pipeline"],
        virtual_stages=whole["virtual_stages"],
        context=whole["context"],
        data=whole["gpus"] // ranks,
        micro_batch=whole["micro_batch"],
        recompute=row["recompute"],
        sequence_parallel=flags["sequence_parallel"],
        fused_attention=fused,
        zero_stage=whole["zero_stage"],
        scatter_gather=flags["scatter_gather"],
        overlap_data=flags["overlap_data"],
        overlap_tensor=flags["overlap_tensor"],
    )
    device = DEVICES[row["accelerator"]]
    if fused:
        share = FUSED_EFFICIENCY[row["attention"], row["accelerator"].split("-")[0]]
        device = dataclasses.replace(device, fused_efficiency=share)
    inside = interior(
        whole["node_gpus"], 1e9 * whole["node_gbyte_per_s"], 1e9 * whole["cluster_gbyte_per_s"]
    )
    case = Case(workload, degrees, whole["global_batch"], float(row["step_s"]))
    return PublicCase(row["source"], row["model"], row["accelerator"], case, device, inside)


def errors_of(cases: Iterable[PublicCase], contention: float | None = None) -> Errors:
    found = [abs(case.error(contention)) for case in cases]
    return Errors(statistics.median(found), statistics.fmean(found), max(found))


def by_source(cases: Iterable[PublicCase]) -> dict[tuple[str, str], list[PublicCase]]:
    """Return the cases of each source on each accelerator."""
    found: defaultdict[tuple[str, str], list[PublicCase]] = defaultdict(list)
    for case in cases:
        found[case.source, case.accelerator].append(case)
    return dict(found)


def best_contention(cases: list[PublicCase]) -> float:
    """Return the contention of a coarse grid that is best for `cases`, in the mean."""
    return min((k / 10 for k in range(11)), key=lambda k: errors_of(cases, k).mean)


def main() -> None:
    """Print all errors, those of each source, and those of the cross-validation."""
    cases = public_cases()
    print("error  measured s  source       model                  gpus  sequence  tp  pp  mbs")
    for case in cases:
        degrees = case.case.degrees
        print(
            f"{case.error():+6.1%} {case.case.measured_s:10.2f}  {case.source:12} {case.model:20}"
            f" {degrees.num_ranks:6} {case.case.workload.sequence:9} {degrees.tensor:3}"
            f" {degrees.pipeline:3} {degrees.micro_batch:4}"
        )
    print("source, accelerator: steps, median, mean, signed mean, largest")
    for (source, accelerator), group in by_source(cases).items():
        found = errors_of(group)
        signed = statistics.fmean(case.error() for case in group)
        print(
            f"{source} {accelerator}: {len(group)}, {found.median:.1%}, {found.mean:.1%},"
            f" {signed:+.1%}, {found.largest:.0%}"
        )
    found = errors_of(cases)
    within = [sum(abs(case.error()) <= most for case in cases) / len(cases) for most in (0.1, 0.2)]
    print(f"all {len(cases)}: {found}; {within[0]:.0%} within 10 %, {within[1]:.0%} within 20 %")
    ampere = [case for case in cases if case.accelerator.startswith(_A100)]
    hopper = [case for case in cases if not case.accelerator.startswith(_A100)]
    for name, one, other in (
        ("odd by even rows", cases[::2], cases[1::2]),
        ("even by odd rows", cases[1::2], cases[::2]),
        ("H100 by A100", ampere, hopper),
        ("A100 by H100", hopper, ampere),
    ):
        contention = best_contention(one)
        print(f"{name}: contention {contention:.1f}: {errors_of(other, contention)}")
    print(f"nothing contends: {errors_of(cases, 0.0)}; nothing overlaps: {errors_of(cases, 1.0)}")


if __name__ == "__main__":
    main()
