"""An agent in a process of its own, its orders, and what it leaves behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from isthmus.orchestrator.coordinator.local_agents import agent_arguments
from isthmus.protos.control.v1 import control_pb2 as control
from isthmus.topology.documents.load import load_topology
from tests.fakes.agent_coordinator import AgentCoordinator
from tests.fakes.marked_processes import MarkedProcesses, kill_if_there
from tests.fakes.run_specs import spec_of_texts
from tests.fakes.waiting import PROCESSES_S, until

SCRIPT = Path(__file__).with_name("agent_rank.py")
_END_S = 30.0


def topology_yaml(
    nodes: int = 1,
    ranks: int = 2,
    detect_within: str = "6s",
    gateways: int = 1,
    coordinator_within: str = "1h",
) -> str:
    """Return one site `a` of that shape, `gateways` a node, linked to `b`."""
    return f"""
version: 1
name: test
accelerators:
  core: {{peak: {{fp32: 50GFLOP/s}}, memory: 2GiB, mfu: 0.3}}
sites:
  - {{name: a, nodes: {nodes}, accelerators_per_node: {ranks}, accelerator: core,
     wan: {{gateways_per_node: {gateways}}}}}
  - {{name: b, nodes: 1, accelerators_per_node: 1, accelerator: core}}
links:
  - {{between: [a, b], bandwidth: 1Gbit/s, rtt: 1ms}}
failure: {{detect_within: {detect_within}, min_sites: 2, start_within: 60s,
          coordinator_within: {coordinator_within}}}
security: {{mode: insecure}}
"""


def job_yaml(*arguments: str, entrypoint: str = str(SCRIPT)) -> str:
    """Return a job that runs tests/fakes/agent_rank.py."""
    listed = ", ".join(f'"{argument}"' for argument in arguments)
    return (
        f"version: 1\nname: test\ntopology: topology.yaml\nentrypoint: {entrypoint}\n"
        f"arguments: [{listed}]\nworking_folder: {SCRIPT.parent}\n"
    )


def prepare(topology: str, job: str, run_id: str = "r1", generation: int = 1) -> control.Prepare:
    """Return the coordinator's order."""
    return control.Prepare(
        run_id=run_id,
        generation=generation,
        topology=control.Document(source="topology.yaml", text=topology),
        job=control.Document(source="job.yaml", text=job),
        run_spec=spec_of_texts(job, topology).to_bytes(),
    )


@dataclass
class AgentBench:
    """A running agent of site `a`."""

    process: asyncio.subprocess.Process
    marked: MarkedProcesses
    folder: Path

    def processes(self, *words: str) -> list[int]:
        """Return living processes that carry this bench's mark and whose command has `words`."""
        return self.marked.pids(*words)

    def below(self, *words: str) -> list[int]:
        """Return the marked processes but the agent itself."""
        return [pid for pid in self.processes(*words) if pid != self.process.pid]

    async def wait_gone(self, within_s: float = _END_S) -> None:
        """Wait until nothing that the agent started lives."""

        def left() -> list[str]:
            living = self.marked.living()
            return [command for pid, command in living.items() if pid != self.process.pid]

        await until(lambda: not left(), lambda: f"the end of {left()}", within_s, PROCESSES_S)

    async def wait_ended(self, within_s: float = _END_S) -> int:
        """Return the agent's exit status."""
        async with asyncio.timeout(within_s):
            return await self.process.wait()

    def log(self) -> str:
        """Return what the agent wrote to stderr."""
        return (self.folder / "agent.log").read_text()

    def kill(self, *words: str) -> None:
        """SIGKILL the only process with these words."""
        (pid,) = self.below(*words)
        os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill whatever is left."""
        for pid in self.marked.living():
            kill_if_there(pid)


@asynccontextmanager
async def agent_bench(
    coordinator: AgentCoordinator | str,
    folder: Path,
    topology: str,
    *arguments: str,
    fault: str | None = None,
) -> AsyncIterator[AgentBench]:
    """Start an agent; afterwards none of its processes lives.

    Args:
        coordinator: it, or its address.
        folder: for files.
        topology: the agent's own copy.
        arguments: more of them.
        fault: what the fake gateway does wrong; None: the real gateway runs.
    """
    address = coordinator if isinstance(coordinator, str) else coordinator.address
    marked = MarkedProcesses()
    module = "isthmus.sites.agent" if fault is None else "tests.fakes.agent_with_fake_gateway"
    with (folder / "agent.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module),
            *agent_arguments(
                load_topology(topology, "topology.yaml"), "a", address, folder / "state"
            ),
            *arguments,
            env={**marked.env, "FAKE_GATEWAY": fault or ""},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )
    bench = AgentBench(process, marked, folder)
    try:
        yield bench
    finally:
        bench.close()
        await process.wait()
        await bench.wait_gone()
