"""A document against its pydantic model: each of pydantic's errors is a problem at its place."""

import types
import typing
from collections.abc import Iterable
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from topology.suggest import did_you_mean, one_of, shown
from topology.text.document import Document, Path
from topology.text.fields import KeyedError

Root = TypeVar("Root", bound=BaseModel)

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
"""By pydantic's error type."""

_BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def validate(document: Document, model: type[Root]) -> Root | None:
    """Return the document as `model`, or None after adding a problem for every mistake."""
    try:
        return model.model_validate(document.value)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            _add(document, model, detail)
        return None


def _add(document: Document, model: type[BaseModel], detail: ErrorDetails) -> None:
    path: Path = tuple(detail["loc"])
    kind = detail["type"]
    if path and path[-1] == "[key]":
        path, in_key = path[:-1], True
    else:
        in_key = kind == "extra_forbidden"
    told = detail.get("ctx", {}).get("error")
    if isinstance(told, KeyedError):
        path = (*path, told.key)
    if document.is_refused(path):
        return
    if kind == "missing":
        document.add(path[:-1], f"missing key {path[-1]!r}")
    else:
        document.add(path, _message(document, model, path, detail), at_key=in_key)


def _message(document: Document, model: type[BaseModel], path: Path, detail: ErrorDetails) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    got = _got(document, path, detail["input"])
    if kind == "extra_forbidden":
        key = str(path[-1])
        return f"unknown key {shown(key)}{did_you_mean(key, _keys(model, path[:-1]))}"
    if kind == "literal_error":
        # Only the keys of a dict are literals in our models.
        words = typing.get_args(_annotation(model, path[:-1]))[0]
        known = [str(word) for word in typing.get_args(words)]
        return f"want {one_of(known)}, got {got}{did_you_mean(str(detail['input']), known)}"
    if kind == "value_error":
        return str(context["error"])
    if kind in _WANTED:
        return f"want {_WANTED[kind]}, got {got}"
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
    """Return a value as the user wrote it: `1e3`, where Python would say 1000.0."""
    written = document.places[path].written if path in document.places else None
    plain = isinstance(value, int | float) and written is not None
    return str(written) if plain else shown(value)


def _keys(model: type[BaseModel], path: Path) -> Iterable[str]:
    """Return the keys that the mapping at `path` may have."""
    found = _annotation(model, path)
    if isinstance(found, type) and issubclass(found, BaseModel):
        return [field.alias or name for name, field in found.model_fields.items()]
    return []


def _annotation(model: type[BaseModel], path: Path) -> object:
    """Return the type of the value at `path`: a model, dict[...], list[...] or a leaf's."""
    found: object = model
    for part in path:
        if isinstance(found, type) and issubclass(found, BaseModel):
            by_key = {field.alias or name: field for name, field in found.model_fields.items()}
            found = by_key[str(part)].annotation
        else:
            found = typing.get_args(found)[-1]
        found = _bare(found)
    return found


def _bare(annotation: object) -> object:
    """Return the type within Annotated[..., ...] and ... | None."""
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        annotation = next(each for each in typing.get_args(annotation) if each is not type(None))
        return _bare(annotation)
    return annotation
