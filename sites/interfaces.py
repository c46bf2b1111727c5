"""The address of a network interface of this machine."""

from __future__ import annotations

import socket

import psutil


def address_of(interface: str) -> str:
    """Return the IPv4 address of an interface, or else an IPv6 one that others can reach.

    Raises:
        OSError: there is no such interface, or it has no address.
    """
    known = psutil.net_if_addrs()
    if interface not in known:
        raise OSError(f"no interface {interface!r} here: want one of {', '.join(sorted(known))}")
    for family in (socket.AF_INET, socket.AF_INET6):
        for each in known[interface]:
            # Link-local ones have their interface behind a %, which means nothing elsewhere.
            if each.family == family and "%" not in each.address:
                return each.address
    raise OSError(f"interface {interface!r} has no address")
