"""The interface between a site's agent and one of its nodes.

`supervisor.py` implements it in this process; `sites/agent/remote_node.py` uses a supervisor on
another machine, over a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from isthmus.protos.failure import Failure
from isthmus.sites.gateway.agent_port import Address, Command, Report
from isthmus.sites.node.log_files import Lines
from isthmus.sites.node.rank_stacks import RankStack


@dataclass(frozen=True, slots=True)
class Listener:
    """Callbacks for messages and failures of a node's processes."""

    on_said: Callable[[int, Report], None]
    """Called with a gateway's number at the site and its message to the agent; -1: the node's own.

    Raises ValueError if the message is not valid.
    """
    on_failed: Callable[[Failure], None]


class Node(Protocol):
    """One node of a site. `end` must always be called.

    Calls raise SiteError if they fail.
    """

    async def start_gateways(self) -> Sequence[Address]:
        """Start the node's gateways and return their addresses for other sites."""

    def tell_gateways(self, message: Command) -> None:
        """Send one command to each gateway."""

    async def wait_connected(self) -> None:
        """Wait until all gateways have reached the peers that they need."""

    async def wait_probed(self) -> None:
        """Wait until the node's gateways, and their peers, have measured all links."""

    async def wait_joined(self) -> None:
        """Wait until all of the node's ranks have joined, however long their script needs."""

    async def run_ranks(self, endpoint: str) -> None:
        """Start torchrun and wait until it ends, well or not; `endpoint` is node 0's."""

    async def leave(self) -> None:
        """Have the gateways leave after the ranks, and wait until they have ended."""

    async def look(self, rank: int, *, only_stopped: bool) -> RankStack | None:
        """Return a rank's stack; None if `only_stopped` and the rank is not stopped."""

    async def read_logs(self, budget_bytes: int) -> tuple[Lines, int]:
        """Return new lines and their size in bytes, at most the budget.

        The caller has shipped all earlier lines.
        """

    async def read_log_ends(self, first: Sequence[str]) -> Lines:
        """Return the end of every source, `first` those that matter most."""

    async def end(self, grace_s: float) -> bool:
        """End ranks, then gateways; `grace_s` is the time between SIGTERM and SIGKILL.

        False: a process cannot be ended. Logs can still be read.
        """

    async def close(self) -> None:
        """Release the node, which has ended; its log ends can still be read."""
