"""Ranks of a site that do not move: what its gateways say of them, and what they are doing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from protos.control.v1.control_pb2 import AbsentRank, Stall
from sites.agent.rank_stacks import is_stopped, look_at

_DOING_CHARS = 400


class Stalls:
    """Puts together what the gateways of a site say, and looks at each rank that does not come."""

    def __init__(self, run_folder: Path, put: Callable[[Stall], None]) -> None:
        """`put` takes what a coordinator is told, without the run's name."""
        self._run_folder = run_folder
        self._put = put
        self._said: dict[int, Mapping[str, Any]] = {}
        self._told = Stall()

    async def take(self, gateway: int, message: Mapping[str, Any]) -> None:
        """Take what a gateway says, which replaces what it said before."""
        self._said[gateway] = message
        looked = await asyncio.to_thread(self._look_at_all, list(self._said.values()))
        stall = Stall(absent=looked, waiting=any(said["waiting"] for said in self._said.values()))
        if stall != self._told:
            self._told = stall
            told = Stall()
            told.CopyFrom(stall)
            self._put(told)

    def _look_at_all(self, said: list[Mapping[str, Any]]) -> list[AbsentRank]:
        """Look at ranks that do not come, and at those that were stopped with something on hand."""
        away = [each for one in said for each in one["absent"]]
        stopped = [
            each
            for one in said
            for each in one["waiting"]
            if is_stopped(self._run_folder, each["rank"])
        ]
        return [self._look(each) for each in [*away, *stopped]]

    def _look(self, absent: Mapping[str, Any]) -> AbsentRank:
        found = look_at(self._run_folder, absent["rank"])
        return AbsentRank(
            rank=absent["rank"],
            for_s=absent["for_s"],
            round=absent["round"],
            stopped=found.is_stopped,
            in_collective=found.is_in_collective,
            doing=found.doing[:_DOING_CHARS],
            stack_path=str(found.path),
        )
