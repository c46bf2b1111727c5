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
_SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8913, 0x8914  # linux/sockios.h
_SIOCSIFADDR, _SIOCSIFNETMASK = 0x8916, 0x891C
_SIOCSIFMTU, _SIOCSIFTXQLEN = 0x8922, 0x8943
_IFF_UP = 0x1


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
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        with step("loopback"):
            _start(control, "lo")
        descriptor = _open_device()
        try:
            with step("settings of the TUN device"):
                _set(control, _SIOCSIFMTU, struct.pack("=i", MTU_BYTES))
                _set(control, _SIOCSIFTXQLEN, struct.pack("=i", _QUEUE_PACKETS))
                _set(control, _SIOCSIFADDR, _socket_address(address_of(site_index)))
                # This makes the route to all other sites, too.
                _set(control, _SIOCSIFNETMASK, _socket_address(_NETMASK))
                _start(control, DEVICE)
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


def _set(control: socket.socket, request: int, value: bytes) -> None:
    fcntl.ioctl(control, request, struct.pack("=16s24s", DEVICE.encode(), value))


def _start(control: socket.socket, device: str) -> None:
    name = device.encode()
    message = fcntl.ioctl(control, _SIOCGIFFLAGS, struct.pack("=16sH22x", name, 0))
    (flags,) = struct.unpack_from("=H", message, 16)
    fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("=16sH22x", name, flags | _IFF_UP))


def _socket_address(address: str) -> bytes:
    return struct.pack("=HH4s8x", socket.AF_INET, 0, socket.inet_aton(address))
