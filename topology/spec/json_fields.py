"""Converts frozen dataclasses to JSON and back, by their annotations.

Knows int, float, str, bool, bytes (base64), a StrEnum, `X | None`, `tuple[X, ...]`, `tuple[X, Y]`,
`Mapping[str, X]`, `Mapping[int, X]`, dataclasses of these, and unions of messages. `Any` is JSON
that somebody else reads. `Annotated[int, most]`, or float, is a number from 0 to `most`;
`Annotated[int, (least, most)]` one from `least`. Fields that a dataclass computes for itself
(`init=False`) are neither written nor read.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, ClassVar, TypeVar

from isthmus.topology.spec.errors import ConfigError

T = TypeVar("T")

Keeps = Callable[["dataclasses.Field[Any]", object], bool]
"""A test whether a field with that value is written."""
OnUnknown = Callable[[str], None]
"""A callback with the path of each unknown field."""


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
class Message:
    """Base of what processes say to each other: each subclass is a frozen dataclass with a name.

    The name is the class's, as in `rank_left` for RankLeft. It tells the messages of a union apart.
    """

    op: ClassVar[str]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.op = re.sub("(?<=.)(?=[A-Z])", "_", cls.__name__).lower()
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)


def to_json(value: object, keeps: Keeps = lambda *_: True) -> Any:  # noqa: ANN401 - any JSON
    """Return JSON values, from which `read_json` restores the value.

    Args:
        value: Of a type that this module knows.
        keeps: Whether a field is written; `read_json` gives others their defaults.
    """
    if dataclasses.is_dataclass(value):
        items = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
        return ({"op": value.op} if isinstance(value, Message) else {}) | {
            field.name: to_json(item, keeps)
            for field, item in items
            if field.init and keeps(field, item)
        }
    if isinstance(value, tuple):
        return [to_json(item, keeps) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return {str(key): to_json(item, keeps) for key, item in value.items()}
    return value


def read_json(
    kind: type[T], value: object, where: str = "", on_unknown: OnUnknown | None = None
) -> T:
    """Restore a value of that type from the JSON of `to_json`.

    Args:
        kind: A dataclass, a union of messages, or another type that this module knows.
        value: As `json.loads` gives it.
        where: Its name in messages; empty for the root.
        on_unknown: Called for each unknown field, which is then skipped; None: refuse them.

    Raises:
        ConfigError: The JSON does not match, or lacks a required field; names the place.
    """
    found: Any = _Reader(on_unknown).read(kind, value, where)
    return typing.cast("T", found)


def json_bytes(value: Any) -> bytes:  # noqa: ANN401 - what `to_json` returns
    """Serialise JSON values; equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def json_of(written: bytes, what: str) -> Any:  # noqa: ANN401 - any JSON
    """Parse serialised JSON.

    Raises:
        ConfigError: The bytes are not JSON; `what` names them.
    """
    try:
        return json.loads(written)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{what} is not JSON: {error}") from error


class _Reader:
    def __init__(self, on_unknown: OnUnknown | None) -> None:
        self._on_unknown = on_unknown

    def read(self, kind: Any, value: object, where: str) -> object:  # noqa: ANN401 - any annotation
        if kind is Any:
            return value
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if isinstance(kind, type) and issubclass(kind, Message):
            return self._message([kind], value, where)
        if dataclasses.is_dataclass(kind):
            return self._object(kind, value, where)
        if origin in (types.UnionType, typing.Union):  # the latter with Annotated
            if type(None) not in arguments:
                return self._message(arguments, value, where)
            return None if value is None else self.read(arguments[0], value, where)
        if origin is tuple:
            return self._items(arguments, value, where)
        if origin is Mapping:
            return self._mapping(arguments, value, where)
        if origin is typing.Annotated:
            kind, limits = arguments[:2]
            if not isinstance(limits, int | float | tuple):  # how a user writes it
                return self.read(kind, value, where)
            least, most = limits if isinstance(limits, tuple) else (0, limits)
            # Compared before it is made a float: an integer may be too long for one.
            if type(value) not in (int, kind) or not least <= value <= most:
                raise _refused(where, f"{least} to {most}", value)
        if issubclass(kind, StrEnum):
            if value not in list(kind):
                raise _refused(where, f"one of {', '.join(kind)}", value)
            return kind(value)
        if kind is bytes:
            return _decoded(value, where)
        if kind is float and type(value) is int and abs(value) < 1 << 63:
            return float(value)
        if type(value) is not kind:
            raise _refused(where, kind.__name__, value)
        return value

    def _message(self, kinds: Sequence[type[Message]], value: object, where: str) -> object:
        op = value.get("op") if isinstance(value, dict) else None
        kind = next((kind for kind in kinds if kind.op == op), None)
        if not isinstance(value, dict) or kind is None:
            wanted = ", ".join(kind.op for kind in kinds)
            raise _refused(where, f"an object with one of the ops {wanted}", value)
        fields = {name: item for name, item in value.items() if name != "op"}
        return self._object(kind, fields, f"{where}.{kind.op}" if where else kind.op)

    def _object(self, kind: Any, value: object, where: str) -> object:  # noqa: ANN401 - a dataclass
        if not isinstance(value, dict):
            raise _refused(where, "an object", value)
        hints: dict[str, Any] = _hints(kind)
        prefix = f"{where}." if where else ""
        for name in value:
            if name not in hints:
                self._unknown(f"{prefix}{name:.100}")
        read = {}
        for field in dataclasses.fields(kind):
            name, place = field.name, f"{prefix}{field.name}"
            if field.init and name in value:
                read[name] = self.read(hints[name], value[name], place)
            elif field.init and field.default is field.default_factory is dataclasses.MISSING:
                raise ConfigError(f"{place} is missing; is the other side of another build?")
        try:
            return kind(**read)
        except ConfigError as error:
            raise ConfigError(f"{prefix}{error.problems[0].message}") from error

    def _unknown(self, path: str) -> None:
        if self._on_unknown is None:
            raise ConfigError(f"{path}: unknown; is the other side of another build?")
        self._on_unknown(path)

    def _items(self, kinds: tuple[Any, ...], value: object, where: str) -> object:
        if not isinstance(value, list | tuple):
            raise _refused(where, "a list", value)
        if kinds[-1] is Ellipsis:
            kinds = kinds[:1] * len(value)
        if len(value) != len(kinds):
            raise _refused(where, f"{len(kinds)} values", value)
        return tuple(
            self.read(kind, item, f"{where}.{at}")
            for at, (kind, item) in enumerate(zip(kinds, value, strict=True))
        )

    def _mapping(self, kinds: tuple[Any, ...], value: object, where: str) -> object:
        if not isinstance(value, dict):
            raise _refused(where, "an object", value)
        read: dict[str | int, object] = {}
        for key, item in value.items():
            read[_key(kinds[0], key, where)] = self.read(kinds[1], item, f"{where}.{key}")
        return read


def _decoded(value: object, where: str) -> bytes:
    with contextlib.suppress(ValueError):
        if isinstance(value, str):
            return base64.b64decode(value, validate=True)
    raise ConfigError(f"{where}: want base64")  # without the value, which may be a secret


def _key(kind: Any, key: object, where: str) -> str | int:  # noqa: ANN401 - any annotation
    """Return a mapping's key; JSON writes every key as a text."""
    if isinstance(key, str) and kind is not int:
        return key
    if isinstance(key, int) or (
        isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 10
    ):
        return int(key)
    raise _refused(where, "keys that are whole numbers", key)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:  # noqa: ANN401 - a dataclass
    names = {field.name for field in dataclasses.fields(kind)}
    return {
        name: hint
        for name, hint in typing.get_type_hints(kind, include_extras=True).items()
        if name in names
    }


def _refused(where: str, wanted: str, value: object) -> ConfigError:
    return ConfigError(f"{where or 'the message'}: want {wanted}, got {value!r:.100}")
