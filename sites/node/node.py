"""What a site's agent asks of each of its nodes, and hears from it.

`supervisor.py` does it in this process; `sites/agent/remote_node.py` has a supervisor on another
machine do it, over a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from isthmus.protos.control.v1.control_pb2 import GatewayEndpoint
from isthmus.protos.failure import Failure
from isthmus.sites.node.log_files import Lines
from isthmus.sites.node.rank_stacks import RankStack


@dataclass(frozen=True, slots=True)
class Listener:
    """Who is told what a node's processes say, as it happens."""

    on_said: Callable[[int, Mapping[str, Any]], None]
    """A gateway, by its number at the site, says something to the agent.

    Raises KeyError, TypeError or ValueError where it makes no sense.
    """
    on_failed: Callable[[Failure], None]


class Node(Protocol):
    """One node. `end` must be called, whatever happened before.

    Whatever a call cannot do, it raises as SiteError.
    """

    async def start_gateways(self) -> list[GatewayEndpoint]:
        """Start the node's gateways and return where they listen, for others to dial."""

    def tell_gateways(self, message: Mapping[str, Any]) -> None:
        """Write one line to each of them."""

    async def wait_connected(self) -> None:
        """Return once all have reached the gateways that they need."""

    async def wait_probed(self) -> None:
        """Return once all have measured their links, and others have that meet here."""

    async def wait_joined(self) -> None:
        """Return once all of the node's ranks have joined: as long as a script needs."""

    async def run_ranks(self, endpoint: str) -> None:
        """Start torchrun and return when it has ended, well or not; `endpoint` is node 0's."""

    async def leave(self) -> None:
        """Have the gateways leave after the ranks have, and wait until they have gone."""

    async def look(self, rank: int, *, only_stopped: bool) -> RankStack | None:
        """Return what a rank is doing; None: it is not stopped, and only that was asked."""

    async def read_logs(self, budget_bytes: int) -> tuple[Lines, int]:
        """Return new lines, and how many bytes they were: at most the budget.

        Whoever asks has shipped what came before.
        """

    async def read_log_ends(self, first: Sequence[str]) -> Lines:
        """Return the end of every source, `first` those that matter most."""

    async def end(self, grace_s: float) -> bool:
        """End ranks, then gateways; `grace_s` lies between SIGTERM and SIGKILL.

        False: something cannot be ended. Logs can still be read.
        """

    async def close(self) -> None:
        """Let go of the node, which has ended; its log ends can still be read."""
