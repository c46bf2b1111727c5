"""Ranks of a site that do not move: what its gateways say of them, and what they are doing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from protos.control.v1.control_pb2 import AbsentRank, Stall
from sites.agent.rank_stacks import look_at

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
        looked = [
            await asyncio.to_thread(self._look, each)
            for said in list(self._said.values())
            for each in said["absent"]
        ]
        stall = Stall(absent=looked, waiting=any(said["waiting"] for said in self._said.values()))
        if stall != self._told:
            self._told = stall
            told = Stall()
            told.CopyFrom(stall)
            self._put(told)

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
