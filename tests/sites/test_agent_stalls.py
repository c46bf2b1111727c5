"""Ranks that do not move, as an agent tells of them."""

from __future__ import annotations

import asyncio

from isthmus.protos.control.v1.control_pb2 import Stall
from isthmus.sites.agent.stalls import Stalls
from isthmus.sites.gateway.agent_port import Stalled, Still
from isthmus.sites.node.rank_stacks import RankStack


def told_of(*said: Stalled, left: dict[int, int]) -> Stall:
    """Return what the coordinator hears after gateways have said this, one each."""
    found: list[Stall] = []

    async def look(rank: int, only_stopped: bool) -> RankStack | None:
        return None if only_stopped else RankStack(False, ("all_reduce (d.py:1)",), "/x")

    async def take() -> None:
        stalls = Stalls(look, found.append)
        for rank, last_round in left.items():
            stalls.note_left(rank, last_round)
        for gateway, each in enumerate(said):
            await stalls.take(gateway, each)

    asyncio.run(take())
    return found[-1]


def late(rank: int, round_: int) -> Still:
    return Still(rank=rank, for_s=16.0, round=round_)


def stalled(absent: tuple[Still, ...] = (), waiting: tuple[Still, ...] = ()) -> Stalled:
    return Stalled(absent=absent, waiting=waiting, behind=False)


def test_a_rank_that_is_done_is_absent_where_others_of_its_site_wait_for_it() -> None:
    stall = told_of(stalled((late(0, 10),), (late(0, 10),)), left={1: 9})
    assert [(each.rank, each.round) for each in stall.absent] == [(0, 10), (1, 9)]
    ended = stall.absent[1]
    assert "its script has ended" in ended.doing
    assert not ended.in_collective, "so it is named, and who waits in a collective is not"


def test_so_is_one_of_another_gateway() -> None:
    waits = stalled((late(0, 10),), (late(0, 10),))
    stall = told_of(stalled(), waits, left={2: 9, 3: 9})
    assert [each.rank for each in stall.absent] == [0, 2, 3]


def test_who_is_done_with_the_round_that_others_wait_in_is_not() -> None:
    stall = told_of(stalled((late(0, 9),), (late(0, 9),)), left={1: 9})
    assert [each.rank for each in stall.absent] == [0]


def test_where_all_has_come_to_the_gateway_others_wait_for_another_site() -> None:
    stall = told_of(stalled((), (late(0, 10),)), left={1: 9})
    assert list(stall.absent) == []
    assert stall.waiting


def test_nobody_waits_for_who_is_done_where_others_evaluate() -> None:
    stall = told_of(stalled((late(0, 9),)), left={1: 8})
    assert [each.rank for each in stall.absent] == [0]
