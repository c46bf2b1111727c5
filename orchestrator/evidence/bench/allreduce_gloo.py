"""Gloo's all-reduce over the links of a topology.

One process a site, in namespaces where WAN is emulated.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.core.run_events import SiteNamespace
from orchestrator.emulator.emulator_child import running_emulator
from orchestrator.emulator.emulator_config import netns_config
from orchestrator.emulator.site_namespaces import DEVICE
from orchestrator.evidence.bench.allreduce_bench import GB, Gloo, times_of
from orchestrator.evidence.record.measured_steps import MeasurementError
from orchestrator.interruption import INTERRUPTION
from orchestrator.run_folder.log_files import last_line
from topology.errors import ConfigError
from topology.world import Topology

LOOPBACK = "lo"
END_S = 10.0
POLL_S = 0.05


def require_full_mesh(topology: Topology) -> None:
    """Refuse a topology in which some site cannot reach another.

    Every Gloo process dials every other.

    Raises:
        ConfigError: names two sites.
    """
    for one in topology.sites:
        for other in topology.sites:
            if one != other and topology.link(one.name, other.name) is None:
                raise ConfigError(
                    f"links: Gloo needs links between all sites, and there is none from {one.name} "
                    f"to {other.name}: measure without --against gloo"
                )


def measure_gloo(
    topology: Topology,
    size_bytes: int,
    *,
    warmup: int,
    repeats: int,
    is_emulated: bool,
    timeout_s: float,
) -> Gloo:
    """Measure Gloo; nothing of it is left when this returns.

    Packets are emulated as in a run where `is_emulated`; else they cross loopback. `timeout_s` is
    for all of it.

    Raises:
        MeasurementError: a process failed, took too long, or had another result than the others.
        ConfigError: packets cannot be emulated here.
    """
    names = tuple(site.name for site in topology.sites)
    with INTERRUPTION.holding(), contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="isthmus-gloo-")))
        places: Mapping[str, SiteNamespace] = {}
        if is_emulated:
            config = netns_config(topology, seed=0, folder=folder)
            places = stack.enter_context(running_emulator(config)).sites
        common = [
            *("--world-size", str(len(names)), "--store", str(folder / "store")),
            *("--device", DEVICE if is_emulated else LOOPBACK),
            *("--size-bytes", str(size_bytes), "--count", str(warmup + repeats)),
            *("--timeout", str(timeout_s)),
        ]
        peers = [
            stack.enter_context(_running(name, places.get(name), rank, common, folder))
            for rank, name in enumerate(names)
        ]
        _wait(dict(zip(names, peers, strict=True)), folder, time.monotonic() + timeout_s)
        told = [json.loads(_out(folder, name).read_bytes()) for name in names]
    return _gloo(told, size_bytes, warmup)


@contextlib.contextmanager
def _running(
    name: str, place: SiteNamespace | None, rank: int, common: Sequence[str], folder: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run one site's process; it has ended when the block has."""
    enter = [] if place is None else ["--enter", place.user, place.net]
    with _out(folder, name).open("wb") as out, _log(folder, name).open("wb") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "sites.leash", str(os.getpid()), *enter, "--"),
                *(sys.executable, "-m", "sites.bench.gloo", "--rank", str(rank), *common),
            ],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=log,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(END_S)


def _wait(peers: Mapping[str, subprocess.Popen[bytes]], folder: Path, deadline_s: float) -> None:
    """Return when all have ended well; raise as soon as one has not, for the others wait for it."""
    running = list(peers)
    while running:
        for name in running:
            if peers[name].poll():
                raise MeasurementError(f"Gloo at {name} failed: {last_line(_log(folder, name))}")
        running = [name for name in running if peers[name].returncode is None]
        if running and time.monotonic() > deadline_s:
            raise MeasurementError(f"Gloo at {running[0]} did not end in time")
        INTERRUPTION.check()
        time.sleep(POLL_S)


def _out(folder: Path, name: str) -> Path:
    return folder / f"{name}.out"


def _log(folder: Path, name: str) -> Path:
    return folder / f"{name}.log"


def _gloo(told: Sequence[Mapping[str, Any]], size_bytes: int, warmup: int) -> Gloo:
    if len({each["digest"] for each in told}) > 1:
        raise MeasurementError("Gloo's results differ between sites")
    by_repeat = list(zip(*(each["repeats"] for each in told), strict=True))
    spans = ([(each["begin_s"], each["end_s"]) for each in repeat] for repeat in by_repeat)
    measured = by_repeat[warmup:]
    used_s = sum(each["cpu_s"] for repeat in measured for each in repeat)
    return Gloo(
        size_bytes=size_bytes,
        times=times_of(spans, warmup),
        cpu_s_per_gb=used_s / (len(measured) * len(told) * size_bytes / GB),
    )
