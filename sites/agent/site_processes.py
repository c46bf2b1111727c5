"""Every process of a run at this site: gateways and torchruns, one each a node."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from signal import SIGTERM
from typing import Any

from protos.control.v1.control_pb2 import GatewayEndpoint, Namespace
from protos.failure import Failure
from sites.agent.gateway import Gateway, gateway_config
from sites.agent.order import SiteOrder
from sites.agent.processes import kill_descendants, send, wait_ended
from sites.agent.site_failures import SiteError
from sites.agent.torchrun import TORCHRUN_LOG, Torchrun, rank_files, reserved_port
from topology.errors import ConfigError

LEAVE_S = 1.0
"""For gateways to leave once the ranks were stopped: nobody waits for what they still hold."""
_WILDCARDS = ("0.0.0.0", "::")  # noqa: S104 - compared with, not bound


@dataclass(frozen=True, slots=True)
class Listeners:
    """Who is told what the processes say."""

    on_metric: Callable[[Mapping[str, Any]], None]
    on_digest: Callable[[Mapping[str, Any]], None]
    on_plan: Callable[[Mapping[str, Any]], None]
    """What a gateway says of a switch of plans."""
    on_failed: Callable[[Failure], None]


class SiteProcesses:
    """Starts and ends them. `end` must be called, whatever happened before."""

    def __init__(
        self,
        order: SiteOrder,
        sockets: Path,
        bind_host: str | None,
        namespace: Namespace | None,
        listeners: Listeners,
        tasks: asyncio.TaskGroup,
    ) -> None:
        """Start nothing yet.

        Args:
            order: what to start.
            sockets: folder for the gateways' Unix sockets.
            bind_host: what gateways bind instead of the site's address.
            namespace: where gateways run instead, and bind its address; None: where this process
                does.
            listeners: told from `tasks`.
            tasks: owns the tasks that listen to the processes; they end with those.
        """
        self._order = order
        self._sockets = sockets
        self._namespaces = (namespace.user, namespace.net) if namespace else None
        # Not loopback, but nothing outside the emulated WAN reaches it.
        self._bind_host = namespace.address if namespace else bind_host
        self._listeners = listeners
        self._tasks = tasks
        self._gateways: list[Gateway] = []
        self._torchruns: list[Torchrun] = []
        self._held = ExitStack()

    @property
    def children(self) -> list[asyncio.subprocess.Process]:
        """Every process that was started here; theirs are below them."""
        started: list[Torchrun | Gateway] = [*self._torchruns, *self._gateways]
        return [each.process for each in started]

    async def start_gateways(self) -> list[GatewayEndpoint]:
        """Start a gateway a node and return where they listen, for others to dial.

        Raises:
            SiteError: one does not listen in time.
        """
        order = self._order
        for node in range(order.site.nodes):
            try:
                config = gateway_config(
                    order.spec,
                    run_id=order.run_id,
                    generation=order.generation,
                    config_hash=order.spec_hash,
                    site=order.site.name,
                    node=node,
                    bind_host=self._bind_host or order.site.address,
                    socket_path=str(self._socket_path(node)),
                )
            except ConfigError as error:
                raise SiteError("INVALID_CONFIG", str(error.problems[0].message)) from error
            log_path = order.node_folder(node) / "gateway.log"
            gateway = await Gateway.start(config, log_path, self._namespaces)
            self._gateways.append(gateway)
            self._tasks.create_task(
                gateway.read(
                    on_metric=self._listeners.on_metric,
                    on_digest=self._listeners.on_digest,
                    on_plan=self._listeners.on_plan,
                    on_failed=self._listeners.on_failed,
                ),
                name=f"gateway{node}",
            )
        await self._wait_for_gateways("listen", [each.listening for each in self._gateways])
        return [self._announced(gateway) for gateway in self._gateways]

    async def connect(self, endpoints: Sequence[GatewayEndpoint]) -> None:
        """Have all gateways dial the other sites' and wait until Hello was answered.

        Raises:
            SiteError: it was not in time.
        """
        own = self._order.site.name
        peers = [endpoint for endpoint in endpoints if endpoint.site != own]
        for gateway in self._gateways:
            gateway.connect(peers)
        await self._wait_for_gateways("connect", [each.connected for each in self._gateways])

    def tell_gateways(self, message: Mapping[str, Any]) -> None:
        """Write one line to each gateway."""
        for gateway in self._gateways:
            gateway.tell(message)

    async def run_ranks(self) -> None:
        """Start torchrun on each node and return when all of them have ended, well or not."""
        order = self._order
        port = self._held.enter_context(reserved_port("127.0.0.1"))
        for node in range(order.site.nodes):
            torchrun = await Torchrun.start(
                site=order.site.name,
                node=node,
                nodes=order.site.nodes,
                ranks=order.site.accelerators_per_node,
                endpoint=f"127.0.0.1:{port}",
                name=order.name,
                folder=order.node_folder(node),
                start_within_s=order.spec.timeouts.start_s,
                grace_s=order.spec.timeouts.stop_grace_s,
                command=order.command,
                env=order.environment(self._socket_path(node)),
            )
            self._torchruns.append(torchrun)
        watches = [
            self._tasks.create_task(torchrun.watch(self._listeners.on_failed), name="torchrun")
            for torchrun in self._torchruns
        ]
        await asyncio.wait(watches)

    async def wait_probed(self) -> None:
        """Wait until the gateway has measured its links, and all others have that meet here.

        Gateways bound it themselves: one that waits too long for another fails.
        """
        for gateway in self._gateways:
            await gateway.probed.wait()

    async def wait_joined(self) -> None:
        """Wait until all ranks of the site have joined their gateways.

        As long as a script needs.
        """
        for gateway in self._gateways:
            await gateway.joined.wait()

    async def leave(self) -> None:
        """Have the gateways leave after the ranks have, and wait until they have gone.

        Raises:
            SiteError: one did not go in time.
        """
        for gateway in self._gateways:
            gateway.close()
        deadline_s = time.monotonic() + self._order.spec.timeouts.peer_lost_s
        if not await wait_ended([each.process for each in self._gateways], deadline_s):
            raise SiteError(
                "GATEWAY_EXITED",
                "a gateway did not leave after the ranks had ended",
                log_path=str(self._order.node_folder(0) / "gateway.log"),
            )

    async def end(self, grace_s: float) -> bool:
        """End everything: ranks, then gateways, then whatever is left. False if something stays.

        Args:
            grace_s: between SIGTERM and SIGKILL.
        """
        deadline_s = time.monotonic() + grace_s
        torchruns = [each.process for each in self._torchruns]
        gateways = [each.process for each in self._gateways]
        for process in torchruns:
            send(process, SIGTERM)
        await wait_ended(torchruns, deadline_s)
        for gateway in self._gateways:
            gateway.close()
        await wait_ended(gateways, min(deadline_s, time.monotonic() + LEAVE_S))
        all_gone = await kill_descendants(self.children)
        self._held.close()
        for node in range(self._order.site.nodes):
            self._socket_path(node).unlink(missing_ok=True)
        return all_gone

    def log_files(self) -> Iterator[tuple[str, Path]]:
        """Return source and path of every log that there is by now."""
        order = self._order
        for node in range(order.site.nodes):
            folder = order.node_folder(node)
            first_rank = node * order.site.accelerators_per_node
            yield from rank_files(folder, order.name, first_rank)
            yield f"torchrun{node}", folder / TORCHRUN_LOG
            yield f"gateway{node}", folder / "gateway.log"

    def _socket_path(self, node: int) -> Path:
        return self._sockets / f"node{node}.sock"

    def _announced(self, gateway: Gateway) -> GatewayEndpoint:
        """Return where others reach a gateway.

        One that binds every address is dialled at the site's.
        """
        assert gateway.endpoint is not None, "it listens"
        endpoint = GatewayEndpoint()
        endpoint.CopyFrom(gateway.endpoint)
        if endpoint.host in _WILDCARDS:
            endpoint.host = self._order.site.address
        return endpoint

    async def _wait_for_gateways(self, what: str, events: Sequence[asyncio.Event]) -> None:
        within_s = self._order.spec.timeouts.start_s
        try:
            async with asyncio.timeout(within_s):
                for event in events:
                    await event.wait()
        except TimeoutError:
            node = next(node for node, event in enumerate(events) if not event.is_set())
            raise SiteError(
                "START_TIMED_OUT",
                f"gateway {node} of site {self._order.site.name} did not {what} within "
                f"{within_s:g} s",
                node=node,
                log_path=str(self._order.node_folder(node) / "gateway.log"),
            ) from None
