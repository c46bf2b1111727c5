"""With how many connections a plan says that links begin, and what losses leave of them."""

from __future__ import annotations

import dataclasses
import re

import pytest

from isthmus.topology.planner.connections import first_connections, held_back
from isthmus.topology.planner.plan import make_plan
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.world import Link, Topology
from tests.fakes.plannable import a_job, a_world

WORLD = a_world([4e8, 4e8], [(0, 1, 1.25e8, 0.08)])


def changed(**changes: object) -> Topology:
    """Return the world with other links."""
    links = tuple(
        dataclasses.replace(link, **changes)  # type: ignore[arg-type] # by name
        for link in WORLD.links
    )
    return dataclasses.replace(WORLD, emulate=False, emulator="auto", links=links)


def of(topology: Topology, job: Job | None = None) -> tuple[int, str]:
    link: Link = topology.links[0]
    return first_connections(job or a_job(), topology, link)


@pytest.mark.parametrize(
    ("changes", "count", "because"),
    [
        ({"bytes_per_s": 1e6}, 1, "78.12KiB are on the way: two would crowd each other out"),
        ({"bytes_per_s": 1e7}, 2, "while one waits for a lost packet, the other carries on"),
        ({}, 4, "9.537MiB are on the way, and a send buffer holds 3MiB"),
        ({"max_flows": 3}, 3, "9.537MiB are on the way, and max_flows allows no more"),
        (
            {"loss": 1e-4},
            4,
            "with 0.01% lost, cubic carries .*bit/s a connection, so they become 42",
        ),
        ({"loss": 1e-4, "congestion": "bbr"}, 4, "send buffer holds 3MiB$"),
        ({"loss": 1e-9}, 4, "send buffer holds 3MiB$"),
    ],
)
def test_the_reason_stands_beside_the_number(
    changes: dict[str, object], count: int, because: str
) -> None:
    found, told = of(changed(**changes))
    assert found == count
    assert re.search(because, told), told


def test_a_number_of_the_jobs_is_that_number() -> None:
    job = a_job()
    named = dataclasses.replace(
        job, exchange=dataclasses.replace(job.exchange, channels_per_link=7)
    )
    assert of(WORLD, named) == (7, "exchange.channels_per_link")


@pytest.mark.slow
def test_losses_that_leave_less_than_the_plan_counts_on_are_warned_of() -> None:
    there, back = held_back(changed(loss=0.01))
    assert there.startswith("s0 → s1: with 1% of packets lost, 64 connections of cubic carry ")
    assert "of 1Gbit/s, and the plan counts on all of it" in there
    assert back.startswith("s1 → s0")
    assert not held_back(changed(loss=0.01, congestion="bbr2"))
    assert not held_back(changed())
    assert there in make_plan(a_job(), changed(loss=0.01))["warnings"]


@pytest.mark.slow
def test_a_plan_has_them_for_each_link_and_none_where_nothing_crosses() -> None:
    links = [(0, 1, 1e7, 0.08), (0, 2, 1e7, 0.08), (1, 2, 1e4, 0.3)]
    plan = make_plan(a_job(12, sites="all"), a_world([4e8] * 3, links))
    by_pair = {tuple(each["between"]): each for each in plan["links"]}
    assert by_pair["s0", "s1"]["connections"] == 2
    assert by_pair["s0", "s1"]["codecs"] == ["fp32"]
    idle = by_pair["s1", "s2"]
    assert (idle["connections"], idle["connections_because"]) == (0, "nothing crosses")
    assert idle["codecs"] == []
