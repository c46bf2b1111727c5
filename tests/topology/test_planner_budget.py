"""What egress may cost: what is over it is left out, and if nothing is within it, that is said."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from isthmus.topology.documents.load import load_job
from isthmus.topology.planner.choice import over_budget, rank_of
from isthmus.topology.planner.plan import make_plan
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.world import Topology
from tests.fakes.plannable import a_job, a_world
from tests.fakes.ranks import JOB as JOB_TEXT

DAY_S = 86_400.0
LINKS = [(0, 1, 1e7, 0.001), (0, 2, 1e7, 0.001), (1, 2, 1e7, 0.001)]
WORLD = a_world([4e7, 4e7, 4e7], LINKS, egress=1e-7)
"""A byte is dear, so a plan's egress is hundreds of dollars a day."""


def planned(world: Topology = WORLD, **wishes: Any) -> dict[str, Any]:  # noqa: ANN401 - of `plan`
    return make_plan(a_job(**{"codecs": ("fp32", "int8"), "sites": "all", **wishes}), world)


def usd_per_s(plan: dict[str, Any]) -> float:
    predicted = plan["predicted"]
    return float(predicted["egress_usd_per_step"] / predicted["step_s"])


def test_what_is_within_comes_before_what_is_over() -> None:
    assert over_budget(10.0, 2.0, None) == 1.0
    assert over_budget(10.0, 2.0, 5.0) == 1.0
    assert over_budget(10.0, 2.0, 2.5) == 2.0
    slow, fast = rank_of("throughput", 100.0, 1.0), rank_of("throughput", 1.0, 1.0, over=1.01)
    assert slow < fast < rank_of("throughput", 0.1, 1.0, over=1.02)
    assert len(rank_of("cost", 1.0, 2.0, 3.0)) == len(rank_of("cost", 1.0, 2.0, 3.0, over=2.0))


def test_a_plan_keeps_to_the_budget_and_says_what_it_left_out() -> None:
    """Of two codecs as fast, the more exact one is dearer."""
    free = planned()
    assert free["decisions"]["exchange"]["codec"] == "fp32"
    plan = planned(budget_usd_per_s=0.6 * usd_per_s(free))
    assert plan["decisions"]["exchange"]["codec"] == "int8"
    assert usd_per_s(plan) <= 0.6 * usd_per_s(free)
    [said] = [each for each in plan["why"] if "plan.budget" in each]
    assert f"plan.budget permits {0.6 * usd_per_s(free) * DAY_S:.4g} USD a day" in said
    assert "codec fp32 (over budget)" in [each["what"] for each in plan["alternatives"]]
    assert not [each for each in free["why"] if "plan.budget" in each]


def test_a_budget_that_nothing_exceeds_changes_nothing() -> None:
    free = planned()
    plan = planned(budget_usd_per_s=2 * usd_per_s(free))
    assert plan["decisions"] == free["decisions"]


def test_sites_may_be_left_out_for_it() -> None:
    free = planned(sites="auto")
    assert len(free["decisions"]["placement"]) == 3
    plan = planned(sites="auto", codecs=("fp32",), budget_usd_per_s=1e-9)
    assert len(plan["decisions"]["placement"]) == 1
    [said] = [each for each in plan["why"] if "plan.budget" in each]
    assert "Egress costs 0 USD a day" in said
    assert "all sites" in said


def test_longer_rounds_are_within_it() -> None:
    limit = 0.05 * usd_per_s(planned(codecs=("int8",)))
    with pytest.raises(ConfigError):
        planned(codecs=("int8",), budget_usd_per_s=limit)
    plan = planned(codecs=("int8",), budget_usd_per_s=limit, max_sync_period=500)
    assert plan["decisions"]["regime"]["sync_every"] > 10
    assert usd_per_s(plan) <= limit


def test_where_nothing_is_within_it_the_cheapest_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        planned(budget_usd_per_s=1.0 / DAY_S)
    [problem] = caught.value.problems
    assert problem.path == "plan.budget"
    for words in ("within 1 USD a day", "int8, costs", "plan.codecs", "plan.max_sync_period"):
        assert words in problem.message


def test_without_prices_a_budget_is_refused() -> None:
    free = tuple(dataclasses.replace(each, egress_usd_per_byte=0.0) for each in WORLD.links)
    with pytest.raises(ConfigError, match="no link of the topology has a price"):
        planned(dataclasses.replace(WORLD, links=free), budget_usd_per_s=1.0)


@pytest.mark.parametrize(
    ("written", "usd_a_day"), [("200USD/day", 200.0), ("1.5USD/h", 36.0), ("600USD/month", 20.0)]
)
def test_it_is_written_with_its_unit(written: str, usd_a_day: float) -> None:
    job = load_job(JOB_TEXT, "job.yaml", [f"plan={{budget: {written}}}"])
    assert job.plan is not None
    assert job.plan.budget_usd_per_s == pytest.approx(usd_a_day / DAY_S)


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("200", "without a unit"),
        ("200USD", "unknown unit"),
        ("200$/day", "did you mean"),
        ("0USD/day", "must be more than 0"),
    ],
)
def test_mistakes_are_named_with_their_cure(written: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_job(JOB_TEXT, "job.yaml", [f"plan={{budget: {written}}}"])
    [problem] = caught.value.problems
    assert problem.path == "plan.budget"
    assert words in problem.message
