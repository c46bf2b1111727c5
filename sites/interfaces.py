"""The addresses of this machine's network interfaces."""

from __future__ import annotations

import socket

import psutil

from isthmus.protos.security import is_loopback


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


def interface_of(host: str) -> str | None:
    """Return the interface that has an address of a host, which is this machine; None: none has.

    Raises:
        OSError: there is no such host.
    """
    addresses = {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    if any(is_loopback(address) for address in addresses):
        return "lo"  # all of 127.0.0.0/8 is its, and only the first is listed
    return next(
        (
            interface
            for interface, known in psutil.net_if_addrs().items()
            if any(each.address in addresses for each in known)
        ),
        None,
    )
