"""Checks a document against its pydantic model, and defines the kinds of value that models use.

The kinds are strict: a text is not a number, `no` is not false, and a quantity has its unit. Each
kind carries the JSON Schema that an editor shows. Each of pydantic's errors becomes a problem of
the document, at its line and column.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import ErrorDetails

from isthmus.topology.spec import units
from isthmus.topology.spec.suggest import did_you_mean, one_of, shown
from isthmus.topology.spec.units import Quantity
from isthmus.topology.text.yaml_document import Document, Path

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$"
"""The pattern of names, which become folders and labels."""


class Strict(BaseModel):
    """A mapping whose keys are all known and whose values have exactly their types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True)


class KeyedError(ValueError):
    """An error of a mapping as a whole, to be reported at one of its keys."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def choice(
    words: tuple[str, ...], *, later: tuple[str, ...] = ()
) -> tuple[PlainValidator, WithJsonSchema]:
    """Return annotations for a field with one of `words`; `later` are known but refused."""

    def check(value: object) -> str:
        if isinstance(value, str) and value in words:
            return value
        if value in later:
            raise ValueError(f"{value!r} is not in this version: want {one_of(words)}")
        hint = did_you_mean(value, words) if isinstance(value, str) else ""
        raise ValueError(f"want {one_of(words)}, got {shown(value)}{hint}")

    return PlainValidator(check), WithJsonSchema({"type": "string", "enum": list(words)})


def default(text: str, description: str) -> Any:  # noqa: ANN401 - any field takes it
    """Return a field's default in the user's spelling, so that the schema shows it that way."""
    return Field(default=text, description=description)


def version_one(value: object) -> int:
    """Return 1, the only version of the two documents' formats; ValueError for anything else."""
    if value != 1 or not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"want version: 1, got {shown(value)}")
    return 1


def _quantity(
    kind: Quantity, parse: Callable[[object], float] | None = None, *, positive: bool = False
) -> tuple[PlainValidator, WithJsonSchema]:
    """Return annotations for a field of that quantity, with its JSON Schema."""

    def read(value: object) -> float:
        number = (parse or kind.number)(value)
        if positive and number <= 0:
            raise ValueError(f"must be more than 0, got {shown(value)}")
        return number

    schema = {"type": "string", "pattern": kind.pattern, "examples": [kind.example]}
    return PlainValidator(read), WithJsonSchema(schema)


def float32_size(low_bytes: int, high_bytes: int) -> PlainValidator:
    """Return an annotation for a size of whole float32s within bounds."""

    def read(value: object) -> int:
        size_bytes = units.parse_size(value)
        if not low_bytes <= size_bytes <= high_bytes:
            low, high = units.format_size(low_bytes), units.format_size(high_bytes)
            raise ValueError(f"want {low} to {high}, got {shown(value)}")
        if size_bytes % 4:
            raise ValueError(f"want a multiple of 4 bytes (float32), got {shown(value)}")
        return size_bytes

    return PlainValidator(read)


def _name(value: str) -> str:
    if re.fullmatch(NAME_PATTERN, value) is None:
        raise ValueError(
            f"want a name of letters, digits, '-' and '_', at most 63; got {shown(value)}"
        )
    return value


def _loss(value: object) -> float:
    loss = units.parse_fraction(value)
    if loss == 1:
        raise ValueError(
            "a link that loses every packet carries nothing: want less than 100%. Leave the link "
            "out, or cut it for a time with a fault script (cut: [a, b])"
        )
    return loss


def _share(value: object) -> float:
    share = units.parse_fraction(value)
    if share == 0:
        raise ValueError("must be more than 0")
    return share


_FRACTION_SCHEMA = WithJsonSchema(
    {
        "anyOf": [
            {"type": "number", "minimum": 0, "maximum": 1},
            {"type": "string", "pattern": r"^[0-9]{1,18}(\.[0-9]{1,18})?%$", "examples": ["0.01%"]},
        ]
    }
)


def _line(value: str) -> str:
    if found := _CONTROL.search(value):
        raise ValueError(f"want one line without control characters, and it has {found[0]!r}")
    return value


def _word(value: str) -> str:
    if value.startswith("-"):
        raise ValueError(
            f"cannot begin with '-': it would be read as an option; got {shown(value)}"
        )
    return value


def _argument(value: str) -> str:
    if "\0" in value:
        raise ValueError("an argument cannot hold a NUL byte")
    return value


_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
Name = Annotated[
    str, AfterValidator(_name), WithJsonSchema({"type": "string", "pattern": NAME_PATTERN})
]
Argument = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_argument)]
"""A word of a command line that is passed on as it is."""
Text = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_line)]
"""One line: it may become part of a file, a header or a message."""
Word = Annotated[Text, AfterValidator(_word)]
"""One line that a program may be given as an argument of its own."""
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Duration = Annotated[float, *_quantity(units.DURATION)]
PositiveDuration = Annotated[float, *_quantity(units.DURATION, positive=True)]
Rate = Annotated[float, *_quantity(units.RATE, positive=True)]
Size = Annotated[int, *_quantity(units.SIZE, units.parse_size, positive=True)]
SIZE_SCHEMA = WithJsonSchema(
    {"type": "string", "pattern": units.SIZE.pattern, "examples": [units.SIZE.example]}
)
Distance = Annotated[float, *_quantity(units.DISTANCE)]
Compute = Annotated[float, *_quantity(units.COMPUTE, positive=True)]
Budget = Annotated[float, *_quantity(units.BUDGET, positive=True)]
PricePerHour = Annotated[float, *_quantity(units.PRICE_PER_HOUR)]
PricePerByte = Annotated[float, *_quantity(units.PRICE_PER_BYTE)]
Fraction = Annotated[float, PlainValidator(units.parse_fraction), _FRACTION_SCHEMA]
Loss = Annotated[float, PlainValidator(_loss), _FRACTION_SCHEMA]
Share = Annotated[float, PlainValidator(_share), _FRACTION_SCHEMA]
Number = Annotated[float, Field(allow_inf_nan=False)]
BelowOne = Annotated[Number, Field(ge=0, lt=1)]


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
"""The expected value in words, by pydantic's error type."""

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


def _keys(model: type[BaseModel], path: Path) -> Iterable[str]:
    """Return the keys that the mapping at `path` may have."""
    found = _annotation(model, path)
    if isinstance(found, type) and issubclass(found, BaseModel):
        return [field.alias or name for name, field in found.model_fields.items()]
    return []


def _annotation(model: type[BaseModel], path: Path) -> object:
    """Return the type of the value at `path`: a model, dict[...], list[...] or a leaf's."""
    annotation: object = model
    for part in path:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            by_key = {field.alias or name: field for name, field in annotation.model_fields.items()}
            annotation = by_key[str(part)].annotation
        else:
            annotation = typing.get_args(annotation)[-1]
        annotation = _bare(annotation)
    return annotation


def _bare(annotation: object) -> object:
    """Return the type within Annotated[..., ...] and ... | None."""
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        annotation = next(each for each in typing.get_args(annotation) if each is not type(None))
        return _bare(annotation)
    return annotation
