"""How agents are started, and those of an embedded run: children of the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from isthmus.orchestrator.core.members import RETURNS_WITHIN_S
from isthmus.protos.failure import name_exit
from isthmus.protos.own_processes import leashed, own_command
from isthmus.protos.private_files import users_umask
from isthmus.topology.spec.hashing import topology_hash
from isthmus.topology.spec.world import Topology

TERMINATE_S = 5.0
"""Time for an agent to end its site; its processes die with it after that."""

RESTART_AFTER_S = 1.0
"""An agent that died is started again after this: what is left of it goes meanwhile."""

AGENT = "isthmus.sites.agent"
"""The module that runs as an agent."""
GATEWAY, TORCHRUN = "isthmus.sites.gateway", "isthmus.sites.node.launcher"
"""The modules that an agent starts."""
OnEnd = Callable[[str, str], None]
"""Site, and how its agent ended."""


def agent_arguments(
    topology: Topology, site: str, coordinator: str, state: Path, launcher: str = "local"
) -> list[str]:
    """Return what an agent's command line says: all that it needs before a run's spec comes.

    `launcher` is how it starts the site's other nodes; where nothing is said, on its own machine.
    """
    detection, proxy = topology.failure, topology.site(site).proxy
    return [
        *("--site", site, "--coordinator", coordinator),
        *("--state", str(state), "--address", topology.site(site).address),
        *("--topology-hash", topology_hash(topology)),
        *("--detect-within", repr(detection.detect_within_s)),
        *("--start-within", repr(detection.start_within_s)),
        *("--launcher", launcher),
        *(("--proxy", proxy) if proxy else ()),
    ]


class LocalAgents:
    """Owns the agents' processes from `start` to `stop`."""

    def __init__(self) -> None:
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._watching: list[asyncio.Task[None]] = []

    async def start(
        self,
        sites: Sequence[str],
        *,
        address: str,
        topology: Topology,
        state: Path,
        on_end: OnEnd,
        may_restart: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start an agent for each site. What they write goes to this process's stderr.

        Call it from the main thread: the leash follows the thread that starts a process.

        `on_end` is called when one ends before `stop`. It is then started again, if `may_restart`
        says so a moment later. The agents' folders lie below `state`.

        Raises:
            OSError: the system cannot start a process.
        """

        async def start_one(site: str) -> asyncio.subprocess.Process:
            arguments = agent_arguments(topology, site, address, state / "sites" / site)
            self._processes[site] = process = await asyncio.create_subprocess_exec(
                *leashed(own_command(AGENT, *arguments)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                umask=users_umask(),
            )
            return process

        async def watch(site: str, process: asyncio.subprocess.Process) -> None:
            restarts_s: list[float] = []
            while True:
                on_end(site, name_exit(await process.wait()))
                await asyncio.sleep(RESTART_AFTER_S)
                now_s = time.monotonic()
                restarts_s = [each for each in restarts_s if now_s - each < RETURNS_WITHIN_S]
                if len(restarts_s) >= topology.failure.max_restarts or not may_restart():
                    return
                restarts_s.append(now_s)
                process = await start_one(site)

        for site in sites:
            watching = watch(site, await start_one(site))
            self._watching.append(asyncio.create_task(watching, name=f"agent-{site}"))

    def pid(self, site: str) -> int | None:
        """Return the process of a site's agent; None: it has none by now."""
        process = self._processes.get(site)
        return None if process is None or process.returncode is not None else process.pid

    async def stop(self) -> None:
        """End all agents and return when they are gone. A second call changes nothing."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        running = [each for each in self._processes.values() if each.returncode is None]
        for process in running:
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                process.terminate()
                resume(psutil.Process(process.pid))  # where it is paused, it would not hear
        try:
            async with asyncio.timeout(TERMINATE_S):
                for process in running:
                    await process.wait()
        except TimeoutError:
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()


def resume(agent: psutil.Process) -> None:
    """SIGCONT a process and all below it: children first, so that none is thought to hang."""
    for process in [*reversed(agent.children(recursive=True)), agent]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
