"""Pauses, resumes or kills processes of a site for a fault script."""

from __future__ import annotations

import contextlib

import psutil

from isthmus.orchestrator.coordinator.local_agents import GATEWAY, TORCHRUN, resume
from isthmus.topology.faults.script import Kill, Pause


def strike(agent_pid: int, fault: Pause | Kill) -> None:
    """Apply a fault to the site of an agent; do nothing if the process is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        victim = _victim(psutil.Process(agent_pid), fault.process)
        if victim is None:
            return
        is_alone = fault.process in {"agent", "gateway", "rank"}
        if isinstance(fault, Kill):
            for each in [victim] if is_alone else [victim, *victim.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        elif fault.is_paused:
            victim.suspend() if is_alone else _suspend(victim)
        else:
            resume(victim)


def _victim(agent: psutil.Process, process: str) -> psutil.Process | None:
    """Return the process that a fault names (topology/faults/script.py); None: missing.

    Of several gateways, nodes or ranks, the one started first.
    """
    if process in {"site", "agent"}:
        return agent
    module = GATEWAY if process == "gateway" else TORCHRUN
    below = agent.children(recursive=True)
    found = [each for each in below if module in each.cmdline()]
    if process == "rank":
        found = [rank for node in found for rank in node.children()]
    return min(found, key=lambda each: each.pid, default=None)


def _suspend(agent: psutil.Process) -> None:
    """SIGSTOP a process and its descendants, parents first, so that none starts another unseen."""
    stopped: set[int] = set()
    while True:
        below = [agent, *agent.children(recursive=True)]
        running = [process for process in below if process.pid not in stopped]
        if not running:
            return
        for process in running:
            stopped.add(process.pid)
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
