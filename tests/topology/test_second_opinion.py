"""What the simulator says of plans: a warning where formulas say something else."""

from __future__ import annotations

import dataclasses
import random

import pytest

from tests.fakes.plannable import a_job, a_job_of_one_size, a_random_world, a_world
from topology.job import LinkCodec
from topology.planner.plan import make_plan
from topology.planner.search import Search
from topology.planner.second_opinion import DOUBTFUL, simulated_otherwise, simulated_s

PATH = [(0, 1, 2e6, 0.02), (1, 2, 1e6, 0.03), (2, 3, 3e6, 0.01), (3, 4, 2e6, 0.04)]


def test_of_a_star_both_say_the_same() -> None:
    job, topology = a_job_of_one_size(8, sites="all"), a_world([2e8] * 3, PATH[:2])
    choice = Search(job, topology).best()
    assert choice is not None
    step_s = simulated_s(job, topology, choice)
    assert step_s == pytest.approx(choice.step_s, rel=DOUBTFUL)
    assert simulated_otherwise(job, topology, choice) == []


def test_another_step_is_a_warning_of_the_plan() -> None:
    job, topology = a_job_of_one_size(8, sites="all"), a_world([2e8] * 3, PATH[:2])
    choice = Search(job, topology).best()
    assert choice is not None
    flattered = dataclasses.replace(choice, step_s=choice.step_s / 1.2)
    [told] = simulated_otherwise(job, topology, flattered)
    assert told.startswith("simulated chunk by chunk, a step takes ")
    assert "+20" in told
    assert not [each for each in make_plan(job, topology)["warnings"] if "simulated" in each]


def test_what_would_take_long_is_not_simulated() -> None:
    job, topology = a_job_of_one_size(8, sites="all"), a_world([2e8] * 2, PATH[:1])
    choice = Search(job, topology).best()
    assert choice is not None
    small = dataclasses.replace(choice.sizing, chunk_bytes=64)
    assert simulated_s(job, topology, dataclasses.replace(choice, sizing=small)) is None
    alone = Search(job, topology).best_of(["s0"])
    assert alone is not None
    assert simulated_s(job, topology, alone) is None


@pytest.mark.slow
@pytest.mark.parametrize("codecs", [("fp32", "int8"), ("int8", "fp32")])
@pytest.mark.parametrize("objective", ["throughput", "cost"])
def test_five_sites_in_a_line_have_a_plan(codecs: tuple[str, ...], objective: str) -> None:
    """No star, no ring, no gather: a single tree is all that there is."""
    topology = a_world([2e8] * 5, PATH, price=1.0)
    job = a_job_of_one_size(8, codecs=codecs, sites="all", objective=objective)
    search = Search(job, topology)
    choice, guess = search.best(), search.estimate(f"s{site}" for site in range(5))
    assert choice is not None
    assert guess is not None
    [tree] = choice.way.plan.trees
    assert len(tree.parent) == 4
    assert choice.coding.codec == "int8"
    assert guess.rank >= choice.rank


def test_what_a_site_is_worth_is_planned_with_permitted_codecs() -> None:
    topology = a_random_world(random.Random(1), 3)
    job = a_job(8, codecs=("fp32",), sites="all")
    exchange = dataclasses.replace(
        job.exchange, codecs=(LinkCodec(between=("s0", "s1"), codec="int8"),)
    )
    search = Search(dataclasses.replace(job, exchange=exchange), topology)
    choice = search.best()
    assert choice is not None
    like = search.like(choice, topology)
    assert like.codecs == ("fp32",)
