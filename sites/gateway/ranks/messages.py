"""What ranks send to their gateway, checked by field: the protocol of docs/architecture.md."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from protos.errors import LocalProtocolError
from sites.gateway.reduction.chunk_reduction import WEIGHT_MAX
from sites.local.rank_messages import Form

_INTEGER_MAX = (1 << 63) - 1
_UINT32_MAX = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Join:
    """The first message of a rank."""

    rank: int
    """Inside the site."""
    generation: int
    encodes: bool = False
    """It takes the gateway's offer of codecs, if there is one."""


@dataclass(frozen=True, slots=True)
class RegionOffer:
    """Shared memory of float32, its memfd sent along."""

    region: int
    numel: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """A shard lies in a region."""

    round: int
    bucket: int
    region: int
    offset: int
    numel: int
    layout: int
    weight: float
    exact: bool
    form: Form
    encoded_bytes: int
    """Of all bodies together, where these lie in the region."""


@dataclass(frozen=True, slots=True)
class Passed:
    """Something for the agent: a metric or a digest."""

    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LeaveNotice:
    """The rank ends cleanly."""


Message = Join | RegionOffer | Reduce | Passed | LeaveNotice


def parse(data: bytes) -> Message:
    """Return one message of a rank.

    Raises:
        LocalProtocolError: it is none, and why.
    """
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise LocalProtocolError(f"not a JSON message: {error}") from error
    if not isinstance(fields, dict):
        raise LocalProtocolError("a message must be a JSON object")
    op = fields.get("op")
    if op == "join":
        return Join(
            _integer(fields, "rank"),
            _integer(fields, "generation"),
            _flag({"encodes": False, **fields}, "encodes"),
        )
    if op == "region":
        return RegionOffer(_integer(fields, "region"), _integer(fields, "numel"))
    if op == "reduce":
        return Reduce(
            _integer(fields, "round"),
            _integer(fields, "bucket", _UINT32_MAX),
            _integer(fields, "region"),
            _integer(fields, "offset"),
            _integer(fields, "numel"),
            _integer(fields, "layout", _UINT32_MAX),
            _weight(fields),
            _flag(fields, "exact"),
            _form({"form": Form.VALUES, **fields}),
            _integer({"encoded_bytes": 0, **fields}, "encoded_bytes"),
        )
    if op in ("metric", "digest"):
        return Passed(fields)
    if op == "leave":
        return LeaveNotice()
    raise LocalProtocolError(f"unknown op {op!r}")


def _integer(fields: Mapping[str, Any], name: str, most: int = _INTEGER_MAX) -> int:
    value = fields.get(name)
    if type(value) is not int or not 0 <= value <= most:
        raise LocalProtocolError(f"{fields['op']}.{name}: want 0 to {most}, got {value!r}")
    return value


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if type(value) is not bool:
        raise LocalProtocolError(f"{fields['op']}.{name}: want true or false, got {value!r}")
    return value


def _form(fields: Mapping[str, Any]) -> Form:
    value: Any = fields["form"]
    if not isinstance(value, str) or value not in list(Form):
        raise LocalProtocolError(
            f"{fields['op']}.form: want one of {', '.join(Form)}, got {value!r}"
        )
    return Form(value)


def _weight(fields: Mapping[str, Any]) -> float:
    value: Any = fields.get("weight")
    # Compared before it is made a float: an integer may be too long for one.
    if type(value) not in (int, float) or not 0 <= value <= WEIGHT_MAX:
        raise LocalProtocolError(f"{fields['op']}.weight: want 0 or more tokens, got {value!r}")
    return float(value)
