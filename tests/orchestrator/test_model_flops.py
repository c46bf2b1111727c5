"""MFU: FLOPs a token by the job or an estimate; tokens and peaks as they are known; or nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isthmus.orchestrator.core.model_flops import Done, Mfu, ModelFlops, ModelReport
from isthmus.orchestrator.core.run_metrics import RunMetrics
from isthmus.orchestrator.core.run_record import RunRecord
from isthmus.orchestrator.evidence.report.planned_steps import planned_mfu
from isthmus.orchestrator.runs.facts import summarise
from isthmus.protos import metrics
from isthmus.topology.catalogue.accelerators import catalogue
from isthmus.topology.spec.expected_devices import DEVICES, OWN_NAMES
from isthmus.topology.spec.job import Job, Model, Trainer
from isthmus.topology.spec.workload import DescribedModel
from isthmus.topology.spec.world import Accelerator, Topology
from tests.fakes.worlds import topology

MODEL = Model(layers=2, heads=2, width=8, context=16)
FLOPS_PER_TOKEN = 6 * (2 * (12 * 8 * 8 + 4 * 8) + 2 * 8 + 256 * 8) + 12 * 2 * 8 * 16
"""By hand: 6 for each number that a token is multiplied by, and attention's scores and sums."""
PEAK_FLOPS_PER_S = 50e9
SCRIPT = "train.py"
COUNTED = ModelReport(parameters=1000, counts_tokens=True, device="a CPU")


def job(entrypoint: str | None = None, **fields: float) -> Job:
    trainer = Trainer(model=MODEL, global_batch=8)
    return Job(name="j", topology="t.yaml", entrypoint=entrypoint, trainer=trainer, **fields)  # type: ignore[arg-type]


def alone() -> Topology:
    two = topology()
    return replace(two, sites=two.sites[:1], links=())


def on(accelerator: Accelerator) -> Topology:
    two = topology()
    return replace(two, sites=tuple(replace(site, accelerator=accelerator) for site in two.sites))


def second_of(share: float, flops_per_token: float = FLOPS_PER_TOKEN, ranks: int = 1) -> Done:
    """Return a second in which a site of `ranks` ranks reaches that share of its peak."""
    return Done(share * ranks * PEAK_FLOPS_PER_S / flops_per_token, 1.0)


def share_of(found: Mfu | None, *, is_estimate: bool = False) -> float:
    assert found is not None
    assert found.is_estimate is is_estimate
    return found.share


def test_tokens_a_second_are_a_share_of_the_peak_of_all_ranks() -> None:
    flops = ModelFlops(job(), topology(ranks=2))
    done = {"a": second_of(0.4, ranks=2), "b": second_of(0.2, ranks=2)}
    assert share_of(flops.mfu({"a": done["a"]}, {})) == pytest.approx(0.4)
    assert share_of(flops.mfu({"b": done["b"]}, {})) == pytest.approx(0.2)
    assert share_of(flops.mfu(done, {})) == pytest.approx(0.3)
    # A site that was lost early counts for the time that it took part.
    short = Done(done["a"].tokens / 10, 0.1)
    assert share_of(flops.mfu({"a": short, "b": done["b"]}, {})) == pytest.approx(0.24 / 1.1)


def test_the_job_s_figure_comes_before_the_shape_and_the_shape_before_an_estimate() -> None:
    reports = {"a": COUNTED}
    own = ModelFlops(job(SCRIPT, flops_per_token=5000.0), topology())
    assert share_of(own.mfu({"a": second_of(0.3, 5000.0)}, reports)) == pytest.approx(0.3)
    assert own.flops_per_token == 5000.0
    shape = DescribedModel(layers=2, width=8, heads=2, vocabulary=256, context=16, global_batch=8)
    described = ModelFlops(replace(job(SCRIPT), workload=shape), topology())
    assert described.flops_per_token is not None
    done = {"a": second_of(0.3, described.flops_per_token)}
    assert share_of(described.mfu(done, reports)) == pytest.approx(0.3)
    nothing = ModelFlops(job(SCRIPT), topology())
    assert nothing.flops_per_token is None
    found = nothing.mfu({"a": second_of(0.3, 6 * 1000)}, reports)
    assert share_of(found, is_estimate=True) == pytest.approx(0.3)


@pytest.mark.parametrize(
    "reports",
    [
        {},
        {"a": ModelReport(parameters=1000, counts_tokens=False, device="a CPU")},
        {"a": ModelReport(parameters=0, counts_tokens=True, device="a CPU")},
    ],
    ids=["not reported", "tokens are not counted", "no parameters"],
)
def test_what_is_not_known_has_none(reports: dict[str, ModelReport]) -> None:
    flops = ModelFlops(job(SCRIPT), topology())
    assert flops.mfu({"a": Done(100.0, 1.0)}, reports) is None
    assert flops.mfu({"a": Done(100.0, 1.0), "b": Done(100.0, 1.0)}, {"a": COUNTED}) is None


@pytest.mark.parametrize("done", [{}, {"a": Done(0.0, 1.0)}, {"a": Done(1.0, 0.0)}])
def test_no_steps_or_no_time_have_none(done: dict[str, Done]) -> None:
    assert ModelFlops(job(), topology()).mfu(done, {}) is None


H100, L40S = catalogue()["h100-sxm"].accelerator, catalogue()["l40s"].accelerator
CPU = catalogue()["cpu"].accelerator
OWN = Accelerator(name="chip", peak_flops_per_s={"bf16": 1e12}, memory_bytes=1, mfu=0.5)
UNKNOWN = Accelerator(name="unknown", peak_flops_per_s={}, memory_bytes=0, mfu=0.0)


@pytest.mark.parametrize(
    ("named", "device", "peak_flops_per_s"),
    [
        (H100, "", 989.4e12),
        (H100, "NVIDIA H100 80GB HBM3", 989.4e12),
        (H100, "NVIDIA L40S", 362e12),
        (H100, "NVIDIA H200 NVL", None),
        (H100, "a CPU", None),
        (L40S, "NVIDIA H100 PCIe", 756e12),
        (OWN, "NVIDIA H100 PCIe", 1e12),
        (CPU, "a CPU", None),
        (CPU, "NVIDIA H100 PCIe", 756e12),
        (CPU, "Some Card", None),
        (UNKNOWN, "NVIDIA H100 PCIe", None),
    ],
)
def test_the_peak_is_that_of_what_ranks_compute_on(
    named: Accelerator, device: str, peak_flops_per_s: float | None
) -> None:
    flops = ModelFlops(job(), on(named))
    found = flops.mfu({"a": Done(1e12 / FLOPS_PER_TOKEN, 1.0)}, {"a": ModelReport(device=device)})
    if peak_flops_per_s is None:
        assert found is None
    else:
        assert share_of(found) == pytest.approx(1e12 / peak_flops_per_s)


def test_where_compute_is_modelled_it_is_that_of_the_topology() -> None:
    modelled = replace(job(), trainer=replace(job().trainer, compute="modelled"))
    flops = ModelFlops(modelled, on(H100))
    done = {"a": Done(0.4 * 989.4e12 / FLOPS_PER_TOKEN, 1.0)}
    assert share_of(flops.mfu(done, {"a": ModelReport(device="a CPU")})) == pytest.approx(0.4)


def test_devices_are_of_the_catalogue_and_pass_for_what_they_are() -> None:
    for device, name in OWN_NAMES.items():
        assert name in catalogue()
        assert DEVICES[name].casefold() in device.casefold()


# ---------------------------------------------------------------- as a run measures it


def test_a_run_has_them_of_sites_of_its_latest_step_and_of_itself() -> None:
    record = RunRecord("run", ("a", "b"), ModelFlops(job(SCRIPT), topology()))
    measured = record.measured
    step = {metrics.STEP_S: 2.0, metrics.SITE_TOKENS: 0.4 * PEAK_FLOPS_PER_S / 6000}
    for site in ("a", "b"):
        measured.add(site, metrics.STEP, 1, step, {})
    assert measured.mfu() is None
    assert metrics.MFU_ESTIMATE not in measured.totals()
    values = {metrics.PARAMETERS: 1000.0, metrics.COUNTS_TOKENS: 1.0}
    for site in ("a", "b"):
        measured.add(site, metrics.MODEL, 1, values, {metrics.DEVICE: "a CPU"})
    measured.add("b", metrics.STEP, 2, {**step, metrics.STEP_S: 1.0}, {})
    assert measured.totals()[metrics.MFU_ESTIMATE] == pytest.approx(3 * 0.4 / 5)
    latest = {name: each["latest"] for name, each in measured.progress()["sites"].items()}
    assert latest["a"][metrics.MFU_ESTIMATE] == pytest.approx(0.2)
    assert latest["b"][metrics.MFU_ESTIMATE] == pytest.approx(0.4)
    summary = summarise(record, active_s=5.0, verified_steps=0)
    assert summary[metrics.MFU] is None
    assert summary[metrics.MFU_ESTIMATE] == pytest.approx(3 * 0.4 / 5)
    assert [site[metrics.MFU_ESTIMATE] for site in summary["sites"]] == pytest.approx(
        [0.2, 2 * 0.4 / 3]
    )


@pytest.mark.parametrize("parameters", [float("nan"), float("inf"), -1.0])
def test_what_a_script_calls_a_model_is_not_believed(parameters: float) -> None:
    measured = RunMetrics(("a",), ModelFlops(job(SCRIPT), alone()))
    measured.add("a", metrics.STEP, 1, {metrics.STEP_S: 1.0, metrics.SITE_TOKENS: 10.0}, {})
    values = {metrics.PARAMETERS: parameters, metrics.COUNTS_TOKENS: 1.0}
    measured.add("a", metrics.MODEL, 1, values, {})
    assert measured.mfu() is None


# ---------------------------------------------------------------- as the step model plans it


def test_a_planned_one_is_below_what_a_pass_reaches() -> None:
    found = planned_mfu(job(), topology())
    assert list(found) == ["a", "b"]
    for each in found.values():  # the topology says that a pass reaches 0.3; the exchange adds
        assert 0.0 < each < 0.3


def test_a_site_alone_and_an_unknown_script_have_no_planned_one() -> None:
    assert planned_mfu(job(), alone()) == {}
    assert planned_mfu(job(SCRIPT), topology()) == {}
    assert planned_mfu(job(SCRIPT, flops_per_token=5000.0), topology()) == {}
