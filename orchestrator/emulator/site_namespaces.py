"""The network namespace of a site, and the TUN device in it that leads to the emulator.

Namespaces have no name: a file descriptor holds them, and they end with its process. No file is
written below /run/netns or elsewhere, so a crash leaves no leftovers.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import socket
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

from isthmus.orchestrator.emulator.emulator_config import NetnsConfig
from isthmus.protos.own_processes import own_command
from isthmus.topology.spec.json_lines import line_of
from isthmus.topology.spec.tcp_constants import MTU_BYTES

CLONE_NEWUSER = 0x10000000  # linux/sched.h
CLONE_NEWNET = 0x40000000
_CAP_SYS_ADMIN = 21  # linux/capability.h
TCP_BUFFER_BYTES = 128 << 20
"""Largest TCP buffer of a connection: several BDPs of 1 Gbit/s and 150 ms."""
PROBE_WITHIN_S = 10.0
_SYSCTLS = Path("/proc/sys/net")


class NetnsError(Exception):
    """The kernel refuses a step of the emulation; the message has the step, reason and remedy."""

    def __init__(self, step: str, error: OSError) -> None:
        super().__init__(f"{step}: {error.strerror or error}{_cure(error)}")


@contextlib.contextmanager
def step(name: str) -> Iterator[None]:
    """Run a step that the kernel may refuse.

    Raises:
        NetnsError: the kernel refuses; the error names the step.
    """
    try:
        yield
    except OSError as error:
        raise NetnsError(name, error) from error


def own_user_namespace() -> bool:
    """Ensure a user namespace that may create network namespaces; return whether it is new.

    A new one maps only this process's user and group, to themselves. The process must have a single
    thread.

    Raises:
        NetnsError: user namespaces are not allowed here.
    """
    if _may_administer():
        return False
    user, group = os.geteuid(), os.getegid()
    with step("user namespace"):
        _unshare(CLONE_NEWUSER)
    with step("map of the user namespace"):
        # Otherwise the kernel does not let unprivileged users map a group.
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    return True


def enter_new_network() -> int:
    """Move this thread into a new network namespace, set up for long paths.

    TCP's buffers may grow to `TCP_BUFFER_BYTES`, for stock limits would cap a connection long
    before the link does. Slow start after idle is copied from this host; the kernel copies the
    congestion control, unless `open_site` is given another. Other settings are the kernel's
    defaults. IPv6 is off: links carry IPv4.

    Returns:
        A file descriptor that holds the namespace; the caller closes it.

    Raises:
        NetnsError: a network namespace or its settings are not allowed here.
    """
    after_idle = _SYSCTLS / "ipv4/tcp_slow_start_after_idle"
    starts_slowly = after_idle.read_text()
    with step("network namespace"):
        _unshare(CLONE_NEWNET)
    with step("settings of the network namespace"):
        for name in ("tcp_rmem", "tcp_wmem"):
            _raise_maximum(_SYSCTLS / "ipv4" / name)
        after_idle.write_text(starts_slowly)
        disable = _SYSCTLS / "ipv6/conf/default/disable_ipv6"
        if disable.exists():
            disable.write_text("1")
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def netns_problem() -> str | None:
    """Return in one line why packets cannot be emulated here; None: they can.

    Tries it in a child process, in about a tenth of a second.
    """
    try:
        done = subprocess.run(
            own_command("isthmus.orchestrator.emulator.netns"),
            input=line_of(NetnsConfig(sites=("probe",), links=())).decode(),
            capture_output=True,
            text=True,
            timeout=PROBE_WITHIN_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"the kernel did not make a network namespace within {PROBE_WITHIN_S:g} s"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"]
    return lines[-1].removeprefix("netns: ")


def _raise_maximum(sysctl: Path) -> None:
    least, default, most = sysctl.read_text().split()
    sysctl.write_text(f"{least} {default} {max(int(most), TCP_BUFFER_BYTES)}")


def _may_administer() -> bool:
    """Whether this process has CAP_SYS_ADMIN, which root in most containers lacks."""
    status = Path("/proc/self/status").read_text()
    (effective,) = (line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> _CAP_SYS_ADMIN & 1)


def _unshare(flags: int) -> None:
    """Call libc's unshare, which Python has from 3.12 on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _cure(error: OSError) -> str:
    if error.errno in (errno.EPERM, errno.EACCES):
        return "; it takes root, or unprivileged user namespaces and access to /dev/net/tun"
    if error.errno in (errno.ENOSPC, errno.EUSERS):
        return "; user.max_user_namespaces or user.max_net_namespaces is used up, or 0"
    if error.errno in (errno.ENOENT, errno.ENODEV, errno.ENXIO):
        return "; this kernel does not have it, or it is not shown to this container"
    return ""


DEVICE = "wan0"
NETWORK = "10.203.0"
"""Network prefix shared by all sites of an emulation. Their namespaces have no other network, so it
cannot collide."""
_NETMASK = "255.255.255.0"
_QUEUE_PACKETS = 10_000
"""Transmit queue of the device, long enough that only the emulator's own queues drop packets. A
site at 1 Gbit/s sends 84 000 small or 1 900 large frames per second."""

_TUNSETIFF = 0x400454CA  # linux/if_tun.h
_TUNSETOFFLOAD = 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x01, 0x02
_SIOCSIFADDR, _SIOCSIFNETMASK = 0x8916, 0x891C  # linux/sockios.h
_RTM_NEWLINK = 16  # linux/rtnetlink.h
_REQUEST_AND_ACK = 0x5  # linux/netlink.h: NLM_F_REQUEST, NLM_F_ACK
_NLM_F_REPLACE, _NLM_F_CREATE = 0x100, 0x400
_IFLA_MTU, _IFLA_TXQLEN = 4, 13  # linux/if_link.h
_RTM_NEWROUTE = 24  # linux/rtnetlink.h
_RT_TABLE_MAIN, _RTPROT_KERNEL, _RT_SCOPE_LINK = 254, 2, 253
_RTA_DST, _RTA_OIF, _RTA_METRICS, _RTAX_CC_ALGO = 1, 4, 8, 16
_IFF_UP = 0x1
_NETLINK_WITHIN_S = 5.0


def address_of(site_index: int) -> str:
    """Return the address of a site, counted from 0 in the order of the configuration."""
    return f"{NETWORK}.{site_index + 1}"


def open_site(site_index: int, congestion: str | None) -> int:
    """Create and start loopback and the TUN device in this thread's network namespace.

    TCP to other sites uses the congestion control `congestion`; None: this host's. A read returns
    one frame as packet_link.py describes it, or BlockingIOError; a write takes one. Other frames
    than TCP over IPv4 with checksum offload are segmented by the kernel.

    Returns:
        The device's non-blocking file descriptor, which the caller closes. The device ends with it.

    Raises:
        NetnsError: a step is not allowed here.
    """
    with step("loopback"):
        _start("lo", {})
    descriptor = _open_device()
    try:
        with step("settings of the TUN device"):
            _set_address(address_of(site_index))
            _start(DEVICE, {_IFLA_MTU: MTU_BYTES, _IFLA_TXQLEN: _QUEUE_PACKETS})
        if congestion is not None:
            with step(f"congestion control {congestion}"):
                _choose_congestion(congestion)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _open_device() -> int:
    with step("/dev/net/tun"):
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    kind = struct.pack("=16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR)
    try:
        with step("TUN device"):
            fcntl.ioctl(descriptor, _TUNSETIFF, kind)
            fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _set_address(address: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        # The netmask makes the route to all other sites, too.
        for request, value in ((_SIOCSIFADDR, address), (_SIOCSIFNETMASK, _NETMASK)):
            packed = struct.pack("=HH4s8x", socket.AF_INET, 0, socket.inet_aton(value))
            fcntl.ioctl(control, request, struct.pack("=16s24s", DEVICE.encode(), packed))


def _start(device: str, attributes: dict[int, int]) -> None:
    """Set attributes of a device and bring it up, by netlink.

    The older ioctl for the queue's length is refused to the root of a user namespace.
    """
    body = struct.pack("=BxHiII", 0, 0, socket.if_nametoindex(device), _IFF_UP, _IFF_UP)
    for kind, value in attributes.items():
        body += _attribute(kind, struct.pack("=I", value))
    _ask_netlink(_RTM_NEWLINK, _REQUEST_AND_ACK, body)


def _choose_congestion(name: str) -> None:
    """Set the congestion control of connections through the device.

    It is set as a metric of the route: the sysctl of a namespace refuses those that this host does
    not list in tcp_allowed_congestion_control.
    """
    body = struct.pack(
        "=BBBBBBBBI", socket.AF_INET, 24, 0, 0, _RT_TABLE_MAIN, _RTPROT_KERNEL, _RT_SCOPE_LINK, 1, 0
    )
    body += _attribute(_RTA_DST, socket.inet_aton(f"{NETWORK}.0"))
    body += _attribute(_RTA_OIF, struct.pack("=I", socket.if_nametoindex(DEVICE)))
    body += _attribute(_RTA_METRICS, _attribute(_RTAX_CC_ALGO, name.encode() + b"\0"))
    _ask_netlink(_RTM_NEWROUTE, _REQUEST_AND_ACK | _NLM_F_CREATE | _NLM_F_REPLACE, body)


def _attribute(kind: int, value: bytes) -> bytes:
    """Return a netlink attribute, padded to four bytes."""
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def _ask_netlink(kind: int, flags: int, body: bytes) -> None:
    """Request one change of this network namespace; OSError if the kernel refuses."""
    header = struct.pack("=IHHII", 16 + len(body), kind, flags, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        netlink.settimeout(_NETLINK_WITHIN_S)
        netlink.send(header + body)
        answer = netlink.recv(4096)
    (code,) = struct.unpack_from("=i", answer, 16)  # result: 0, or -errno
    if code != 0:
        raise OSError(-code, os.strerror(-code))
