"""Ranks that do not move, as an agent tells of them."""

from __future__ import annotations

import asyncio
from typing import Any

from isthmus.protos.control.v1.control_pb2 import Stall
from isthmus.sites.agent.stalls import Stalls
from isthmus.sites.node.rank_stacks import RankStack


def told_of(*said: dict[str, Any], left: dict[int, int]) -> Stall:
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


def late(rank: int, round_: int) -> dict[str, Any]:
    return {"rank": rank, "for_s": 16.0, "round": round_}


def test_a_rank_that_is_done_is_absent_where_others_of_its_site_wait_for_it() -> None:
    stall = told_of(
        {"absent": [late(0, 10)], "waiting": [late(0, 10)], "behind": False}, left={1: 9}
    )
    assert [(each.rank, each.round) for each in stall.absent] == [(0, 10), (1, 9)]
    ended = stall.absent[1]
    assert "its script has ended" in ended.doing
    assert not ended.in_collective, "so it is named, and who waits in a collective is not"


def test_so_is_one_of_another_gateway() -> None:
    nothing: dict[str, Any] = {"absent": [], "waiting": [], "behind": False}
    waits = {"absent": [late(0, 10)], "waiting": [late(0, 10)], "behind": False}
    stall = told_of(nothing, waits, left={2: 9, 3: 9})
    assert [each.rank for each in stall.absent] == [0, 2, 3]


def test_who_is_done_with_the_round_that_others_wait_in_is_not() -> None:
    stall = told_of({"absent": [late(0, 9)], "waiting": [late(0, 9)], "behind": False}, left={1: 9})
    assert [each.rank for each in stall.absent] == [0]


def test_where_all_has_come_to_the_gateway_others_wait_for_another_site() -> None:
    stall = told_of({"absent": [], "waiting": [late(0, 10)], "behind": False}, left={1: 9})
    assert list(stall.absent) == []
    assert stall.waiting


def test_nobody_waits_for_who_is_done_where_others_evaluate() -> None:
    stall = told_of({"absent": [late(0, 9)], "waiting": [], "behind": False}, left={1: 8})
    assert [each.rank for each in stall.absent] == [0]
