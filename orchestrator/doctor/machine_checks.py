"""One machine: versions, limits, disk, memory that is shared, accelerators, addresses. Pure."""

from __future__ import annotations

import errno
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from isthmus.orchestrator.doctor.findings import Finding, Severity
from isthmus.protos import versions
from isthmus.protos.training_part import CURE
from isthmus.topology.spec.expected_devices import expected_device, unlike
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.machine_facts import Facts, Folder
from isthmus.topology.spec.units import format_size
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
    checkpoints: str | None = None,
    job: Job | None = None,
) -> list[Finding]:
    """Return what is wrong with one machine.

    Args:
        machine: The machine. Of its folders, all but `checkpoints` hold a run's files.
        topology: The sites that take part.
        checkpoints: The folder of the job's checkpoints, if it has one.
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
    ]


def _versions(machine: Machine) -> Iterator[Finding]:
    facts = machine.facts
    own_control = (versions.CONTROL_PROTOCOL_MIN, versions.CONTROL_PROTOCOL_MAX)
    upgrade = f"pip install isthmus=={versions.build()}"
    if versions.negotiate(own_control, facts.control_protocols) is None:
        low, high = facts.control_protocols
        yield Finding(
            severity=Severity.ERROR,
            kind="protocol-unknown",
            site=machine.name,
            found=f"isthmus {facts.build} speaks control protocol {low} to {high}, "
            f"this one {own_control[0]} to {own_control[1]}",
            why="the coordinator refuses its agent",
            cure=upgrade,
        )
    elif facts.build != versions.build():
        yield Finding(
            severity=Severity.WARNING,
            kind="version-differs",
            site=machine.name,
            found=f"isthmus {facts.build} is installed, and {versions.build()} here",
            why="sites of different builds may compute or exchange differently",
            cure=upgrade,
        )
    lacks = facts.lacks or ("torch is not installed" if facts.torch is None else None)
    if lacks:
        yield Finding(
            severity=Severity.ERROR,
            kind="torch-missing" if facts.torch is None else "cannot-train",
            site=machine.name,
            found=lacks,
            why="ranks and gateways need it",
            cure=CURE,
        )


def _addresses(machine: Machine) -> Iterator[Finding]:
    refused = machine.facts.refused or {}
    for site in machine.sites:
        for bound in bound_hosts(site):
            if bound in refused:
                setting = "hosts" if site.hosts else "wan: {address: …}"
                yield Finding(
                    severity=Severity.ERROR,
                    kind="address-refused",
                    site=machine.name or site.name,
                    found=f"nothing can listen on {bound}: {refused[bound]}",
                    why="its gateways listen there, and peers dial it",
                    cure=f"ip -brief address, then `{setting}` of site {site.name}"
                    if not bound.startswith("127.")
                    else f"sudo ip address add {bound}/8 dev lo; sudo ip link set lo up",
                )


def bound_hosts(site: Site) -> tuple[str, ...]:
    """Return what the gateways of a site's nodes bind, as far as it is known."""
    if not site.bound:
        return ()
    return (site.bound,) if site.listening.bind else (site.bound, *site.hosts[1:])


def _limits(machine: Machine, topology: Topology) -> Iterator[Finding]:
    limits = machine.facts.limits
    least, most = _open_files(machine, topology)
    if limits.open_files is not None and limits.open_files < most:
        is_short = limits.open_files < least
        yield Finding(
            severity=Severity.ERROR if is_short else Severity.WARNING,
            kind="few-open-files",
            site=machine.name,
            found=f"a process may have {limits.open_files} files open, and a gateway or a rank "
            f"needs {least if is_short else f'up to {most}'}",
            why="connections are refused with EMFILE, and the run fails",
            cure=f"ulimit -n {max(65536, most)}  (a service: LimitNOFILE={max(65536, most)})",
        )
    wanted = THREADS * machine.num_processes
    if limits.processes is not None and limits.processes < wanted:
        yield Finding(
            severity=Severity.WARNING,
            kind="few-processes",
            site=machine.name,
            found=f"{machine.facts.user} may have {limits.processes} processes and threads, and "
            f"{machine.num_processes} processes of the run take about {wanted}",
            why="a thread that cannot be started ends its process",
            cure=f"ulimit -u {max(4096, 2 * wanted)}  (a service: TasksMax=infinity)",
        )
    if machine.facts.has_infiniband and limits.locked_bytes is not None:
        yield Finding(
            severity=Severity.WARNING,
            kind="little-locked-memory",
            site=machine.name,
            found=f"a process may lock {format_size(limits.locked_bytes)} of memory, and there "
            "is InfiniBand",
            why="NCCL locks the buffers that it sends over InfiniBand, and fails where it cannot",
            cure="ulimit -l unlimited  (a service: LimitMEMLOCK=infinity)",
        )


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


def _folders(machine: Machine, checkpoints: str | None) -> Iterator[Finding]:
    for folder in machine.facts.folders:
        is_checkpoints = folder.path == checkpoints
        is_refused = folder.error is not None and not folder.error.endswith(_NO_SPACE)
        free_bytes, free_files = folder.free_bytes, folder.free_files
        if not is_refused and free_bytes is not None and free_bytes < DISK_LEAST_BYTES:
            yield Finding(
                severity=Severity.ERROR,
                kind="disk-full",
                site=machine.name,
                found=f"{folder.path}: {format_size(free_bytes)} are free",
                why="no checkpoint can be written, and the run keeps nothing to go on from"
                if is_checkpoints
                else "the run's files cannot be written, and the run fails",
                cure=_make_room(folder),
            )
        elif not is_refused and free_files is not None and free_files < FILES_LEAST:
            yield Finding(
                severity=Severity.ERROR,
                kind="few-free-files",
                site=machine.name,
                found=f"{folder.path}: only {free_files} more files can be made",
                why="a checkpoint whose files cannot be made fails"
                if is_checkpoints
                else "the run's files are many, and the first that cannot be made ends the run",
                cure=f"df -i {_there(folder)}, then delete files, or name another folder",
            )
        elif folder.error is not None:
            yield _not_writable(machine, folder, folder.error, is_checkpoints=is_checkpoints)
        elif not is_checkpoints and (free_bytes or 0) < _disk_bytes(machine):
            yield Finding(
                severity=Severity.WARNING,
                kind="little-disk",
                site=machine.name,
                found=f"{folder.path}: {format_size(free_bytes or 0)} are free",
                why=f"a long run's metrics and logs grow to {format_size(_disk_bytes(machine))}",
                cure=_make_room(folder),
            )


def _not_writable(machine: Machine, folder: Folder, error: str, *, is_checkpoints: bool) -> Finding:
    kind, what, setting = "folder", "the run's files", "--home"
    if is_checkpoints:
        kind, what, setting = "checkpoints", "checkpoints", "`checkpoint: {to: …}`"
    path = shlex.quote(folder.path)
    found = f"nothing can be written in {folder.path}: {error}"
    cure = f"mkdir -p {path} && sudo chown {machine.facts.user} {path}, or name another {setting}"
    if error.endswith(_NO_FOLDER):
        found = f"{error.removesuffix(_NO_FOLDER)} is a file, and no folder"
        cure = f"name a folder in {setting}"
    return Finding(
        severity=Severity.ERROR,
        kind=f"{kind}-not-writable",
        site=machine.name,
        found=found,
        why=f"{what} are written there",
        cure=cure,
    )


def _disk_bytes(machine: Machine) -> int:
    return METRICS_BYTES + LOG_BYTES * (machine.num_processes + 1)


def _make_room(folder: Folder) -> str:
    return f"df -h {_there(folder)}, then delete what is not needed, or name another folder"


def _there(folder: Folder) -> str:
    return shlex.quote(str(Path(folder.path).parent))


def _shared_memory(machine: Machine) -> Iterator[Finding]:
    free, ranks = machine.facts.shared_memory_bytes, machine.num_ranks
    if free is None:
        free = 0
    if free >= SHARED_BYTES * ranks:
        return
    seen = machine.facts.accelerators
    uses_nccl = seen is not None and len(seen.names) > 1 and ranks > 1
    is_short = uses_nccl and free < NCCL_SHARED_BYTES * ranks
    size = format_size(max(1 << 30, SHARED_BYTES * ranks))
    yield Finding(
        severity=Severity.ERROR if is_short else Severity.WARNING,
        kind="little-shared-memory",
        site=machine.name,
        found=f"shared memory (/dev/shm) has {format_size(free)} free, for {ranks} ranks",
        why="NCCL sets up its buffers there, and fails"
        if is_short
        else "workers of a DataLoader hand over batches there: a bus error ends them when it is "
        "full",
        cure=f"sudo mount -o remount,size={size[:-2]} /dev/shm  (docker: --shm-size={size[:-2]})",
    )


def _accelerators(machine: Machine) -> Iterator[Finding]:
    seen = machine.facts.accelerators
    if seen is None:
        return
    wanted = max(site.accelerators_per_node for site in machine.sites)
    found, kind, why, cure = "", "", "", ""
    severity = Severity.ERROR
    if seen.error is not None or not seen.names:
        severity = Severity.WARNING
        kind, found = "accelerators-unseen", "there are GPUs, and torch sees none"
        found += f": {seen.error}" if seen.error else ""
        why = "ranks compute on CPUs then"
        cure = "nvidia-smi; python -c 'import torch; print(torch.version.cuda)'"
    elif len(seen.names) < wanted:
        kind = "few-accelerators"
        found = f"torch sees {len(seen.names)} GPUs, and a node has {wanted} ranks"
        why = "each rank of a node takes a GPU of its own, and the last ones find none"
        cure = "nvidia-smi -L; echo $CUDA_VISIBLE_DEVICES; then `accelerators_per_node: "
        cure += f"{len(seen.names)}`"
    elif not seen.nccl:
        kind, found = "nccl-missing", "torch has no NCCL"
        why = "ranks on GPUs sum over it inside the site"
        cure = "pip install --force-reinstall torch  (its build for CUDA)"
    if kind:
        yield Finding(
            severity=severity, kind=kind, site=machine.name, found=found, why=why, cure=cure
        )


def _expected_devices(machine: Machine, topology: Topology, job: Job | None) -> Iterator[Finding]:
    """Compare what the topology says of accelerators with what the machine has."""
    seen = machine.facts.accelerators
    names = machine.facts.gpus if seen is None or not seen.names else seen.names
    if names is None:
        return
    for site in machine.sites:
        expected = expected_device(site, topology, job)
        if expected is None:
            continue
        count, kind = site.accelerators_per_node, site.accelerator.name
        says = f"the topology says {count} {kind} a node of site {site.name}"
        cure = (
            f"nvidia-smi -L; then `accelerator` and `accelerators_per_node` of site {site.name}, "
            "`accelerator: cpu` where that is meant; to try without: `--emulate`, or `--set "
            "trainer.compute=modelled`"
        )
        others = unlike(expected, names)
        if not names:
            problem, told = "accelerators-missing", f"{says}, and this machine has no accelerator"
            why = "ranks compute on CPUs then, and no plan or prediction holds"
        elif seen is None and len(names) < count:
            problem, told = "few-accelerators", f"{says}, and this machine has {len(names)}"
            why = "each rank of a node takes a GPU of its own, and the last ones find none"
        elif others:
            problem, told = "accelerators-differ", f"{says}, and this machine has {others[0]}"
            why = "plans and predictions count with the ones that the topology says"
        else:
            continue
        is_short = problem == "few-accelerators"
        yield Finding(
            severity=Severity.ERROR if is_short else Severity.WARNING,
            kind=problem,
            site=machine.name or site.name,
            found=told,
            why=why,
            cure=cure,
        )


def torch_findings(machines: Sequence[Machine]) -> list[Finding]:
    """Return whether machines have different versions of torch, or no exchange protocol in common.

    Each is compared with the first.
    """
    found = []
    for each in machines[1:]:
        first, other = machines[0].facts, each.facts
        if None not in (first.torch, other.torch) and first.torch != other.torch:
            found.append(
                Finding(
                    severity=Severity.WARNING,
                    kind="torch-differs",
                    site=each.name,
                    found=f"torch {other.torch} is installed, and {first.torch} at "
                    f"{machines[0].name or 'this machine'}",
                    why="other buckets make a run fail (LAYOUT_MISMATCH), other kernels other sums",
                    cure=f"pip install torch=={first.torch}",
                )
            )
        if versions.negotiate(first.exchange_protocols, other.exchange_protocols) is None:
            found.append(
                Finding(
                    severity=Severity.ERROR,
                    kind="protocol-unknown",
                    site=each.name,
                    found=f"isthmus {other.build} has no exchange protocol in common with "
                    f"{first.build} at {machines[0].name or 'this machine'}",
                    why="gateways of the two refuse each other",
                    cure=f"pip install isthmus=={first.build}",
                )
            )
    return found
