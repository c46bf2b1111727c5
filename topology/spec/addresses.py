"""Hosts as a user writes them in YAML: by name, by address, and on the way to another."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated

from isthmus.topology.spec.suggest import shown
from isthmus.topology.spec.yaml_keys import Checked, Text

HOST = r"\w[\w.-]*"
"""A name in DNS or /etc/hosts; it cannot be taken for an option."""
_JUMP = rf"^([^\s@:-][^\s@:]*@)?{HOST}(:[0-9]{{1,5}})?$"


def is_loopback(host: str) -> bool:
    """Whether a host is this machine itself, without asking a resolver."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _host(value: str) -> str:
    host = value[1:-1] if value.startswith("[") and value.endswith("]") else value
    if re.fullmatch(HOST, host) is None and not _is_address(host):
        raise ValueError(
            f"want a host, as eu.example.org or ::1, without a port; got {shown(value)}"
        )
    return host


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _jump(value: str) -> str:
    if re.fullmatch(_JUMP, value) is None:
        raise ValueError(f"want user@host:port (user and port may lack), got {shown(value)}")
    return value


Host = Annotated[Text, Checked(_host)]
Jump = Annotated[
    str,
    Checked(_jump, {"type": "string", "pattern": _JUMP, "examples": ["me@gate.example:22"]}),
]
