"""A site's TUN device: where its kernel's packets leave for the emulator, and come back from it."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

from orchestrator.emulator.namespaces import step
from orchestrator.emulator.packet_link import MTU_BYTES

DEVICE = "wan0"
NETWORK = "10.203.0"
"""Of all sites of an emulation. Its namespaces have no other network that it could collide with."""
MAX_SITES = 64
_NETMASK = "255.255.255.0"
_QUEUE_PACKETS = 10_000
"""Frames that wait for the emulator: while it is busy elsewhere, it is its queues that must drop.

One at 1 Gbit/s gets 84 000 small packets or 1 900 large ones a second."""

_TUNSETIFF = 0x400454CA  # linux/if_tun.h
_TUNSETOFFLOAD = 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x01, 0x02
_SIOCSIFADDR, _SIOCSIFNETMASK = 0x8916, 0x891C  # linux/sockios.h
_RTM_NEWLINK = 16  # linux/rtnetlink.h
_REQUEST_AND_ACK = 0x5  # linux/netlink.h: NLM_F_REQUEST, NLM_F_ACK
_IFLA_MTU, _IFLA_TXQLEN = 4, 13  # linux/if_link.h
_IFF_UP = 0x1
_NETLINK_WITHIN_S = 5.0


def address_of(site_index: int) -> str:
    """Return the address of a site, counted from 0 in the order of the configuration."""
    return f"{NETWORK}.{site_index + 1}"


def open_site(site_index: int) -> int:
    """Create and start loopback and the TUN device in this thread's network namespace.

    A read returns one frame as packets.py describes it, or BlockingIOError; a write takes one.
    The kernel segments what is neither TCP over IPv4 nor without a checksum.

    Returns:
        The device's file descriptor, non-blocking; the caller's. The device ends with it.

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
        body += struct.pack("=HHI", 8, kind, value)
    header = struct.pack("=IHHII", 16 + len(body), _RTM_NEWLINK, _REQUEST_AND_ACK, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        netlink.settimeout(_NETLINK_WITHIN_S)
        netlink.send(header + body)
        answer = netlink.recv(4096)
    (code,) = struct.unpack_from("=i", answer, 16)  # of the acknowledgement: 0, or -errno
    if code != 0:
        raise OSError(-code, os.strerror(-code))
