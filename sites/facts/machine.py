"""What a machine is like: versions, limits, TCP's settings, addresses, shared memory."""

from __future__ import annotations

import errno
import getpass
import ipaddress
import os
import platform
import re
import resource
import socket
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from isthmus.protos import kernel_tls, versions
from isthmus.protos.failure import text_of
from isthmus.protos.training_part import what_lacks
from isthmus.protos.usable_cores import usable_cores
from isthmus.sites.compiled import why_plain
from isthmus.sites.facts import numa
from isthmus.sites.facts.files import cannot_enter, look_at_folder, match
from isthmus.sites.facts.training_script import look_at
from isthmus.topology.spec.machine_facts import Accelerators, Facts, Limits, NumaDevice, Tcp, Wanted

_SYSCTLS = Path("/proc/sys/net/ipv4")
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - a file system, not a file of ours
_INFINIBAND = Path("/dev/infiniband")
_NVIDIA = Path("/proc/driver/nvidia/version")
_GPU_SIGNS = (
    _NVIDIA,
    *map(Path, ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg", "/dev/accel0", "/dev/vfio/0")),
)
"""Files that are there with a GPU or a TPU, in containers and other systems' machines, too."""
_IP_MTU = 14  # linux/in.h
_IPV6_MTU = 24  # linux/in6.h
_DISCARD = 9
"""A port for a socket that only asks for the route: no packet is sent."""


def collect(wanted: Wanted) -> Facts:
    """Look at this machine. Milliseconds, unless it is asked about accelerators."""
    mtus, unrouted = _routes(wanted.peers)
    return Facts(
        host=socket.gethostname(),
        user=_user(),
        clock_s=time.time(),
        build=versions.build(),
        control_protocols=(versions.CONTROL_PROTOCOL_MIN, versions.CONTROL_PROTOCOL_MAX),
        exchange_protocols=(versions.EXCHANGE_PROTOCOL_MIN, versions.EXCHANGE_PROTOCOL_MAX),
        python=platform.python_version(),
        torch=_torch_version(),
        lacks=what_lacks(),
        plain=why_plain(),
        usable_cores=usable_cores(),
        limits=_limits(),
        tcp=_tcp(),
        shared_memory_bytes=look_at_folder(_SHARED_MEMORY).free_bytes
        if Path(_SHARED_MEMORY).is_dir()
        else None,
        has_infiniband=_INFINIBAND.is_dir(),
        refused=_refused(wanted),
        mtus_bytes=mtus,
        unrouted=unrouted,
        folders=tuple(look_at_folder(each) for each in wanted.folders),
        script=None if wanted.script is None else look_at(wanted.script),
        working_folder_error=None
        if wanted.working_folder is None
        else cannot_enter(wanted.working_folder),
        globs=tuple(match(each) for each in wanted.globs),
        gpus=_gpus(),
        accelerators=_accelerators() if wanted.accelerators and _NVIDIA.exists() else None,
        numa=_numa(wanted),
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return str(os.getuid())


def _torch_version() -> str | None:
    """Return the version of torch, without the second that importing it takes."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def _limits() -> Limits:
    processes = getattr(resource, "RLIMIT_NPROC", None)
    locked = getattr(resource, "RLIMIT_MEMLOCK", None)
    return Limits(
        open_files=_limit(resource.RLIMIT_NOFILE),
        processes=None if processes is None or os.getuid() == 0 else _limit(processes),
        locked_bytes=None if locked is None else _limit(locked),
    )


def _limit(kind: int) -> int | None:
    soft = resource.getrlimit(kind)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _tcp() -> Tcp:
    slow = _sysctl("tcp_slow_start_after_idle")
    return Tcp(
        receive_max_bytes=_last_number(_sysctl("tcp_rmem")),
        send_max_bytes=_last_number(_sysctl("tcp_wmem")),
        slow_start_after_idle=None if slow is None else slow != ["0"],
        congestion=next(iter(_sysctl("tcp_congestion_control") or ()), None),
        congestion_allowed=_allowed(),
        lacks_kernel_tls=kernel_tls.what_lacks(),
    )


def _allowed() -> tuple[str, ...] | None:
    """Return what this user may choose: root may choose all that there is."""
    name = "tcp_available_congestion_control" if os.geteuid() == 0 else None
    words = _sysctl(name or "tcp_allowed_congestion_control")
    return None if words is None else tuple(words)


def _sysctl(name: str) -> list[str] | None:
    try:
        return (_SYSCTLS / name).read_text().split()
    except OSError:
        return None


def _last_number(words: list[str] | None) -> int | None:
    return int(words[-1]) if words and words[-1].isdecimal() else None


def _refused(wanted: Wanted) -> dict[str, str]:
    """Return the addresses that nothing can listen on, each with the reason."""
    found = {}
    ends = [(each, each, 0) for each in wanted.addresses]
    for endpoint in wanted.endpoints:
        host, _, port = endpoint.rpartition(":")
        ends.append((endpoint, host.strip("[]"), int(port)))
    for name, address, number in ends:
        reason = _refusal(address, number)
        if reason is not None:
            found[name] = reason
    return found


def _refusal(host: str, port: int) -> str | None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
            trial.listen()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return "something listens there already"
        if error.errno == errno.EADDRNOTAVAIL:
            return "no interface of this machine has this address"
        return error.strerror or text_of(error)
    return None


def _routes(peers: Iterable[str]) -> tuple[dict[str, int], dict[str, str]]:
    """Return the MTU towards each peer, and the peers that no route leads to, with the reasons."""
    mtus: dict[str, int] = {}
    unrouted: dict[str, str] = {}
    for peer in peers:
        try:
            address = ipaddress.ip_address(socket.getaddrinfo(peer, None)[0][4][0])
            is_six = address.version == 6
            family = socket.AF_INET6 if is_six else socket.AF_INET
            with socket.socket(family, socket.SOCK_DGRAM) as asking:
                asking.connect((str(address), _DISCARD))
                level = socket.IPPROTO_IPV6 if is_six else socket.IPPROTO_IP
                mtus[peer] = asking.getsockopt(level, _IPV6_MTU if is_six else _IP_MTU)
        except OSError as error:
            unrouted[peer] = error.strerror or text_of(error)
    return mtus, unrouted


def _numa(wanted: Wanted) -> tuple[NumaDevice, ...]:
    """Return the NUMA nodes of cards and of interfaces that carry what is wanted.

    Where none does, that of the default route is looked at.
    """
    if len(numa.nodes()) < 2:
        return ()
    from isthmus.sites.interfaces import interface_of  # its import takes 50 ms

    found = dict.fromkeys(wanted.interfaces)
    for host in wanted.addresses:
        try:
            name = interface_of(host)
        except OSError:
            continue
        if name is not None:
            found[name] = None
    default = numa.default_interface()
    return numa.devices([*found] or [each for each in (default,) if each], os.environ)


def _gpus() -> tuple[str, ...] | None:
    """Return what drivers tell without torch, in less than a millisecond."""
    models = []
    for path in sorted(_NVIDIA.parent.glob("gpus/*/information")):
        found = re.search(r"^Model:\s*(.+)$", path.read_text(errors="replace"), re.MULTILINE)
        models.append(found[1].strip() if found else "")
    if models and all(models):
        return tuple(models)
    return None if models or any(each.exists() for each in _GPU_SIGNS) else ()


def _accelerators() -> Accelerators:
    try:
        import torch
        import torch.distributed as dist

        return Accelerators(
            names=tuple(
                torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
            ),
            nccl=dist.is_nccl_available(),
        )
    except (ImportError, OSError, RuntimeError) as error:
        return Accelerators(error=text_of(error).partition("\n")[0])
