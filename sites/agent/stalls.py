"""Reports ranks of a site that do not move: merges gateways' reports, and inspects the ranks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict

from isthmus.protos.control.v1.control_pb2 import AbsentRank, Stall
from isthmus.sites.gateway.agent_port import Stalled, Still
from isthmus.sites.node.rank_stacks import RankStack

_DOING_CHARS = 400
_ENDED = "its script has ended, and others of its site are in a later round"

Look = Callable[[int, bool], Awaitable[RankStack | None]]
"""Returns a rank's stack. With the flag: only if the rank is stopped, else None."""


class Stalls:
    """Merges the stall reports of a site's gateways, and inspects each absent rank."""

    def __init__(self, look: Look, put: Callable[[Stall], None]) -> None:
        """`put` takes reports to the coordinator, and adds the run's name."""
        self._look = look
        self._put = put
        self._said: dict[int, Stalled] = {}
        self._reported = Stall()
        self._left: dict[int, tuple[int, float]] = {}
        """By finished rank: the gateway's latest round at that time, and when the rank left."""

    def note_left(self, rank: int, last_round: int) -> None:
        """Note a finished rank: others that wait for it wait in vain."""
        self._left[rank] = last_round, time.monotonic()

    async def take(self, gateway: int, message: Stalled) -> None:
        """Take a gateway's report, which replaces its previous one."""
        self._said[gateway] = message
        said = list(self._said.values())
        away = [(each, False) for one in said for each in one.absent]
        # Ranks that wait and are not absent make progress, unless they were stopped.
        named = {each.rank for each, _ in away}
        waiting = [(each, True) for one in said for each in one.waiting if each.rank not in named]
        looked = await asyncio.gather(
            *(self._absent(each, only_stopped) for each, only_stopped in [*away, *waiting])
        )
        stall = Stall(
            absent=[*(each for each in looked if each is not None), *self._ended(said)],
            waiting=any(said.waiting for said in self._said.values()),
            behind=any(said.behind for said in self._said.values()),
        )
        if stall != self._reported:
            self._reported = stall
            told = Stall()
            told.CopyFrom(stall)
            self._put(told)

    def _ended(self, said: Sequence[Stalled]) -> list[AbsentRank]:
        """Return finished ranks for which others of their site wait.

        The others' bucket does not reach a gateway before all ranks have added it up.
        """
        waiting = {each.rank for one in said for each in one.waiting}
        rounds = [each.round for one in said for each in one.absent if each.rank in waiting]
        now_s = time.monotonic()
        return [
            AbsentRank(rank=rank, for_s=now_s - left_s, round=last_round, doing=_ENDED)
            for rank, (last_round, left_s) in self._left.items()
            if any(round_ > last_round for round_ in rounds)
        ]

    async def _absent(self, said: Still, only_stopped: bool) -> AbsentRank | None:
        stack = await self._look(said.rank, only_stopped)
        if stack is None:
            return None
        return AbsentRank(
            **asdict(said),
            stopped=stack.is_stopped,
            in_collective=stack.is_in_collective,
            doing=stack.doing[:_DOING_CHARS],
            stack_path=stack.path,
        )
