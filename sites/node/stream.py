"""The protocol of a site's agent and a node's supervisor: lines of JSON.

docs/protocols.md lists the messages.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isthmus.protos.control.v1.control_pb2 import GatewayEndpoint
from isthmus.protos.failure import Failure
from isthmus.sites.node.failures import SiteError
from isthmus.sites.node.log_files import Lines
from isthmus.sites.node.rank_stacks import RankStack

GREETING = "isthmus-node "
"""Prefix of the supervisor's first line; its build follows. A login shell may print before."""
LINE_BYTES = 16 << 20
"""Longest line. The longest are the run's spec and the ends of logs."""
ORDER_S = 60.0
"""Time from the greeting to the order."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeOrder:
    """The order of one node for a run: the agent's first line."""

    site: str
    node: int
    prepare: str
    """The coordinator's Prepare, serialised, in base64."""
    state: str
    """Path of the agent's state folder, also used on the node, shared or not."""
    bind_host: str | None
    told_host: str | None
    inside_host: str | None
    """Host by which the site's other nodes reach this one; None: all are on one machine."""
    cwd: str
    """The agent's working directory; ranks start there if the node has it."""
    files: Mapping[str, str]
    """Secret files by name, in base64; empty if the node reads the agent's files."""
    env: Mapping[str, str]
    """Environment variables added for ranks and gateways."""
    build: str
    lease_s: float
    """Silence after which either end gives the other up."""
    heartbeat_s: float


def line_of(message: Mapping[str, Any]) -> bytes:
    """Return a message as a line of JSON."""
    return json.dumps(message).encode() + b"\n"


def read_line(line: bytes) -> dict[str, Any]:
    """Return the message in a line.

    Raises:
        ValueError: the line is no message.
    """
    try:
        message = json.loads(line)
    except RecursionError as error:
        raise ValueError("too deep") from error
    if not isinstance(message, dict):
        raise ValueError(f"want an object, got {line[:100]!r}")  # noqa: TRY004
    if "call" in message and (type(message.get("id")), type(message["call"])) != (int, str):
        raise ValueError(f"want a call's name and number, got {line[:100]!r}")
    return message


def failure_fields(failure: Failure) -> dict[str, Any]:
    """Return a failure's fields, with its age, because two machines' clocks differ."""
    return {**failure.to_json(), "age_s": time.monotonic() - failure.at_s}


def failure_of(fields: Mapping[str, Any]) -> Failure:
    """Return the failure in fields of `failure_fields`.

    Raises:
        KeyError, TypeError, ValueError: the fields are not valid.
    """
    age_s = max(0.0, float(fields["age_s"]))
    return dataclasses.replace(Failure.from_json(fields), at_s=time.monotonic() - age_s)


def error_fields(error: SiteError) -> dict[str, Any]:
    """Return an error's fields, for `error_of`."""
    return {
        "code": error.code,
        "message": str(error),
        "node": error.node,
        "gateway": error.gateway,
        "log_path": error.log_path,
    }


def error_of(fields: Mapping[str, Any], node: int) -> SiteError:
    """Return a call's error; its place defaults to the node."""
    place = {name: fields[name] for name in ("gateway", "log_path")}
    return SiteError(fields["code"], fields["message"], node=max(fields["node"], node), **place)


def endpoint_fields(endpoint: GatewayEndpoint) -> dict[str, Any]:
    """Return a gateway's address as fields."""
    return {"gateway": endpoint.gateway, "host": endpoint.host, "port": endpoint.port}


def endpoint_of(fields: Mapping[str, Any], site: str) -> GatewayEndpoint:
    """Return the address of a site's gateway from fields."""
    return GatewayEndpoint(site=site, **fields)


def lines_of(fields: Sequence[Sequence[Any]]) -> Lines:
    """Return log lines by source from fields.

    Raises:
        TypeError, ValueError: the fields are not valid.
    """
    return [(str(source), [str(line) for line in written]) for source, written in fields]


def stack_fields(stack: RankStack | None) -> dict[str, Any] | None:
    """Return a rank's stack as fields."""
    if stack is None:
        return None
    return {"is_stopped": stack.is_stopped, "frames": stack.frames, "path": str(stack.path)}


def stack_of(fields: Mapping[str, Any] | None) -> RankStack | None:
    """Return the stack in fields of `stack_fields`."""
    if fields is None:
        return None
    return RankStack(fields["is_stopped"], tuple(fields["frames"]), Path(fields["path"]))
