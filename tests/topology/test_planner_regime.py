"""Regimes that a plan decides: by their steps, and by the loss that they are expected to cost."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from isthmus.topology.cost.local_sgd import local_round, regime_step_s
from isthmus.topology.documents.load import load_job
from isthmus.topology.documents.run_decisions import rungs_of
from isthmus.topology.planner.document import PlanFile, plan_text
from isthmus.topology.planner.plan import make_plan
from isthmus.topology.planner.regime import rounds
from isthmus.topology.spec.hashing import plan_hashes
from isthmus.topology.spec.job import Job, Placed
from isthmus.topology.spec.loss_gaps import loss_gap
from isthmus.topology.spec.plan_wishes import PlanWishes, Replan
from isthmus.topology.spec.regime import Regime, regime_of
from isthmus.topology.text.yaml_document import read_with_overrides
from tests.fakes.plannable import a_job, a_world
from tests.fakes.ranks import JOB as JOB_TEXT


@pytest.mark.parametrize("most", [2, 3, 7, 8, 30, 500])
def test_rounds_are_permitted_and_long_enough(most: int) -> None:
    found = rounds(1.0, 10.0, most)
    assert [each.kind for each in found] == ["diloco", "streaming"]
    for each in found:
        assert each.sync_every <= most
        assert each.delay < each.sync_every // each.fragments
        fragment_s = 10.0 / each.fragments
        timed = local_round(each.sync_every, 1.0, fragment_s, each.fragments, each.delay)
        assert timed.utilisation >= 0.95 or each.sync_every + each.fragments > most


def test_steps_of_a_regime_are_those_of_its_rounds() -> None:
    delayed = regime_of("delayed")
    assert regime_step_s(delayed, 1.0, 0.9) == 1.0
    assert regime_step_s(delayed, 1.0, 1.5) == 1.5
    assert regime_step_s(regime_of("diloco", sync_every=30), 1.0, 3.0) == pytest.approx(1.1)
    streaming = regime_of("streaming", sync_every=30, fragments=6, delay=2)
    assert regime_step_s(streaming, 1.0, 12.0) == 1.0
    assert regime_step_s(streaming, 1.0, 18.0) == pytest.approx(1.0 + 6 / 30)


def test_expected_gaps_are_the_published_ones() -> None:
    """Scaling Laws for DiLoCo, table 4; Streaming DiLoCo, table 5, for longer rounds."""
    diloco = regime_of("diloco", sync_every=30)
    assert loss_gap(Regime(), 1e9, 8) == 0.0
    for parameters, sites, gap in [
        (35e6, 2, 0.007), (35e6, 8, 0.039), (1.3e9, 4, 0.005), (2.4e9, 8, 0.011),
        (1e12, 2, 0.0),
    ]:  # fmt: skip
        assert loss_gap(diloco, parameters, sites) == pytest.approx(gap), (parameters, sites)
    assert loss_gap(diloco, 0.5e6, 2) == pytest.approx(0.017, abs=0.003), "as measured here"
    assert loss_gap(diloco, 35e6, 16) > 0.05, "each doubling costs as much"
    between = loss_gap(diloco, 180e6, 4)
    assert 0.009 < between < 0.015
    longer = regime_of("diloco", sync_every=100)
    assert loss_gap(longer, 35e6, 2) == pytest.approx(0.014, abs=0.001)
    assert loss_gap(regime_of("diloco", sync_every=10), 35e6, 2) == pytest.approx(0.007)
    assert loss_gap(regime_of("delayed"), 1e9, 2) < loss_gap(
        regime_of("delayed", look=False), 1e9, 2
    )


def test_a_plan_knows_rounds_that_wait_for_nobody() -> None:
    """Where a placement has one site compute for twice as long, others wait for it or do not."""
    world = a_world([4e7, 2e7], [(0, 1, 1e8, 0.001)])
    placement = tuple(Placed(site=each.name, sequences=6) for each in world.sites)
    job = dataclasses.replace(a_job(), placement=placement)
    job = dataclasses.replace(job, trainer=dataclasses.replace(job.trainer, global_batch=12))
    step_s = [
        make_plan(dataclasses.replace(job, regime=regime), world)["predicted"]["step_s"]
        for regime in (
            regime_of("diloco", sync_every=30),
            regime_of("diloco", sync_every=30, min_steps=5),
        )
    ]
    assert step_s[1] == pytest.approx(step_s[0] * 2 / 3, rel=0.02), (
        "of 3 speeds' worth, 3 and not 2"
    )


LINKS = [(0, 1, 2e5, 0.02), (0, 2, 1e4, 0.15), (1, 2, 1e4, 0.15)]
WORLD = a_world([4e7, 2e7, 2e7], LINKS, price=2.0, egress=1e-10)
"""In sync, the third site is left out."""


def planned(**wishes: Any) -> dict[str, Any]:  # noqa: ANN401 - of `plan`
    return make_plan(a_job(codecs=("fp32", "int8"), **wishes), WORLD)


@pytest.fixture(scope="module")
def sync() -> dict[str, Any]:
    return planned()


def test_longer_rounds_keep_a_site_that_sync_would_leave_out(sync: dict[str, Any]) -> None:
    assert [each["site"] for each in sync["decisions"]["placement"]] == ["s0", "s1"]
    plan = planned(max_sync_period=500)
    assert plan["decisions"]["regime"]["kind"] in ("diloco", "streaming")
    assert [each["site"] for each in plan["decisions"]["placement"]] == ["s0", "s1", "s2"]
    assert all(each["sequences"] for each in plan["sites"])
    predicted = plan["predicted"]
    assert predicted["step_s"] < sync["predicted"]["step_s"]
    assert all(each["step_s"] >= predicted["step_s"] for each in plan["alternatives"])
    assert predicted["efficiency"] <= 1.0
    assert predicted["tokens_per_s"] > sync["predicted"]["tokens_per_s"]


def test_longer_rounds_that_gain_nothing_are_not_taken() -> None:
    world = a_world([4e8, 4e8], [(0, 1, 1e10, 0.0)])
    plan = make_plan(a_job(max_sync_period=50), world)
    assert "regime" not in plan["decisions"]
    [told] = [each for each in plan["why"] if "stays sync" in each]
    assert "nothing that this permits is 2 % better; the best of them" in told


def test_a_decided_regime_is_an_override_of_the_job() -> None:
    plan = planned(max_sync_period=500)
    file = PlanFile(read_with_overrides(plan_text(plan), "plan.yaml", ()))
    [override] = [each for each in file.overrides() if each.startswith("regime=")]
    decided = load_job(JOB_TEXT, "job.yaml", [override]).regime
    assert decided.kind == plan["decisions"]["regime"]["kind"]
    assert decided.sync_every == plan["decisions"]["regime"]["sync_every"]


def test_the_loss_that_a_job_permits_limits_its_regime(sync: dict[str, Any]) -> None:
    """A model this small is expected to lose 0.7 % to rounds over two sites, 1.1 % to delays."""
    assert planned(max_sync_period=500, max_loss_gap=0.001)["decisions"] == sync["decisions"]
    delayed = planned(max_loss_gap=0.02)["decisions"]["regime"]
    assert delayed == {"kind": "delayed"}


def test_a_job_that_permits_nothing_else_is_planned_as_ever(sync: dict[str, Any]) -> None:
    assert "regime" not in sync["decisions"]
    assert not any("regime" in each for each in sync["why"])


def test_a_regime_that_the_job_says_is_what_its_plan_predicts(sync: dict[str, Any]) -> None:
    regime = regime_of("diloco", sync_every=100)
    job = dataclasses.replace(a_job(codecs=("fp32", "int8")), regime=regime)
    plan = make_plan(job, WORLD)
    assert "regime" not in plan["decisions"], "the job has it"
    exchange_s = plan["predicted"]["exchange_s"]
    compute_s = plan["predicted"]["compute_s"]
    assert plan["predicted"]["step_s"] == pytest.approx(compute_s + exchange_s / 100, rel=0.02)
    assert plan_hashes(job, WORLD) != plan_hashes(a_job(codecs=("fp32", "int8")), WORLD)


def test_a_regime_that_follows_the_links_begins_in_sync() -> None:
    plan = planned(max_sync_period=500, replan=Replan(regime="follow"))
    assert "regime" not in plan["decisions"]
    (said,) = [each for each in plan["why"] if "The run may go over to" in each]
    assert "delayed: a gradient counts one step later" in said
    assert "diloco: rounds of 30 steps" in said
    kept = planned(max_loss_gap=0.001, replan=Replan(regime="follow"))
    assert "The regime stays sync: plan.max_loss_gap permits no other." in kept["why"]


@pytest.mark.parametrize(
    ("wishes", "kinds"),
    [
        ({}, ["delayed"]),
        ({"max_sync_period": 500}, ["delayed", "diloco"]),
        ({"max_sync_period": 500, "max_loss_gap": 0.01}, ["diloco"]),
        ({"max_sync_period": 1, "max_loss_gap": 0.001}, []),
    ],
)
def test_the_job_limits_how_far_a_regime_may_go(wishes: dict[str, Any], kinds: list[str]) -> None:
    plan = PlanWishes(replan=Replan(regime="follow"), **wishes)
    rungs = rungs_of(Job(name="j", topology="", entrypoint="train.py", plan=plan), 2)
    assert [each.kind for each in rungs] == kinds
    assert all(each.sync_every <= 30 for each in rungs)
    still = dataclasses.replace(plan, replan=Replan())
    assert rungs_of(Job(name="j", topology="", plan=still), 2) == ()
