"""Checks a document against its sections or its pydantic model.

Values are strict: a text is not a number, `no` is not false, and a quantity has its unit
(topology/spec/yaml_keys.py). Each of pydantic's errors becomes a problem of the document, at its
line and column.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterable
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from isthmus.topology.spec.suggest import did_you_mean, one_of, shown
from isthmus.topology.spec.yaml_keys import KeyedError, Section
from isthmus.topology.spec.yaml_models import model_of
from isthmus.topology.text.yaml_document import Document, Path

Root = TypeVar("Root", bound=BaseModel | Section)

_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a number",
    "bool_type": "true or false",
    "string_type": "a text",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}
"""The expected value in words, by pydantic's error type."""

_BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def validate(document: Document, kind: type[Root]) -> Root | None:
    """Return the document as that kind, or None after adding a problem for every mistake."""
    try:
        return _adapter(kind).validate_python(document.value)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            _add(document, kind, detail)
        return None


_ADAPTERS: dict[type, TypeAdapter[Any]] = {}


def _adapter(kind: type[Root]) -> TypeAdapter[Root]:
    """Return what checks that kind of document; made once."""
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def _add(document: Document, kind: type[Root], detail: ErrorDetails) -> None:
    path: Path = tuple(detail["loc"])
    error = detail["type"]
    if path and path[-1] == "[key]":
        path, in_key = path[:-1], True
    else:
        in_key = error == "extra_forbidden"
    told = detail.get("ctx", {}).get("error")
    if isinstance(told, KeyedError):
        path = (*path, told.key)
    if document.is_refused(path):
        return
    if error == "missing":
        document.add(path[:-1], f"missing key {path[-1]!r}")
    else:
        document.add(path, _message(document, kind, path, detail), at_key=in_key)


def _message(document: Document, root: type[Root], path: Path, detail: ErrorDetails) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    got = _got(document, path, detail["input"])
    if kind == "extra_forbidden":
        key = str(path[-1])
        return f"unknown key {shown(key)}{did_you_mean(key, _keys(root, path[:-1]))}"
    if kind == "literal_error":
        known = re.findall(r"'([^']*)'", str(context["expected"]))
        return f"want {one_of(known)}, got {got}{did_you_mean(str(detail['input']), known)}"
    if kind == "value_error":
        return str(context["error"])
    if kind in _WANTED:
        quoted = kind == "string_type" and isinstance(detail["input"], int | float)
        return f"want {_WANTED[kind]}, got {got}{': write it in quotes' if quoted else ''}"
    if kind in _BOUNDS:
        words, bound = _BOUNDS[kind]
        return f"want {words} {context[bound]:g}, got {got}"
    if kind in ("too_short", "too_long"):
        return _length_message(context)
    if kind in ("string_too_short", "string_too_long"):
        return "must not be empty" if kind == "string_too_short" else "too long"
    return f"{detail['msg']}; got {got}"


def _length_message(context: dict[str, object]) -> str:
    low, high = context.get("min_length"), context.get("max_length")
    bound = f"at least {low}" if low is not None else f"at most {high}"
    return f"want {bound} of them, got {context['actual_length']}"


def _got(document: Document, path: Path, value: object) -> str:
    """Return a value as the user wrote it, such as `1e3` instead of 1000.0."""
    written = document.places[path].written if path in document.places else None
    plain = isinstance(value, int | float) and written is not None
    return str(written) if plain else shown(value)


def _keys(root: type[Root], path: Path) -> Iterable[str]:
    """Return the keys that the mapping at `path` may have."""
    model = _annotation(root, path)
    if isinstance(model, type) and issubclass(model, BaseModel):
        return [field.alias or name for name, field in model.model_fields.items()]
    return []


def _annotation(root: type[Root], path: Path) -> object:
    """Return the type of the value at `path`: a model, dict[...], list[...] or a leaf's."""
    annotation: object = _bare(root)
    for part in path:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            by_key = {field.alias or name: field for name, field in annotation.model_fields.items()}
            annotation = by_key[str(part)].annotation
        else:
            annotation = typing.get_args(annotation)[-1]
        annotation = _bare(annotation)
    return annotation


def _bare(annotation: object) -> object:
    """Return the type within Annotated[..., ...] and ... | None, and the model of a section."""
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        annotation = next(each for each in typing.get_args(annotation) if each is not type(None))
        return _bare(annotation)
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return model_of(annotation)
    return annotation
