"""Manages all processes of a run at a site, through its nodes; node 0 is the agent's machine."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from isthmus.protos.carried_secrets import carried_secrets
from isthmus.protos.control.v1.control_pb2 import GatewayEndpoint, Prepare
from isthmus.protos.identities import GATEWAY
from isthmus.protos.versions import build
from isthmus.sites.agent.logs import OwnLines
from isthmus.sites.agent.node_launch import NodePlace, node_places
from isthmus.sites.agent.remote_node import RemoteNode
from isthmus.sites.gateway.agent_port import Address, Command, Connect
from isthmus.sites.node.carried import blobs_of
from isthmus.sites.node.children import kill_descendants
from isthmus.sites.node.node import Listener, Node
from isthmus.sites.node.order import SiteOrder
from isthmus.sites.node.rank_stacks import RankStack
from isthmus.sites.node.stream import NodeOrder
from isthmus.sites.node.supervisor import Supervisor

T = TypeVar("T")

LOOPBACK = "127.0.0.1"
SUPERVISOR_LOG = "supervisor.log"
"""File for a supervisor's stderr, in the node's folder on the agent's machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """An agent's folders, addresses, and way to start nodes."""

    site: str
    state: Path
    """The agent's folder."""
    sockets: Path
    """Folder for Unix sockets."""
    bind_host: str | None
    """Host that gateways of this machine bind instead of the topology's; None: the topology's."""
    launcher: str
    """How other nodes are started: one of isthmus.topology.spec.world.LAUNCHERS."""
    dialled: tuple[str, ...] = ()
    """host:port of each node where the agent dials them instead, its own first."""
    own_lines: OwnLines
    """The agent's own log lines."""


class SiteProcesses:
    """Starts and ends a run's processes at a site. `end` must always be called."""

    def __init__(
        self,
        order: SiteOrder,
        prepare: Prepare,
        place: Place,
        listener: Listener,
        tasks: asyncio.TaskGroup,
    ) -> None:
        """Start nothing yet.

        Args:
            order: The run.
            prepare: The coordinator's message, for other nodes.
            place: Where the agent works, and how it starts other nodes.
            listener: Receives the processes' messages.
            tasks: Owns the tasks that listen to the processes; they end with the processes.
        """
        self._order = order
        self._prepare = prepare
        self._place = place
        self._listener = listener
        self._tasks = tasks
        self._own: Supervisor | None = None
        self._others: list[RemoteNode] = []
        self._host = LOOPBACK
        self._resources = ExitStack()

    @property
    def nodes(self) -> list[Node]:
        """Nodes started so far; the agent's own machine is the first."""
        return [] if self._own is None else [self._own, *self._others]

    @property
    def children(self) -> list[asyncio.subprocess.Process]:
        """Direct child processes; theirs are below them."""
        own = [] if self._own is None else self._own.children
        return [*own, *(node.process for node in self._others)]

    async def start_gateways(self) -> Sequence[Address]:
        """Start the gateways of all nodes and return the addresses for other sites.

        Raises:
            SiteError: a gateway does not listen in time, or a node cannot be reached.
        """
        order = self._order
        places = await asyncio.to_thread(
            node_places, order.site, self._place.launcher, self._place.dialled
        )
        prepare = self._prepare
        self._host = places[0].host or LOOPBACK
        self._own = Supervisor(
            order,
            0,
            self._place.sockets,
            bind_host=self._place.bind_host or self._bound(places[0]),
            dialled_host=self._dialled_host(places[0]),
            inside_host=places[0].host,
            namespace=prepare.namespace if prepare.HasField("namespace") else None,
            listener=self._listener,
            tasks=self._tasks,
        )
        others = enumerate(places[1 : order.site.nodes], start=1)
        started = await _all(
            [self._own.start_gateways(), *(self._start_node(node, each) for node, each in others)]
        )
        self._others.sort(key=lambda node: node.index)
        return [endpoint for of_node in started for endpoint in of_node]

    async def _start_node(self, node: int, place: NodePlace) -> Sequence[Address]:
        """Start another node's supervisor, and have it start its gateways."""
        order, timeouts = self._order, self._order.spec.timeouts
        files: Mapping[str, bytes] = {}
        env = {name: value for name, value in os.environ.items() if name.startswith("ISTHMUS_")}
        if not place.shares_files:
            files, secrets = carried_secrets([f"{order.site.name}.{GATEWAY}"], "{folder}")
            env |= secrets
        binds_alike = place.host is None or self._place.dialled
        node_order = NodeOrder(
            site=order.site.name,
            node=node,
            prepare=self._prepare.SerializeToString(),
            state=str(self._place.state.resolve()),
            bind_host=self._place.bind_host if binds_alike else self._bound(place),
            dialled_host=self._dialled_host(place),
            inside_host=place.host,
            cwd=str(Path.cwd()),
            files=files,
            env=env,
            build=build(),
            lease_s=timeouts.lease_s,
            heartbeat_s=timeouts.heartbeat_s,
        )
        log_path = order.node_folder(node) / SUPERVISOR_LOG
        supervisor = await RemoteNode.start(
            node_order, place.command, self._listener, log_path, timeouts.start_s
        )
        self._others.append(supervisor)
        self._tasks.create_task(supervisor.read(), name=f"node{node}")
        if order.spec.is_carried_to(order.site.name):
            await supervisor.carry(blobs_of(self._place.state))
        return await supervisor.start_gateways()

    def _dialled_host(self, place: NodePlace) -> str | None:
        """Return the host that other sites dial; None: the site's in the topology."""
        return None if self._order.site.interfaces else place.dialled

    def _bound(self, place: NodePlace) -> str | None:
        """Return the host that a node's gateways bind; None: the site's in the topology."""
        return None if self._order.site.bind else self._dialled_host(place)

    async def connect(self, endpoints: Sequence[GatewayEndpoint]) -> None:
        """Have all gateways dial the other sites', and wait until Hello was answered.

        Raises:
            SiteError: Hello was not answered in time.
        """
        self.tell_addresses(endpoints)
        await _all(node.wait_connected() for node in self.nodes)

    def tell_addresses(self, endpoints: Sequence[GatewayEndpoint]) -> None:
        """Send the other sites' gateway addresses to all gateways."""
        own = self._order.site.name
        peers = [each for each in endpoints if each.site != own]
        sites = sorted({peer.site for peer in peers})
        self.tell_gateways(Connect(peers=tuple(map(Address.of, peers)), sites=tuple(sites)))

    def tell_gateways(self, message: Command) -> None:
        """Send one command to each gateway."""
        for node in self.nodes:
            node.tell_gateways(message)

    async def run_ranks(self) -> None:
        """Start torchrun on each node, and wait until all have ended, well or not."""
        port = self._resources.enter_context(reserved_port(self._host))
        host = f"[{self._host}]" if ":" in self._host else self._host
        await _all(node.run_ranks(f"{host}:{port}") for node in self.nodes)

    async def wait_probed(self) -> None:
        """Wait until the gateways, and their peers, have measured all links."""
        await _all(node.wait_probed() for node in self.nodes)

    async def wait_joined(self) -> None:
        """Wait until all ranks of the site have joined, however long their script needs."""
        await _all(node.wait_joined() for node in self.nodes)

    async def look(self, rank: int, only_stopped: bool) -> RankStack | None:
        """Return a rank's stack; None if `only_stopped` and the rank is not stopped."""
        node = self.nodes[rank // self._order.site.accelerators_per_node]
        return await node.look(rank, only_stopped=only_stopped)

    async def leave(self) -> None:
        """Have the gateways leave after the ranks, and wait until they have ended.

        Raises:
            SiteError: a gateway did not end in time.
        """
        await _all(node.leave() for node in self.nodes)

    async def end(self, grace_s: float) -> bool:
        """End ranks, then gateways, then the rest. False if a process cannot be ended.

        `grace_s` is the time between SIGTERM and SIGKILL.
        """
        ended = await asyncio.gather(*(node.end(grace_s) for node in self.nodes))
        await asyncio.gather(*(node.close() for node in self.nodes))
        all_gone = await kill_descendants(self.children)
        self._resources.close()
        return all_gone and all(ended)


async def _all(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run calls together and return their results; if one fails, cancel the others."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@contextmanager
def reserved_port(host: str) -> Iterator[int]:
    """Yield a free TCP port that is reserved until the block ends.

    The socket is bound and never listens. So a server with SO_REUSEADDR, such as torch's store, may
    take the port, but the system assigns it to no other process.
    """
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(address)
        yield int(holder.getsockname()[1])
