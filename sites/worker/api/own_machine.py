"""What a rank can say of its machine and of the code that it runs, for the report of its run."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from isthmus.protos import metrics, versions
from isthmus.protos.commits import commit_of
from isthmus.protos.errors import IsthmusError
from isthmus.protos.usable_cores import usable_cores
from isthmus.sites.worker.exchange.collectives import device_name

_CPUS = Path("/proc/cpuinfo")
_BOOT = Path("/proc/sys/kernel/random/boot_id")

Labels = dict[str, str]


def report_machine(
    device: torch.device, script: Path | None, send: Callable[[Labels], None]
) -> threading.Thread:
    """Send the labels of metrics.MACHINE, from a thread of its own: git takes its time.

    Args:
        device: The rank's.
        script: Whose repository counts; None: nothing of the user's runs.
        send: Called once, from the thread.
    """

    def run() -> None:
        labels = machine_labels(device) | ({} if script is None else commit_labels(script.parent))
        with contextlib.suppress(IsthmusError):  # the rank may have left by now
            send(labels)

    thread = threading.Thread(target=run, name="machine", daemon=True)
    thread.start()
    return thread


def machine_labels(device: torch.device) -> Labels:
    """Return what the rank computes on, and the versions that it runs."""
    found = {
        metrics.HOST: socket.gethostname(),
        metrics.DEVICE: device_name(device),
        metrics.BOOT: _boot(),
        metrics.CPU: _cpu_name(),
        metrics.CORES: str(usable_cores()),
        metrics.PYTHON: platform.python_version(),
        metrics.TORCH: str(torch.__version__),
        metrics.CUDA: (torch.version.cuda or "") if device.type == "cuda" else "",
        metrics.BUILD: versions.build(),
    }
    return {name: value for name, value in found.items() if value}


def place_of(device: torch.device) -> str:
    """Return where a rank computes, as people find it: the node, and the card or the host."""
    node = f"node {os.environ.get('GROUP_RANK', '0')}"
    if device.type != "cuda":
        return f"{node}, host {socket.gethostname()}, {_cpu_name()}"
    uuid = torch.cuda.get_device_properties(device).uuid
    return f"{node}, {device_name(device)} GPU-{uuid}"


def arithmetic_of(device: torch.device) -> str:
    """Return what decides how results are rounded: the same bits where it is the same."""
    labels = machine_labels(device)
    alike = [labels.get(each, "") for each in (metrics.DEVICE, metrics.TORCH, metrics.CUDA)]
    if device.type != "cuda":
        return " ".join([*alike, _cpu_name(), str(torch.get_num_threads())])
    flags = [
        torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
    ]
    return " ".join([*alike, *map(str, flags)])


def _boot() -> str:
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


def _cpu_name() -> str:
    try:
        text = _CPUS.read_text(errors="replace")
    except OSError:
        return platform.processor()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor()


def commit_labels(folder: Path) -> Labels:
    """Return the commit of the repository around a folder; empty: there is none, or no git."""
    found = commit_of(folder)
    if found is None:
        return {}
    return {metrics.COMMIT: found.name, metrics.CHANGED: str(int(found.is_changed))}
