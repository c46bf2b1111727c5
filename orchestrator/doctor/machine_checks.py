"""One machine: versions, limits, disk, memory that is shared, accelerators, addresses. Pure."""

from __future__ import annotations

import dataclasses
import errno
import os
import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from isthmus.orchestrator.doctor.findings import Finding
from isthmus.orchestrator.doctor.kinds import finding
from isthmus.protos import versions
from isthmus.protos.training_part import CURE
from isthmus.topology.spec.expected_devices import expected_device, unlike
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.lanes import LANE_BYTES_PER_S, AgentMachine, decide_lanes
from isthmus.topology.spec.machine_facts import Facts, Folder
from isthmus.topology.spec.units import format_rate, format_size
from isthmus.topology.spec.world import Site, Topology
from isthmus.topology.trees.channels import FLOWS_MAX, first_channels

DISK_LEAST_BYTES = 64 << 20
"""With less than that, a run cannot keep even its journal, its logs and the first metrics."""
METRICS_BYTES = 1 << 30
"""What a run's metrics grow to, and no further."""
LOG_BYTES = 64 << 20
"""What each source of logs grows to, and no further."""
FILES_LEAST = 1000
"""Files that a small run makes, some times over."""
OWN_OPEN_FILES = 40
"""What torch, gRPC and torchrun open in a process by themselves. Measured, with three sites: 48 are
enough for it all, 32 are not."""
SPARE_OPEN_FILES = 256
"""Files that a script opens besides: data, and the batches of a DataLoader's workers."""
THREADS = 32
"""Threads of one process of a site: torch's, gRPC's and our own."""
SHARED_BYTES = 64 << 20
"""Bytes of /dev/shm for each rank: what containers give by default is this for all together."""
NCCL_SHARED_BYTES = 32 << 20
"""Bytes of /dev/shm for each rank, below which NCCL cannot set up its buffers."""
_NO_SPACE = os.strerror(errno.ENOSPC)
_NO_FOLDER = f": {os.strerror(errno.ENOTDIR)}"
"""How a folder's error ends where there is a file in its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine, and the sites whose processes it will run."""

    name: str | None
    """The site that it is, with its host where that is not the site's first; None: this machine,
    whichever sites it has."""
    sites: tuple[Site, ...]
    facts: Facts

    @property
    def num_ranks(self) -> int:
        """The number of ranks on it."""
        return sum(site.num_ranks for site in self.sites)

    @property
    def num_processes(self) -> int:
        """The number of processes on it: ranks, gateways, and for each site agent and torchrun."""
        return self.num_ranks + sum(site.num_gateways + 2 for site in self.sites)


def machine_findings(
    machine: Machine,
    topology: Topology,
    checkpoints: Collection[str] = (),
    job: Job | None = None,
) -> list[Finding]:
    """Return what is wrong with one machine.

    Args:
        machine: The machine. Of its folders, all but `checkpoints` hold a run's files.
        topology: The sites that take part.
        checkpoints: The folders of the job's checkpoints.
        job: What will run; None: anything.
    """
    return [
        *_versions(machine),
        *_addresses(machine),
        *_limits(machine, topology),
        *_folders(machine, checkpoints),
        *_shared_memory(machine),
        *_accelerators(machine),
        *_expected_devices(machine, topology, job),
        *_numa(machine),
    ]


def _versions(machine: Machine) -> Iterator[Finding]:
    facts, own = machine.facts, versions.build()
    own_low, own_high = versions.CONTROL_PROTOCOL_MIN, versions.CONTROL_PROTOCOL_MAX
    low, high = facts.control_protocols
    builds = {"build": facts.build, "own": own}
    if versions.negotiate((own_low, own_high), (low, high)) is None:
        spoken = {"low": low, "high": high, "own_low": own_low, "own_high": own_high}
        yield finding("protocol-unknown", machine.name, **builds, **spoken)
    elif facts.build != own:
        yield finding("version-differs", machine.name, **builds)
    lacks = facts.lacks or ("torch is not installed" if facts.torch is None else None)
    if lacks:
        code = "torch-missing" if facts.torch is None else "cannot-train"
        yield finding("{code}", machine.name, code=code, lacks=lacks, cure=CURE)
    if facts.plain:
        yield finding("plain-python", machine.name, why=facts.plain)


def _addresses(machine: Machine) -> Iterator[Finding]:
    refused = machine.facts.refused or {}
    for site in machine.sites:
        for bound in bound_hosts(site):
            if bound in refused:
                setting = "hosts" if site.hosts else "wan: {address: …}"
                cure = f"ip -brief address, then `{setting}` of site {site.name}"
                if bound.startswith("127."):
                    cure = f"sudo ip address add {bound}/8 dev lo; sudo ip link set lo up"
                at, reason = machine.name or site.name, refused[bound]
                yield finding("address-refused", at, bound=bound, reason=reason, cure=cure)


def bound_hosts(site: Site) -> tuple[str, ...]:
    """Return what the gateways of a site's nodes bind, as far as it is known."""
    if not site.bound:
        return ()
    return (site.bound,) if site.bind else (site.bound, *site.hosts[1:])


def _limits(machine: Machine, topology: Topology) -> Iterator[Finding]:
    limits = machine.facts.limits
    least, most = _open_files(machine, topology)
    if limits.open_files is not None and limits.open_files < most:
        is_short = limits.open_files < least
        yield finding(
            "few-open-files" if is_short else "few-open-files/later",
            machine.name,
            files=limits.open_files,
            needed=least if is_short else most,
            raised=max(65536, most),
        )
    wanted = THREADS * machine.num_processes
    if limits.processes is not None and limits.processes < wanted:
        yield finding(
            "few-processes",
            machine.name,
            user=machine.facts.user,
            allowed=limits.processes,
            count=machine.num_processes,
            wanted=wanted,
            raised=max(4096, 2 * wanted),
        )
    if machine.facts.has_infiniband and limits.locked_bytes is not None:
        locked = format_size(limits.locked_bytes)
        yield finding("little-locked-memory", machine.name, locked=locked)


def _open_files(machine: Machine, topology: Topology) -> tuple[int, int]:
    """Return what a process needs at least, and where links lose packets at most."""
    least, most = OWN_OPEN_FILES, OWN_OPEN_FILES + SPARE_OPEN_FILES
    for site in machine.sites:
        ends = [link for link in topology.links if site.name in (link.source, link.target)]
        gateways = {each.name: each.num_gateways for each in topology.sites}
        begun, reached = OWN_OPEN_FILES, OWN_OPEN_FILES + SPARE_OPEN_FILES
        for link in ends:
            peers = gateways[link.target if link.source == site.name else link.source]
            allowed = link.max_flows or FLOWS_MAX
            begun += peers * first_channels(None, allowed, link.bytes_per_s, link.rtt_s)
            reached += peers * allowed
        least, most = max(least, begun), max(most, reached)
    return least, most


def _folders(machine: Machine, checkpoints: Collection[str]) -> Iterator[Finding]:
    for folder in machine.facts.folders:
        is_checkpoints = folder.path in checkpoints
        of = "/checkpoints" if is_checkpoints else ""
        is_refused = folder.error is not None and not folder.error.endswith(_NO_SPACE)
        free_bytes, free_files = folder.free_bytes, folder.free_files
        place: dict[str, object] = {
            "path": folder.path,
            "parent": shlex.quote(str(Path(folder.path).parent)),
            "free": format_size(free_bytes or 0),
            "free_files": free_files,
        }
        wanted_bytes = METRICS_BYTES + LOG_BYTES * (machine.num_processes + 1)
        if not is_refused and free_bytes is not None and free_bytes < DISK_LEAST_BYTES:
            yield finding(f"disk-full{of}", machine.name, **place)
        elif not is_refused and free_files is not None and free_files < FILES_LEAST:
            yield finding(f"few-free-files{of}", machine.name, **place)
        elif folder.error is not None:
            yield _not_writable(machine, folder, folder.error, is_checkpoints=is_checkpoints)
        elif not is_checkpoints and (free_bytes or 0) < wanted_bytes:
            yield finding("little-disk", machine.name, **place, wanted=format_size(wanted_bytes))


def _not_writable(machine: Machine, folder: Folder, error: str, *, is_checkpoints: bool) -> Finding:
    is_file = error.endswith(_NO_FOLDER)
    return finding(
        "{what}-not-writable/file" if is_file else "{what}-not-writable",
        machine.name,
        what="checkpoints" if is_checkpoints else "folder",
        files="checkpoints" if is_checkpoints else "the run's files",
        setting="`checkpoint: {to: …}`" if is_checkpoints else "--home",
        path=folder.path,
        file=error.removesuffix(_NO_FOLDER),
        quoted=shlex.quote(folder.path),
        error=error,
        user=machine.facts.user,
    )


def _shared_memory(machine: Machine) -> Iterator[Finding]:
    free, ranks = machine.facts.shared_memory_bytes or 0, machine.num_ranks
    if free >= SHARED_BYTES * ranks:
        return
    seen = machine.facts.accelerators
    uses_nccl = seen is not None and len(seen.names) > 1 and ranks > 1
    is_short = uses_nccl and free < NCCL_SHARED_BYTES * ranks
    yield finding(
        "little-shared-memory/nccl" if is_short else "little-shared-memory",
        machine.name,
        free=format_size(free),
        ranks=ranks,
        size=format_size(max(1 << 30, SHARED_BYTES * ranks))[:-2],
    )


def _accelerators(machine: Machine) -> Iterator[Finding]:
    seen = machine.facts.accelerators
    if seen is None:
        return
    wanted = max(site.accelerators_per_node for site in machine.sites)
    if seen.error is not None or not seen.names:
        reason = f": {seen.error}" if seen.error else ""
        yield finding("accelerators-unseen", machine.name, reason=reason)
    elif len(seen.names) < wanted:
        yield finding("few-accelerators", machine.name, seen=len(seen.names), wanted=wanted)
    elif not seen.nccl:
        yield finding("nccl-missing", machine.name)


def _expected_devices(machine: Machine, topology: Topology, job: Job | None) -> Iterator[Finding]:
    """Compare what the topology says of accelerators with what the machine has."""
    seen = machine.facts.accelerators
    names = machine.facts.gpus if seen is None else seen.names
    if names is None:
        return
    for site in machine.sites:
        expected = expected_device(site, topology, job)
        if expected is None:
            continue
        at, count = machine.name or site.name, site.accelerators_per_node
        says = {"count": count, "device": site.accelerator.name, "named": site.name}
        others = unlike(expected, names)
        if not names:
            is_allowed = job is not None and job.allow_cpu
            kind = "accelerators-missing/allowed" if is_allowed else "accelerators-missing"
            yield finding(kind, at, **says)
        elif seen is None and len(names) < count:
            yield finding("few-accelerators/described", at, **says, seen=len(names))
        elif others:
            yield finding("accelerators-differ", at, **says, other=others[0])


def lane_findings(machine: Machine, topology: Topology) -> Iterator[Finding]:
    """Yield how many gateways a node gets, where a site leaves it to isthmus and asks for several.

    Args:
        machine: That of the sites' agents.
        topology: The sites that take part.
    """
    cores = machine.facts.usable_cores
    if cores is None:
        return
    own = {site.name for site in machine.sites}
    here = dataclasses.replace(
        topology, sites=tuple(site for site in topology.sites if site.name in own)
    )
    agent = AgentMachine(host=machine.facts.host, usable_cores=cores)
    for name, lanes in decide_lanes(here, dict.fromkeys(own, agent)).items():
        if lanes.is_of_interest:
            rate = format_rate(LANE_BYTES_PER_S)
            yield finding(
                "gateways-chosen", name, count=lanes.num_gateways, reasons=lanes.why, rate=rate
            )


def _numa(machine: Machine) -> Iterator[Finding]:
    """Tell on which NUMA nodes cards and network interfaces are, if there are several."""
    cards: dict[int, list[str]] = {}
    named: list[str] = []
    on: set[int] = set()
    for each in machine.facts.numa:
        if each.kind == "card":
            cards.setdefault(each.node, []).append(each.name)
        else:
            on.add(each.node)
            named.append(f"{each.name} is on node {each.node}")
    for node, names in sorted(cards.items()):
        what = f"card {names[0]} is" if len(names) == 1 else f"cards {', '.join(names)} are"
        named.append(f"{what} on node {node}")
    differs = bool(on) and bool(cards) and {*cards} != on
    if named:
        name = "numa-nodes/differ" if differs else "numa-nodes"
        site = machine.sites[0].name
        yield finding(name, machine.name, devices="; ".join(named), named=site)


def torch_findings(machines: Sequence[Machine]) -> Iterator[Finding]:
    """Yield whether machines have different versions of torch, or no exchange protocol in common.

    Each is compared with the first.
    """
    for each in machines[1:]:
        first, other = machines[0].facts, each.facts
        where = machines[0].name or "this machine"
        if None not in (first.torch, other.torch) and first.torch != other.torch:
            torches = {"torch": other.torch, "first": first.torch}
            yield finding("torch-differs", each.name, where=where, **torches)
        if versions.negotiate(first.exchange_protocols, other.exchange_protocols) is None:
            builds = {"build": other.build, "first": first.build}
            yield finding("protocol-unknown/exchange", each.name, where=where, **builds)
