"""Pydantic's models of the frozen sections, made from their fields and annotations.

A tuple is written as a list, a mapping as a mapping, a section as a mapping of its keys. What
pydantic has checked becomes the section, whose own `check` then compares its values.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model
from pydantic_core.core_schema import no_info_wrap_validator_function

from isthmus.topology.spec.yaml_keys import (
    Derived,
    Key,
    Read,
    Section,
    Unwritten,
    Version,
    WrittenAs,
)


class Strict(BaseModel):
    """A mapping whose keys are all known and whose values have exactly their types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True)


class _Made(Strict):
    """Such a mapping of a section, whose defaults are values already."""

    model_config = ConfigDict(validate_default=False)
    section: ClassVar[type[Section]]
    paths: ClassVar[dict[str, tuple[str, ...]]]
    """The keys of each of its fields, from the outermost on."""
    prefix: ClassVar[str] = ""
    """The keys around it, within the section."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: Any) -> Any:  # noqa: ANN401
        schema = handler(core)
        properties = handler.resolve_ref_schema(schema)["properties"]
        for path, text in _descriptions(cls.section).items():
            key = path.removeprefix(cls.prefix)
            if path.startswith(cls.prefix) and key in properties:
                properties[key]["description"] = text
        return schema


def section_schema(kind: type[Section], handler: Any) -> Any:  # noqa: ANN401 - pydantic's own types
    """Return the schema by which pydantic reads a section; one that is made already stays."""

    def read(value: object, inner: Any) -> Section:  # noqa: ANN401 - pydantic's own type
        return value if isinstance(value, kind) else _made(kind, inner(value))

    return no_info_wrap_validator_function(read, handler.generate_schema(model_of(kind)))


_MODELS: dict[type[Section], type[Strict]] = {}


def model_of(kind: type[Section]) -> type[Strict]:
    """Return the model of the mapping that a section is written as; made once."""
    if kind not in _MODELS:
        _MODELS[kind] = _new_model(kind)
    return _MODELS[kind]


def _new_model(kind: type[Section]) -> type[Strict]:
    fields: dict[str, Any] = {"version": (Version, Field())} if kind.is_document else {}
    inner: dict[str, dict[str, Any]] = {}
    for field, key, hint in _keys(kind):
        outer, _, name = key.path.rpartition(".")
        written = _written(hint, is_required=key.is_required)
        into = inner.setdefault(outer, {}) if outer else fields
        into[name] = (written, _field(field, written, key))
        if outer and outer not in fields:
            fields[outer] = None  # its place among the keys
    for outer, keys in inner.items():
        model = _model(
            f"{outer}.", kind, f"{kind.__name__}{outer.title()}Model", kind.parts[outer], keys
        )
        is_optional = any(item.is_required() for _, item in keys.values())
        fields[outer] = (
            (model | None, None) if is_optional else (model, Field(default_factory=model))
        )
    return _model("", kind, f"{kind.__name__}Model", kind.__doc__, fields)


def _model(
    prefix: str, kind: type[Section], name: str, text: str | None, fields: dict[str, Any]
) -> type[Strict]:
    model = create_model(name, __base__=_Made, __doc__=text, **fields)
    model.section, model.prefix = kind, prefix
    model.paths = {field.name: tuple(key.path.split(".")) for field, key, _ in _keys(kind)}
    return model


def _descriptions(kind: type[Section]) -> dict[str, str]:
    """Return the docstrings of a section's fields by key: their only description."""
    [tree] = ast.parse(inspect.getsource(kind)).body
    assert isinstance(tree, ast.ClassDef)
    texts = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        match field, below:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(value=ast.Constant(str(text))):
                texts[name] = " ".join(text.split())
    return {key.path: texts[field.name] for field, key, _ in _keys(kind) if field.name in texts}


def _keys(kind: type[Section]) -> list[tuple[dataclasses.Field[Any], Key, Any]]:
    """Return the fields that a user writes, each with its key and its annotation."""
    hints, found = typing.get_type_hints(kind, include_extras=True), []
    for field in dataclasses.fields(typing.cast("Any", kind)):
        marks = getattr(hints[field.name], "__metadata__", ())
        if field.init and Unwritten not in marks:
            named = (mark for mark in marks if isinstance(mark, Key))
            found.append((field, next(named, Key(field.name)), hints[field.name]))
    return found


def _written(hint: Any, *, is_required: bool = False) -> Any:  # noqa: ANN401 - any annotation
    """Return the type that a value of an annotated type is written as."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        kind, *marks = arguments
        for mark in marks:
            if isinstance(mark, WrittenAs):
                limits = [each for each in marks if not isinstance(each, Key | WrittenAs)]
                return _annotated(mark.kind, [*limits, AfterValidator(mark.read)])
        limits = [mark for mark in marks if not isinstance(mark, Key)]
        if typing.get_origin(kind) is tuple:
            return _annotated(_list_of(kind), [*limits, AfterValidator(tuple)])
        return _annotated(_written(kind, is_required=is_required), limits)
    if origin in (types.UnionType, typing.Union):
        written = _written(arguments[0])
        return written if is_required else written | None
    if origin is tuple:
        return Annotated[_list_of(hint), AfterValidator(tuple)]
    if origin is Mapping:
        values = _written(arguments[1])
        return types.GenericAlias(dict, (arguments[0], values))
    return hint


def _annotated(kind: Any, marks: list[object]) -> Any:  # noqa: ANN401 - any annotation
    return Annotated[(kind, *marks)] if marks else kind


def _list_of(kind: Any) -> Any:  # noqa: ANN401 - an annotation
    items = typing.get_args(kind)
    written: Any = types.GenericAlias(list, (_written(items[0]),))
    if items[-1] is Ellipsis:
        return written
    return Annotated[written, Field(min_length=len(items), max_length=len(items))]


def _field(field: dataclasses.Field[Any], written: Any, key: Key) -> Any:  # noqa: ANN401
    """Return pydantic's field, whose default the schema shows in the user's spelling."""
    value = field.default
    if field.default_factory is not dataclasses.MISSING and not key.is_required:
        return Field(default_factory=field.default_factory)
    if value is dataclasses.MISSING or key.is_required:
        return Field()
    if isinstance(value, tuple | Section):
        return Field(default_factory=lambda: value)
    marks = getattr(written, "__metadata__", ())
    if Derived in marks:
        return Field(default=None)
    writes = [mark.write for mark in marks if isinstance(mark, Read) and mark.write is not None]
    if not writes and key.default is None:
        return Field(default=value)
    shown: Any = {"default": key.default or writes[0](value)}
    return Field(default=value, json_schema_extra=shown)


def _made(kind: type[Section], model: _Made) -> Section:
    """Return the section of what pydantic has checked, from the keys that are written."""
    given = {}
    for name, path in model.paths.items():
        value: Any = model
        for key in path:
            if value is None or key not in value.model_fields_set:
                break
            value = getattr(value, key)
        else:
            given[name] = value
    made = kind.of_keys(**given)
    made.check()
    return made
