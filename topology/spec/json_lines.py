"""Reads and writes messages between our processes: JSON objects, one a line.

A message is a frozen dataclass of the types that json_fields.py knows. Its `op` names its class.
"""

from __future__ import annotations

import json
from typing import ClassVar, Generic, Protocol, TypeVar

from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.json_fields import json_of, read_json, to_json


class Message(Protocol):
    """A dataclass with a name on the wire."""

    op: ClassVar[str]


M = TypeVar("M", bound=Message)


class Kinds(Generic[M]):
    """The messages that one end of a conversation may send."""

    def __init__(self, *kinds: type[M]) -> None:
        self._kinds = {kind.op: kind for kind in kinds}

    def read(self, line: bytes) -> M:
        """Return the message in a line.

        Raises:
            ConfigError: it is none of these messages; the error names the place.
        """
        fields = json_of(line, "the line")
        op = fields.pop("op", None) if isinstance(fields, dict) else None
        kind = self._kinds.get(op) if isinstance(op, str) else None
        if kind is None:
            raise ConfigError(f"want an object with one of the ops {', '.join(self._kinds)}")
        return read_json(kind, fields, kind.op)


def line_of(message: Message) -> bytes:
    """Return a message as a line."""
    return json.dumps({"op": message.op, **to_json(message)}).encode() + b"\n"
