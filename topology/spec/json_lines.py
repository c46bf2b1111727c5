"""Reads and writes messages between our processes: JSON objects, one a line."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Generic, TypeVar, cast

from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.json_fields import Message, OnUnknown, json_of, read_json, to_json

M = TypeVar("M", bound=Message)


class Kinds(Generic[M]):
    """The messages that one end of a conversation may send."""

    def __init__(
        self,
        way: str,
        kinds: object,
        error: Callable[[str], Exception] = ConfigError,
        on_unknown: OnUnknown | None = None,
    ) -> None:
        """`way` names the conversation in errors; `kinds` is a class of messages, or a union.

        `on_unknown` is as for `read_json`: skips fields of newer builds.
        """
        self._way, self._kinds = way, kinds
        self._error, self._on_unknown = error, on_unknown

    def read(self, line: bytes) -> M:
        """Return the message in a line.

        Raises:
            Exception: as `error` makes it; the line is none of these messages. The text names the
                conversation and the field.
        """
        try:
            value = json_of(line, "the line")
            return read_json(cast("type[M]", self._kinds), value, on_unknown=self._on_unknown)
        except ConfigError as error:
            raise self._error(f"{self._way}: {error.problems[0].message}") from error


def line_of(message: Message) -> bytes:
    """Return a message as a line."""
    return json.dumps(to_json(message)).encode() + b"\n"
