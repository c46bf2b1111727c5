"""How a site's agent and a node's supervisor speak: lines of JSON, and what each of them is.

docs/protocols.md has them all.
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
"""Begins the supervisor's first line; its build follows. Login shells may have printed before."""
LINE_BYTES = 16 << 20
"""A line may be this long. The longest are the run's spec, and the ends of logs."""
ORDER_S = 60.0
"""Time from the greeting to the order."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeOrder:
    """A run, as one node has to carry it out: the agent's first line."""

    site: str
    node: int
    prepare: str
    """The coordinator's Prepare, serialised, in base64."""
    state: str
    """The agent's folder. It is the node's, too, shared or not."""
    bind_host: str | None
    told_host: str | None
    inside_host: str | None
    """Host of the node inside the site; None: all nodes are on one machine."""
    cwd: str
    """The agent's working directory; ranks start there, where there is one."""
    files: Mapping[str, str]
    """Secrets by their names, in base64; none where the node reads the agent's own."""
    env: Mapping[str, str]
    """What ranks and gateways find in their environment beside what the node has."""
    build: str
    lease_s: float
    """Either end gives the other up once it has been silent for so long."""
    heartbeat_s: float


def line_of(message: Mapping[str, Any]) -> bytes:
    """Return a message as a line."""
    return json.dumps(message).encode() + b"\n"


def read_line(line: bytes) -> dict[str, Any]:
    """Return the message that a line is.

    Raises:
        ValueError: it is none.
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
    """Return a failure's fields; clocks of two machines have nothing in common, so with its age."""
    return {**failure.to_json(), "age_s": time.monotonic() - failure.at_s}


def failure_of(fields: Mapping[str, Any]) -> Failure:
    """Return the failure that `failure_fields` wrote.

    Raises:
        KeyError, TypeError, ValueError: it wrote something else.
    """
    age_s = max(0.0, float(fields["age_s"]))
    return dataclasses.replace(Failure.from_json(fields), at_s=time.monotonic() - age_s)


def error_fields(error: SiteError) -> dict[str, Any]:
    """Return an error's fields, of which `error_of` makes the same error."""
    return {
        "code": error.code,
        "message": str(error),
        "node": error.node,
        "gateway": error.gateway,
        "log_path": error.log_path,
    }


def error_of(fields: Mapping[str, Any], node: int) -> SiteError:
    """Return an error of a call; it names the node where it names no other place."""
    place = {name: fields[name] for name in ("gateway", "log_path")}
    return SiteError(fields["code"], fields["message"], node=max(fields["node"], node), **place)


def endpoint_fields(endpoint: GatewayEndpoint) -> dict[str, Any]:
    """Return where a gateway listens."""
    return {"gateway": endpoint.gateway, "host": endpoint.host, "port": endpoint.port}


def endpoint_of(fields: Mapping[str, Any], site: str) -> GatewayEndpoint:
    """Return where a gateway of that site listens."""
    return GatewayEndpoint(site=site, **fields)


def lines_of(fields: Sequence[Sequence[Any]]) -> Lines:
    """Return lines of logs: of each source its name, and what it wrote.

    Raises:
        TypeError, ValueError: they are something else.
    """
    return [(str(source), [str(line) for line in written]) for source, written in fields]


def stack_fields(stack: RankStack | None) -> dict[str, Any] | None:
    """Return what a rank was found doing."""
    if stack is None:
        return None
    return {"is_stopped": stack.is_stopped, "frames": stack.frames, "path": str(stack.path)}


def stack_of(fields: Mapping[str, Any] | None) -> RankStack | None:
    """Return what `stack_fields` wrote."""
    if fields is None:
        return None
    return RankStack(fields["is_stopped"], tuple(fields["frames"]), Path(fields["path"]))
