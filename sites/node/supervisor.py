"""Supervises one node's part of a run in this process: its gateways, its torchrun, their logs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from signal import SIGTERM

from isthmus.protos import metrics
from isthmus.protos.control.v1.control_pb2 import Namespace
from isthmus.protos.security import InsecureAddressError, require_protected
from isthmus.protos.training_part import CURE, what_lacks
from isthmus.sites.gateway.agent_port import Address, Command
from isthmus.sites.local.entry_folder import newest_whole, remove_states
from isthmus.sites.local.rank_messages import Metric
from isthmus.sites.node.children import send, wait_ended
from isthmus.sites.node.failures import SiteError
from isthmus.sites.node.gateway_configs import gateway_config
from isthmus.sites.node.gateway_process import Gateway
from isthmus.sites.node.log_files import Lines, LogFiles
from isthmus.sites.node.machine_trouble import MachineTrouble
from isthmus.sites.node.node import Listener
from isthmus.sites.node.order import SiteOrder
from isthmus.sites.node.rank_stacks import RankStack, is_stopped, look_at
from isthmus.sites.node.torchrun import TORCHRUN_LOG, Torchrun, rank_files
from isthmus.topology.spec.errors import ConfigError

LEAVE_S = 1.0
"""Time for gateways to leave after the ranks were stopped; their remaining data is not needed."""


class Supervisor:
    """Implements `Node` (sites/node/node.py) with child processes of this process.

    The owner of this process ends what `end` leaves behind.
    """

    def __init__(
        self,
        order: SiteOrder,
        node: int,
        sockets: Path,
        *,
        bind_host: str | None,
        dialled_host: str | None,
        inside_host: str | None,
        namespace: Namespace | None,
        listener: Listener,
        tasks: asyncio.TaskGroup,
    ) -> None:
        """Start nothing yet.

        Args:
            order: The run.
            node: Which node of the site.
            sockets: Folder for its gateways' sockets.
            bind_host: Host that its gateways bind; None: the site's in the topology. In a
                `namespace` they bind its address.
            dialled_host: Host that other sites dial; None: the site's in the topology.
            inside_host: Host by which the site's other nodes reach it; None: all are on one
                machine.
            namespace: Network namespace of its gateways; None: that of this process.
            listener: Receives messages of the node's processes.
            tasks: Owns the tasks that listen to the processes; they end with the processes.
        """
        self._order = order
        self._node = node
        self._sockets = sockets
        self._namespaces = (namespace.user, namespace.net) if namespace else None
        # Not loopback, but unreachable from outside the emulated WAN.
        self._bind_host = namespace.address if namespace else bind_host
        self._dialled_host = namespace.address if namespace else dialled_host
        self._inside_host = inside_host
        self._listener = listener
        self._tasks = tasks
        self._gateways: list[Gateway] = []
        self._torchrun: Torchrun | None = None
        self._watching: asyncio.Task[None] | None = None
        self._logs = LogFiles(self.log_files)

    @property
    def children(self) -> list[asyncio.subprocess.Process]:
        """Direct child processes; theirs are below them."""
        torchruns = [] if self._torchrun is None else [self._torchrun.process]
        return [*torchruns, *(gateway.process for gateway in self._gateways)]

    async def start_gateways(self) -> Sequence[Address]:
        """Start the node's gateways and torchrun; return the gateways' addresses.

        Raises:
            SiteError: a gateway does not listen in time, or the machine lacks resources.
        """
        order = self._order
        if lack := await asyncio.to_thread(what_lacks):
            raise SiteError("CANNOT_TRAIN", self._lack(lack), node=self._node)
        trouble = MachineTrouble(order.node_folder(self._node), self._tell_trouble)
        self._watching = self._tasks.create_task(trouble.watch(), name=f"machine{self._node}")
        await asyncio.to_thread(self._remove_states)
        for index in order.node_gateways(self._node):
            try:
                config = gateway_config(
                    order.spec,
                    run_id=order.run_id,
                    generation=order.generation,
                    config_hash=order.spec_hash,
                    site=order.site.name,
                    gateway=index,
                    bind_host=self._bind_host,
                    dialled_host=self._dialled_host,
                    socket_path=str(self._socket_path(index)),
                    state_folder=str(order.node_folder(self._node)),
                    revoked=order.revoked,
                )
            except ConfigError as error:
                raise SiteError("INVALID_CONFIG", str(error.problems[0].message)) from error
            if config.bind_host and not self._namespaces:
                try:
                    require_protected(config.bind_host)
                except InsecureAddressError as error:
                    raise SiteError(error.code, str(error)) from error
            log_path = order.gateway_log(index)
            gateway = await Gateway.start(config, self._node, log_path, self._namespaces)
            self._gateways.append(gateway)
            self._tasks.create_task(gateway.read(self._listener), name=f"gateway{index}")
        if order.spec.job.probe is None:  # torchrun loads while the gateways start.
            sockets = [self._socket_path(index) for index in order.node_gateways(self._node)]
            self._torchrun = await Torchrun.start(order, self._node, sockets, self._inside_host)
        await self._wait_for_gateways("listen", [each.listening for each in self._gateways])
        addresses = [gateway.address for gateway in self._gateways]
        return [address for address in addresses if address is not None]

    def _lack(self, lack: str) -> str:
        machine = f"node {self._node} of site {self._order.site.name}"
        return f"{machine} cannot train, for {lack}: {CURE}"

    def _tell_trouble(self, what: str) -> None:
        node = f"node {self._node}: " if self._order.site.nodes > 1 else ""
        labels = {metrics.REASON: f"{node}{what}"}
        self._listener.on_said(-1, Metric(kind=metrics.TROUBLE, labels=labels))

    def _remove_states(self) -> None:
        """Remove training states that earlier processes left.

        A complete one may be the last copy of a run's state: it stays until this site has fetched a
        newer one.
        """
        folder = self._order.node_folder(self._node)
        remove_states(folder, but=newest_whole(folder) if self._order.returns else None)

    def tell_gateways(self, message: Command) -> None:
        """Send one command to each gateway."""
        for gateway in self._gateways:
            gateway.tell(message)

    async def wait_connected(self) -> None:
        """Wait until the gateways have reached the peers that they need.

        Raises:
            SiteError: they did not in time.
        """
        await self._wait_for_gateways("connect", [each.connected for each in self._gateways])

    async def wait_probed(self) -> None:
        """Wait until the gateways, and their peers, have measured all links.

        Gateways limit the time themselves: one that waits too long for a peer fails.
        """
        for gateway in self._gateways:
            await gateway.probed.wait()

    async def wait_joined(self) -> None:
        """Wait until all ranks of the node have joined their gateways."""
        for gateway in self._gateways:
            await gateway.joined.wait()

    async def run_ranks(self, endpoint: str) -> None:
        """Have torchrun start the ranks, and wait until it ends, well or not.

        Args:
            endpoint: host:port of the rendezvous, on node 0.
        """
        assert self._torchrun is not None, "it starts with the gateways"
        self._torchrun.start_ranks(endpoint)
        watching = self._torchrun.watch(self._listener.on_failed)
        await asyncio.wait([self._tasks.create_task(watching, name="torchrun")])

    async def leave(self) -> None:
        """Have the gateways leave after the ranks, and wait until they have ended.

        Raises:
            SiteError: a gateway did not end in time.
        """
        for gateway in self._gateways:
            gateway.close()
        deadline_s = time.monotonic() + self._order.spec.timeouts.peer_lost_s
        if not await wait_ended([each.process for each in self._gateways], deadline_s):
            late = next(each for each in self._gateways if each.process.returncode is None)
            raise self._of_gateway(
                "GATEWAY_EXITED", late, "did not leave after the ranks had ended"
            )

    async def look(self, rank: int, *, only_stopped: bool) -> RankStack | None:
        """Return a rank's stack; None if `only_stopped` and the rank is not stopped."""
        folder = self._order.folder
        if only_stopped and not await asyncio.to_thread(is_stopped, folder, rank):
            return None
        return await asyncio.to_thread(look_at, folder, rank)

    async def read_logs(self, budget_bytes: int) -> tuple[Lines, int]:
        """Return new lines and their size in bytes, at most the budget."""
        return await asyncio.to_thread(self._logs.read, budget_bytes)

    async def read_log_ends(self, first: Sequence[str]) -> Lines:
        """Return the last lines of every source, sources in `first` before others."""
        return await asyncio.to_thread(self._logs.read_ends, first)

    async def end(self, grace_s: float) -> bool:
        """End ranks, then gateways; `grace_s` is the time between SIGTERM and SIGKILL."""
        if self._watching is not None:
            self._watching.cancel()
        deadline_s = time.monotonic() + grace_s
        if self._torchrun is not None:
            send(self._torchrun.process, SIGTERM)
            await wait_ended([self._torchrun.process], deadline_s)
        gateways = [each.process for each in self._gateways]
        for gateway in self._gateways:
            gateway.close()
        await wait_ended(gateways, min(deadline_s, time.monotonic() + LEAVE_S))
        for index in self._order.node_gateways(self._node):
            self._socket_path(index).unlink(missing_ok=True)
        return True

    async def close(self) -> None:
        """Do nothing: the processes were the only resources."""

    def log_files(self) -> Iterator[tuple[str, Path]]:
        """Yield source and path of every existing log."""
        order, node = self._order, self._node
        folder = order.node_folder(node)
        yield from rank_files(folder, order.name, node * order.site.accelerators_per_node)
        yield f"torchrun{node}", folder / TORCHRUN_LOG
        for index in order.node_gateways(node):
            yield f"gateway{index}", order.gateway_log(index)

    def _socket_path(self, gateway: int) -> Path:
        return self._sockets / f"gateway{gateway}.sock"

    async def _wait_for_gateways(self, what: str, events: Sequence[asyncio.Event]) -> None:
        within_s = self._order.spec.timeouts.start_s
        try:
            async with asyncio.timeout(within_s):
                for event in events:
                    await event.wait()
        except TimeoutError:
            pairs = zip(self._gateways, events, strict=True)
            late = next(gateway for gateway, event in pairs if not event.is_set())
            said = f"did not {what} within {within_s:g} s"
            raise self._of_gateway("START_TIMED_OUT", late, said) from None

    def _of_gateway(self, code: str, gateway: Gateway, said: str) -> SiteError:
        return SiteError(
            code,
            f"gateway {gateway.index} of site {self._order.site.name} {said}",
            node=gateway.node,
            gateway=gateway.index,
            log_path=str(gateway.log_path),
        )
