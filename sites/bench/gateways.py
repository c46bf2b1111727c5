"""The gateways behind a rank, as processes of this machine: what they cost in CPU time."""

from __future__ import annotations

import time

import psutil

_AGENT, _GATEWAY = "isthmus.sites.agent", "isthmus.sites.gateway"
_SCHEDULED = 2
"""CPUCLOCK_SCHED of linux/posix-timers.h.

All threads of a process, in user space and the kernel.
"""


def gateways_of_site() -> tuple[int, ...]:
    """Return the pids of this site's gateways on this machine, of all its nodes.

    They are children of the agent that this rank descends from; without one there are none.
    """
    for ancestor in psutil.Process().parents():
        if _runs(ancestor, _AGENT):
            return tuple(each.pid for each in ancestor.children() if _runs(each, _GATEWAY))
    return ()


def cpu_s(pids: tuple[int, ...]) -> float:
    """Return the CPU seconds that processes have used, to the nanosecond.

    Raises:
        OSError: one of them has gone.
    """
    # What clock_getcpuclockid(3) computes; psutil's figures are whole hundredths of a second.
    return sum(time.clock_gettime((~pid << 3) | _SCHEDULED) for pid in pids)


def _runs(process: psutil.Process, module: str) -> bool:
    try:
        return module in process.cmdline()
    except psutil.Error:
        return False
