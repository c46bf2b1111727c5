"""Micro-batches that a plan decides: as large as memory permits."""

from __future__ import annotations

import dataclasses

import pytest

from isthmus.topology.documents.load import load_job
from isthmus.topology.model.step_model import StepModel
from isthmus.topology.planner.cuts import placed_timings
from isthmus.topology.planner.memory_fit import largest_micro_batch, rank_bytes
from isthmus.topology.planner.plan import make_plan
from isthmus.topology.planner.search import Search
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.world import Topology
from tests.fakes.plannable import a_job, a_world

LINKS = [(0, 1, 2e5, 0.02)]
JOB = a_job(18, micro_batch="auto", sites="all")
WORLD = a_world([4e7, 4e7], LINKS)


def with_room(world: Topology, *sequences: int) -> Topology:
    """Return sites whose accelerators have room for so many sequences at once."""
    sites = []
    for site, count in zip(world.sites, sequences, strict=True):
        room_bytes = int(rank_bytes(JOB, site, count)) + 1
        chip = dataclasses.replace(site.accelerator, memory_bytes=room_bytes)
        sites.append(dataclasses.replace(site, accelerator=chip))
    return dataclasses.replace(world, sites=tuple(sites))


def test_the_least_memory_decides() -> None:
    world = with_room(WORLD, 8, 3)
    most, site = largest_micro_batch(JOB, world)
    assert (most, site.name) == (3, "s1")
    assert largest_micro_batch(JOB, with_room(WORLD, 1, 1))[0] == 1
    assert largest_micro_batch(JOB, WORLD)[0] == 18


def test_a_whole_share_at_once_where_it_fits() -> None:
    plan = make_plan(JOB, WORLD)
    assert plan["decisions"]["micro_batch"] == 18
    [told] = [each for each in plan["why"] if "at once" in each]
    assert "sequences at once: each rank has room for its whole share" in told


def test_what_fits_is_taken_and_the_memory_that_decides_is_named() -> None:
    plan = make_plan(JOB, with_room(WORLD, 8, 4))
    assert plan["decisions"]["micro_batch"] == 4
    [told] = [each for each in plan["why"] if "at once" in each]
    assert told.startswith("A rank takes 4 sequences at once: the ")
    assert "of s1 have room for no more" in told


def test_no_number_that_fits_is_faster() -> None:
    world = with_room(WORLD, 8, 7)
    choice = Search(JOB, world).best()
    assert choice is not None
    for micro_batch in range(1, 8):
        other = dataclasses.replace(choice, micro_batch=micro_batch).job(JOB)
        step_s = StepModel(other, world, choice.candidate.plan).step_s(placed_timings(other, world))
        assert choice.modelled_s <= step_s * (1 + 1e-9), micro_batch


def test_the_trainers_own_is_kept_where_nobody_asks() -> None:
    plan = make_plan(a_job(18, sites="all"), WORLD)
    assert plan["decisions"]["micro_batch"] == 2
    assert not [each for each in plan["why"] if "at once" in each]


def test_a_script_of_ones_own_has_no_such_number() -> None:
    text = "version: 1\nname: j\ntopology: t.yaml\nentrypoint: t.py\nplan: {micro_batch: auto}\n"
    with pytest.raises(ConfigError, match="micro_batch: auto is the shipped trainer's"):
        load_job(text, "job.yaml")
