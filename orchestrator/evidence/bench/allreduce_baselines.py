"""What an all-reduce is compared with, over the links of a topology: Gloo, and plain TCP.

One process a site, in namespaces where WAN is emulated.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from isthmus.orchestrator.core.run_events import SiteNamespace
from isthmus.orchestrator.emulator.emulator_child import running_emulator
from isthmus.orchestrator.emulator.emulator_config import netns_config
from isthmus.orchestrator.emulator.site_namespaces import DEVICE
from isthmus.orchestrator.emulator.wan_fixture import PlayingFaults
from isthmus.orchestrator.evidence.bench.allreduce_bench import (
    BASELINES,
    GB,
    Baseline,
    spans_of,
    times_of,
)
from isthmus.orchestrator.evidence.bench.allreduce_conditions import (
    others_bytes_per_s,
    read_received,
)
from isthmus.orchestrator.evidence.record.measured_steps import MeasurementError
from isthmus.orchestrator.interruption import INTERRUPTION
from isthmus.orchestrator.run_folder.log_files import last_line
from isthmus.protos.own_processes import leashed, own_command
from isthmus.topology.faults.loading import load_faults
from isthmus.topology.faults.script import expand
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.world import Topology

LOOPBACK = "lo"
LOOPBACK_ADDRESS = "127.0.0.1"
END_S = 10.0
POLL_S = 0.05
LEAD_S = 3.0
"""Cross traffic is under way for so long before processes start, as it is when a run's ranks do."""


def require_full_mesh(topology: Topology, names: Sequence[str]) -> None:
    """Refuse a topology in which some site cannot reach another.

    Every Gloo process dials every other, and TCP's ring goes around all sites.

    Raises:
        ConfigError: names two sites.
    """
    for one in topology.sites:
        for other in topology.sites:
            if one != other and topology.link(one.name, other.name) is None:
                raise ConfigError(
                    f"links: {BASELINES[names[0]]} needs links between all sites, and there is "
                    f"none from {one.name} to {other.name}: measure without --against {names[0]}"
                )


def measure_baseline(
    name: str,
    topology: Topology,
    size_bytes: int,
    *,
    warmup: int,
    repeats: int,
    is_emulated: bool,
    timeout_s: float,
    idle_s: float = 0.0,
    varying: str = "",
) -> Baseline:
    """Measure one of BASELINES; nothing of it is left when this returns.

    Packets are emulated as in a run where `is_emulated`, and `varying`, if it is not empty, is the
    fault script of links that vary; else packets cross loopback. `timeout_s` is for all of it.

    Raises:
        MeasurementError: a process failed, took too long, or had another result than the others,
            or cross traffic was not under way.
        ConfigError: packets cannot be emulated here.
    """
    names = tuple(site.name for site in topology.sites)
    with INTERRUPTION.holding(), contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"isthmus-{name}-")))
        places: Mapping[str, SiteNamespace] = {}
        if is_emulated:
            config = netns_config(topology, seed=0, folder=folder)
            emulator = stack.enter_context(running_emulator(config))
            places = emulator.sites
            if varying:
                times = expand(load_faults(varying, "--varying", topology), None)
                stack.callback(PlayingFaults(emulator, times).stop)
            if config.cross_traffic is not None:
                time.sleep(LEAD_S)
        command = [
            *("isthmus.sites.bench." + name, "--size-bytes", str(size_bytes)),
            *("--count", str(warmup + repeats), "--idle", str(idle_s)),
            *("--timeout", str(timeout_s)),
        ]
        if name == "gloo":
            command += ["--world-size", str(len(names)), "--store", str(folder / "store")]
            command += ["--device", DEVICE if is_emulated else LOOPBACK]
        else:
            addresses = (
                places[each].address if is_emulated else LOOPBACK_ADDRESS for each in names
            )
            command += ["--folder", str(folder), "--addresses", *addresses]
        told = outputs_of(
            name, command, {each: places.get(each) for each in names}, folder, timeout_s
        )
        time.sleep(POLL_S)  # a last sample of cross traffic comes after the last repetition
        return _baseline(name, told, size_bytes, warmup, folder, topology)


def outputs_of(
    name: str,
    command: Sequence[str],
    places: Mapping[str, SiteNamespace | None],
    folder: Path,
    timeout_s: float,
) -> list[Mapping[str, Any]]:
    """Run a process of one of BASELINES at each place; return what each has written at its end.

    Args:
        name: of BASELINES.
        command: module and arguments; each process gets its own --rank.
        places: namespaces, by the processes' names, in the order of ranks; None: this process's.
        folder: where outputs and logs are written.
        timeout_s: for all of it.

    Raises:
        MeasurementError: a process failed, or took too long.
    """
    with contextlib.ExitStack() as stack:
        peers = {
            each: stack.enter_context(_running(each, place, rank, command, folder))
            for rank, (each, place) in enumerate(places.items())
        }
        _wait(name, peers, folder, time.monotonic() + timeout_s)
        return [json.loads(_out(folder, each).read_bytes()) for each in places]


@contextlib.contextmanager
def _running(
    site: str, place: SiteNamespace | None, rank: int, command: Sequence[str], folder: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run one process; it has ended when the block has."""
    namespaces = None if place is None else (place.user, place.net)
    with _out(folder, site).open("wb") as out, _log(folder, site).open("wb") as log:
        process = subprocess.Popen(
            leashed(own_command(*command, "--rank", str(rank)), namespaces),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=log,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(END_S)


def _wait(
    name: str, peers: Mapping[str, subprocess.Popen[bytes]], folder: Path, deadline_s: float
) -> None:
    """Return when all have ended well; raise as soon as one has not, for the others wait for it."""
    running = list(peers)
    while running:
        for site in running:
            if peers[site].poll():
                why = last_line(_log(folder, site))
                raise MeasurementError(f"{BASELINES[name]} at {site} failed: {why}")
        running = [site for site in running if peers[site].returncode is None]
        if running and time.monotonic() > deadline_s:
            raise MeasurementError(f"{BASELINES[name]} at {running[0]} did not end in time")
        INTERRUPTION.check()
        time.sleep(POLL_S)


def _out(folder: Path, site: str) -> Path:
    return folder / f"{site}.out"


def _log(folder: Path, site: str) -> Path:
    return folder / f"{site}.log"


def _baseline(
    name: str,
    told: Sequence[Mapping[str, Any]],
    size_bytes: int,
    warmup: int,
    folder: Path,
    topology: Topology,
) -> Baseline:
    if len({each["digest"] for each in told}) > 1:
        raise MeasurementError(f"the results of {BASELINES[name]} differ between sites")
    by_repeat = list(zip(*(each["repeats"] for each in told), strict=True))
    spans = spans_of([(each["begin_s"], each["end_s"]) for each in repeat] for repeat in by_repeat)
    measured = by_repeat[warmup:]
    used_s = sum(each["cpu_s"] for repeat in measured for each in repeat)
    return Baseline(
        size_bytes=size_bytes,
        times=times_of(spans, warmup),
        cpu_s_per_gb=used_s / (len(measured) * len(told) * size_bytes / GB),
        others_bytes_per_s=others_bytes_per_s(read_received(folder), spans[warmup:], topology),
    )
