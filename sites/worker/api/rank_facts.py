"""What may slow a rank: cores that it waits for, CPU limits, a hypervisor, its GPU's clock."""

from __future__ import annotations

import ctypes
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import torch

from isthmus.protos import metrics
from isthmus.sites.worker.exchange.rank_pace import Facts

_THREAD = Path("/proc/thread-self/schedstat")
_MACHINE = Path("/proc/stat")
_OWN_CGROUP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")
_STEAL_FIELD = 8
_CPU_FIELDS = slice(1, 9)
"""From user to steal: guests' time is in user's already."""


class RankFacts:
    """Reads a rank's facts; shares are of the time since it was asked before.

    About a millisecond, for a few files under /proc; so it is done every five seconds at most.
    """

    def __init__(self, device: torch.device, now_s: Callable[[], float] = time.monotonic) -> None:
        """Look at nothing yet."""
        self._now_s = now_s
        self._gpu = Gpu.of(device)
        self._before: dict[str, float] = {}
        self._before_s = now_s()
        self._labels = {
            metrics.HOST: socket.gethostname(),
            metrics.NODE: os.environ.get("GROUP_RANK", "0"),
        }

    def __call__(self) -> Facts:
        """Return values and labels of metrics.RANK. From the training thread."""
        now_s, totals = self._now_s(), self._totals()
        length_s, before = now_s - self._before_s, self._before
        self._before, self._before_s = totals, now_s
        values = {}
        for name in (metrics.RUN_QUEUE, metrics.THROTTLED):
            if name in totals and name in before and length_s > 0:
                values[name] = _share(totals[name] - before[name], length_s)
        if "cpu" in totals and "cpu" in before:
            taken = totals[metrics.STEAL] - before[metrics.STEAL]
            values[metrics.STEAL] = _share(taken, totals["cpu"] - before["cpu"])
        slowdown = ""
        if self._gpu is not None and (clock_hz := self._gpu.clock_hz()) is not None:
            values[metrics.CLOCK_HZ] = clock_hz
            slowdown = self._gpu.slowdown()
        return values, self._labels | ({metrics.SLOWDOWN: slowdown} if slowdown else {})

    def _totals(self) -> dict[str, float]:
        """Return totals since boot, or since the process began: seconds, and ticks of the CPUs."""
        totals = {}
        if len(fields := _first_line(_THREAD)) > 1:
            totals[metrics.RUN_QUEUE] = float(fields[1]) / 1e9
        if (throttled_s := _throttled_s()) is not None:
            totals[metrics.THROTTLED] = throttled_s
        if len(fields := _first_line(_MACHINE)) > _STEAL_FIELD:
            totals["cpu"] = sum(map(float, fields[_CPU_FIELDS]))
            totals[metrics.STEAL] = float(fields[_STEAL_FIELD])
        return totals


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0


def _first_line(path: Path) -> list[str]:
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            return file.readline().split()
    except OSError:
        return []


def _throttled_s() -> float | None:
    """Return for how long the limit of this process's cgroup has stopped it; None: none is set."""
    try:
        own = _OWN_CGROUP.read_text(encoding="utf-8", errors="replace").splitlines()
        names = [line[3:].lstrip("/") for line in own if line.startswith("0::/")]
        for name in names:
            text = (_CGROUPS / name / "cpu.stat").read_text(encoding="ascii", errors="replace")
            for line in text.splitlines():
                if line.startswith("throttled_usec "):
                    return float(line.split()[1]) / 1e6
    except (OSError, ValueError):
        pass
    return None


_NVML_CLOCK_SM = 1
_REASONS = {
    0x40: "thermal slowdown by hardware",
    0x20: "thermal slowdown",
    0x80: "power brake",
    0x08: "hardware slowdown",
    0x04: "power cap",
    0x02: "clocks set by an application",
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons that slow a GPU down, the worst first: nvml.h."""


class Gpu:
    """One NVIDIA GPU, by its driver's library. No package is needed."""

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        """Take what `of` has found."""
        self._library, self._handle = library, handle

    @classmethod
    def of(cls, device: torch.device) -> Gpu | None:
        """Return a rank's GPU; None: it has none, or no library tells of it."""
        if device.type != "cuda" or torch.version.cuda is None:
            return None
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
            handle = ctypes.c_void_p()
            name = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
            if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(
                ctypes.c_char_p(name), ctypes.byref(handle)
            ):
                return None
        except (AttributeError, OSError):
            return None
        return cls(library, handle)

    def clock_hz(self) -> float | None:
        """Return the clock of its multiprocessors; None: not told."""
        megahertz = ctypes.c_uint()
        failed = self._library.nvmlDeviceGetClockInfo(
            self._handle, _NVML_CLOCK_SM, ctypes.byref(megahertz)
        )
        return None if failed else megahertz.value * 1e6

    def slowdown(self) -> str:
        """Return why it runs slower than it could; empty: it does not, or does nothing."""
        reasons = ctypes.c_ulonglong()
        failed = self._library.nvmlDeviceGetCurrentClocksThrottleReasons(
            self._handle, ctypes.byref(reasons)
        )
        if failed:
            return ""
        return next((words for bit, words in _REASONS.items() if reasons.value & bit), "")
