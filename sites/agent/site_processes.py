"""Every process of a run at this site, through its nodes: the agent's own machine is node 0."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from protos.control.v1.control_pb2 import GatewayEndpoint, Namespace
from sites.node.children import kill_descendants
from sites.node.node import Listener, Node
from sites.node.order import SiteOrder
from sites.node.rank_stacks import RankStack
from sites.node.supervisor import Supervisor

T = TypeVar("T")


class SiteProcesses:
    """Starts and ends a run's processes. `end` must be called, whatever happened before."""

    def __init__(
        self,
        order: SiteOrder,
        sockets: Path,
        bind_host: str | None,
        namespace: Namespace | None,
        listener: Listener,
        tasks: asyncio.TaskGroup,
    ) -> None:
        """Gateways bind `bind_host`, or else as the topology says; in a `namespace`, its address.

        `tasks` owns the tasks that listen to the processes and tell `listener`; they end with
        those.
        """
        self._order = order
        self._own = [
            Supervisor(order, node, sockets, bind_host, namespace, listener, tasks)
            for node in range(order.site.nodes)
        ]
        self.nodes: list[Node] = [*self._own]
        self._tasks = tasks
        self._held = ExitStack()

    @property
    def children(self) -> list[asyncio.subprocess.Process]:
        """Every process that was started here; theirs are below them."""
        return [process for node in self._own for process in node.children]

    async def start_gateways(self) -> list[GatewayEndpoint]:
        """Start the gateways of all nodes and return where they listen, for others to dial.

        Raises:
            SiteError: one does not listen in time.
        """
        started = await _all(node.start_gateways() for node in self.nodes)
        return [endpoint for of_node in started for endpoint in of_node]

    async def connect(self, endpoints: Sequence[GatewayEndpoint]) -> None:
        """Have all gateways dial the other sites' and wait until Hello was answered.

        Raises:
            SiteError: it was not in time.
        """
        self.tell_addresses(endpoints)
        await _all(node.wait_connected() for node in self.nodes)

    def tell_addresses(self, endpoints: Sequence[GatewayEndpoint]) -> None:
        """Tell all gateways where the other sites' are."""
        own = self._order.site.name
        peers = [each for each in endpoints if each.site != own]
        addresses = [
            {"site": peer.site, "gateway": peer.gateway, "host": peer.host, "port": peer.port}
            for peer in peers
        ]
        sites = sorted({peer.site for peer in peers})
        self.tell_gateways({"op": "connect", "peers": addresses, "sites": sites})

    def tell_gateways(self, message: Mapping[str, Any]) -> None:
        """Write one line to each gateway."""
        for node in self.nodes:
            node.tell_gateways(message)

    async def run_ranks(self) -> None:
        """Start torchrun on each node and return when all of them have ended, well or not."""
        port = self._held.enter_context(reserved_port("127.0.0.1"))
        await _all(node.run_ranks(f"127.0.0.1:{port}") for node in self.nodes)

    async def wait_probed(self) -> None:
        """Wait until the gateways have measured their links, and all others have that meet here."""
        await _all(node.wait_probed() for node in self.nodes)

    async def wait_joined(self) -> None:
        """Wait until all ranks of the site have joined: as long as a script needs."""
        await _all(node.wait_joined() for node in self.nodes)

    async def look(self, rank: int, only_stopped: bool) -> RankStack | None:
        """Return what a rank is doing; None: it is not stopped, and only that was asked."""
        node = self.nodes[rank // self._order.site.accelerators_per_node]
        return await node.look(rank, only_stopped=only_stopped)

    async def leave(self) -> None:
        """Have the gateways leave after the ranks have, and wait until they have gone.

        Raises:
            SiteError: one did not go in time.
        """
        await _all(node.leave() for node in self.nodes)

    async def end(self, grace_s: float) -> bool:
        """End everything: ranks, then gateways, then whatever is left. False if something stays.

        `grace_s` lies between SIGTERM and SIGKILL.
        """
        ended = await asyncio.gather(*(node.end(grace_s) for node in self.nodes))
        await asyncio.gather(*(node.close() for node in self.nodes))
        all_gone = await kill_descendants(self.children)
        self._held.close()
        return all_gone and all(ended)


async def _all(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return what all of them return; once one fails, none of them goes on."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@contextmanager
def reserved_port(host: str) -> Iterator[int]:
    """Give a free TCP port that nobody else is given until the block ends.

    The socket is bound and never listens, so that a server with SO_REUSEADDR, as torch's store is,
    may take the port, while the system gives it to no one who asks for any.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        yield holder.getsockname()[1]
