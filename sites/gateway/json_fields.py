"""JSON to dataclasses, checked by annotations: what is not exactly what was written is refused."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from topology.errors import ConfigError

T = TypeVar("T")


def read_json(kind: type[T], value: object, where: str = "") -> T:
    """Return the value of that type whose fields `dataclasses.asdict` made JSON of.

    Knows int, float, str, bool, `X | None`, `tuple[X, ...]`, `Mapping[int, X]` and dataclasses of
    these. Fields that are computed are not read.

    Args:
        kind: a dataclass, or one of the above.
        value: as `json.loads` gives it.
        where: what messages call it; empty for the whole.

    Raises:
        ConfigError: it is something else; names the place.
    """
    found: Any = _read(kind, value, where)
    return typing.cast("T", found)


def _read(kind: Any, value: object, where: str) -> object:  # noqa: ANN401 - any annotation
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _read_object(typing.cast("type[Any]", kind), value, where)
    if origin is types.UnionType:
        return None if value is None else _read(arguments[0], value, where)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise _refused(where, "a list", value)
        return tuple(_read(arguments[0], item, f"{where}.{at}") for at, item in enumerate(value))
    if origin is Mapping:
        return _read_mapping(arguments[1], value, where)
    if kind is float and type(value) is int and abs(value) < 1 << 63:
        return float(value)
    if type(value) is not kind:
        raise _refused(where, kind.__name__, value)
    return value


def _read_object(kind: type[Any], value: object, where: str) -> object:
    if not isinstance(value, dict):
        raise _refused(where, "an object", value)
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    prefix = f"{where}." if where else ""
    for name in value:
        if name not in fields:
            raise ConfigError(f"{prefix}{name:.100}: unknown; is the other side of another build?")
    read = {}
    for name, field in fields.items():
        if field.init and name in value:
            read[name] = _read(hints[name], value[name], f"{prefix}{name}")
        elif field.init and field.default is dataclasses.MISSING:
            raise ConfigError(f"{prefix}{name} is missing; is the other side of another build?")
    return kind(**read)


def _read_mapping(kind: Any, value: object, where: str) -> object:  # noqa: ANN401 - any annotation
    if not isinstance(value, dict):
        raise _refused(where, "an object", value)
    read = {}
    for key, item in value.items():
        # Of JSON, keys are texts.
        if not (isinstance(key, int) or (key.isascii() and key.isdecimal() and len(key) < 10)):
            raise _refused(where, "keys that are whole numbers", key)
        read[int(key)] = _read(kind, item, f"{where}.{key}")
    return read


def _refused(where: str, wanted: str, value: object) -> ConfigError:
    return ConfigError(f"{where or 'the message'}: want {wanted}, got {value!r:.100}")
