"""Every process of a run at this site: each node has its gateways and a torchrun."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from signal import SIGTERM
from typing import Any

from protos.control.v1.control_pb2 import GatewayEndpoint, Namespace
from protos.failure import Failure
from protos.private_files import users_umask
from protos.security import InsecureAddressError, require_protected
from sites.agent.children import kill_descendants, send, start_leashed, wait_ended
from sites.agent.order import SiteOrder
from sites.agent.site_failures import SiteError, describe_end, rank_failure
from sites.agent.site_gateways import Gateway, Listeners, gateway_config
from sites.launcher.rank_failures import read_failures
from topology.errors import ConfigError

TORCHRUN_LOG = "torchrun.log"
"""The file in a node's folder with what the launcher itself writes."""
_LOOK_S = 0.05
"""Between two looks at failures.json."""
LEAVE_S = 1.0
"""Time for gateways to leave once the ranks were stopped: nobody waits for what they still hold."""


class SiteProcesses:
    """Starts and ends a run's processes. `end` must be called, whatever happened before."""

    def __init__(
        self,
        order: SiteOrder,
        sockets: Path,
        bind_host: str | None,
        namespace: Namespace | None,
        listeners: Listeners,
        tasks: asyncio.TaskGroup,
    ) -> None:
        """Gateways bind `bind_host`, or else as the topology says; in a `namespace`, its address.

        `tasks` owns the tasks that listen to the processes and tell `listeners`; they end with
        those.
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
        """Start the gateways of all nodes and return where they listen, for others to dial.

        Raises:
            SiteError: one does not listen in time.
        """
        order = self._order
        for index in range(order.site.num_gateways):
            try:
                config = gateway_config(
                    order.spec,
                    run_id=order.run_id,
                    generation=order.generation,
                    config_hash=order.spec_hash,
                    site=order.site.name,
                    gateway=index,
                    bind_host=self._bind_host,
                    told_host=self._bind_host if self._namespaces else None,
                    socket_path=str(self._socket_path(index)),
                )
            except ConfigError as error:
                raise SiteError("INVALID_CONFIG", str(error.problems[0].message)) from error
            if config.bind_host and not self._namespaces:
                try:
                    require_protected(config.bind_host)
                except InsecureAddressError as error:
                    raise SiteError(error.code, str(error)) from error
            node, log_path = index // order.site.gateways_per_node, order.gateway_log(index)
            gateway = await Gateway.start(config, node, log_path, self._namespaces)
            self._gateways.append(gateway)
            self._tasks.create_task(gateway.read(self._listeners), name=f"gateway{index}")
        await self._wait_for_gateways("listen", [each.listening for each in self._gateways])
        endpoints = [gateway.endpoint for gateway in self._gateways]
        return [endpoint for endpoint in endpoints if endpoint is not None]

    async def connect(self, endpoints: Sequence[GatewayEndpoint]) -> None:
        """Have all gateways dial the other sites' and wait until Hello was answered.

        Raises:
            SiteError: it was not in time.
        """
        self.tell_addresses(endpoints)
        await self._wait_for_gateways("connect", [each.connected for each in self._gateways])

    def tell_addresses(self, endpoints: Sequence[GatewayEndpoint]) -> None:
        """Tell all gateways where the other sites' are."""
        own = self._order.site.name
        peers = [endpoint for endpoint in endpoints if endpoint.site != own]
        for gateway in self._gateways:
            gateway.connect(peers)

    def tell_gateways(self, message: Mapping[str, Any]) -> None:
        """Write one line to each gateway."""
        for gateway in self._gateways:
            gateway.tell(message)

    async def run_ranks(self) -> None:
        """Start torchrun on each node and return when all of them have ended, well or not."""
        port = self._held.enter_context(reserved_port("127.0.0.1"))
        for node in range(self._order.site.nodes):
            sockets = [self._socket_path(index) for index in self._order.node_gateways(node)]
            torchrun = await Torchrun.start(self._order, node, f"127.0.0.1:{port}", sockets)
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
            late = next(each for each in self._gateways if each.process.returncode is None)
            raise self._of_gateway(
                "GATEWAY_EXITED", late, "did not leave after the ranks had ended"
            )

    async def end(self, grace_s: float) -> bool:
        """End everything: ranks, then gateways, then whatever is left. False if something stays.

        `grace_s` lies between SIGTERM and SIGKILL.
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
        for index in range(self._order.site.num_gateways):
            self._socket_path(index).unlink(missing_ok=True)
        return all_gone

    def log_files(self) -> Iterator[tuple[str, Path]]:
        """Return source and path of every log that there is by now."""
        order = self._order
        for node in range(order.site.nodes):
            folder = order.node_folder(node)
            first_rank = node * order.site.accelerators_per_node
            yield from rank_files(folder, order.name, first_rank)
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


class Torchrun:
    """A node's launcher and, below it, the node's ranks."""

    def __init__(self, order: SiteOrder, node: int, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._site = order.site.name
        self._node = node
        self._folder = order.node_folder(node)
        self._told: set[int] = set()

    @classmethod
    async def start(
        cls, order: SiteOrder, node: int, endpoint: str, sockets: Sequence[Path]
    ) -> Torchrun:
        """Start the ranks of one node.

        Args:
            order: The run.
            node: Which node.
            endpoint: host:port of the rendezvous, on node 0.
            sockets: Those of the node's gateways.
        """
        site, timeouts, folder = order.site, order.spec.timeouts, order.node_folder(node)
        (folder / "failures.json").unlink(missing_ok=True)
        arguments = [
            *("--nodes", str(site.nodes), "--node", str(node)),
            *("--ranks", str(site.accelerators_per_node)),
            *("--endpoint", endpoint, "--name", order.name, "--folder", str(folder)),
            *("--start-within", str(timeouts.start_s), "--grace", str(timeouts.stop_grace_s)),
            *("--", *order.command),
        ]
        # All nodes of a local launcher are this machine; Gloo would pick the interface by hostname.
        defaults = {"GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
        with (folder / TORCHRUN_LOG).open("ab") as log_file:
            process = await start_leashed(
                "sites.launcher.node",
                arguments,
                env={**defaults, **os.environ, **order.environment(sockets)},
                log=log_file,
                talks=False,
                umask=users_umask(),
            )
        return cls(order, node, process)

    async def watch(self, on_failed: Callable[[Failure], None]) -> None:
        """Tell of each rank that fails, as soon as it is known, until the launcher has ended."""
        ended = asyncio.ensure_future(self.process.wait())
        try:
            while not ended.done():
                await asyncio.wait([ended], timeout=_LOOK_S)
                self._tell_new(on_failed)
        finally:
            ended.cancel()
        exit_code = ended.result()
        if exit_code != 0 and not self._told:
            on_failed(self._launcher_ended(exit_code))

    def _tell_new(self, on_failed: Callable[[Failure], None]) -> None:
        for failure in read_failures(self._folder / "failures.json"):
            if failure.rank not in self._told:
                self._told.add(failure.rank)
                on_failed(rank_failure(failure, self._site, self._node))

    def _launcher_ended(self, exit_code: int) -> Failure:
        """Return the failure of torchrun itself.

        Killed, it counts as the training process that it stands for: its ranks die with it.
        """
        end = describe_end(exit_code)
        return Failure(
            code="RANK_KILLED" if exit_code < 0 else "LAUNCH_FAILED",
            message=f"torchrun of node {self._node} of site {self._site} {end}",
            at_s=time.monotonic(),
            site=self._site,
            node=self._node,
            exit_code=exit_code,
            log_path=str(self._folder / TORCHRUN_LOG),
        )


def rank_files(folder: Path, name: str, first_rank: int) -> Iterator[tuple[str, Path]]:
    """Return the log files of a node's ranks that are there by now, with their sources' names."""
    for path in sorted(folder.glob(f"ranks/{name}_*/attempt_0/*/std*.log")):
        yield f"rank{first_rank + int(path.parent.name)}", path
