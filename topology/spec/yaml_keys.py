"""What a user may write under a key of a YAML document.

A frozen class that is a mapping in YAML is a `Section`, and its fields' annotations say how each
value is written: its unit, its limits, its words. Its docstrings describe it, in editors too.

    bucket_bytes: Annotated[int, Key("bucket"), float32_size(64 << 10, 1 << 30)] = 4 << 20
    \"\"\"Of float32 a DDP bucket, in the shipped trainer.\"\"\"

topology/spec/yaml_models.py makes pydantic's model of it. Nothing here imports pydantic before a
document is checked: ranks and gateways have the same classes, and read no YAML.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from isthmus.topology.spec import units
from isthmus.topology.spec.suggest import did_you_mean, one_of, shown
from isthmus.topology.spec.units import Quantity

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$"
"""The pattern of names, which become folders and labels."""


class KeyedError(ValueError):
    """An error of a mapping as a whole, to be reported at one of its keys."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


class Section:
    """A frozen dataclass that a user writes as a mapping of a YAML document."""

    __slots__ = ()
    is_document: ClassVar[bool] = False
    """Whether it is a document of its own, with a version."""
    parts: ClassVar[Mapping[str, str]] = {}
    """Mappings within it that hold some of its fields (`Key`), each with its description."""

    def check(self) -> None:
        """Refuse values that contradict each other; KeyedError, or ValueError for all of them."""

    @classmethod
    def of_keys(cls, **given: Any) -> Self:  # noqa: ANN401 - each field has its type
        """Return the section with the values of the fields that are written."""
        return cls(**given)

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: object, handler: Any) -> Any:  # noqa: ANN401
        from isthmus.topology.spec.yaml_models import section_schema

        return section_schema(cls, handler)


@dataclass(frozen=True, slots=True)
class Key:
    """The name of a field's key, where it is not the field's; `timeline.every` is within another.

    `is_required`: the mapping around it has no use without it. `default` is the default in the
    user's spelling, where several are possible.
    """

    path: str
    is_required: bool = False
    default: str | None = None


class Unwritten:
    """Marks a field that no user writes."""


class Derived:
    """Marks a field whose default follows from other keys, or is not written as a value."""


@dataclass(frozen=True, slots=True, eq=False)
class Short:
    """A shorter way to write a mapping."""

    read: Callable[[object], object]
    """Returns what it stands for, and any other value unchanged."""
    schema: Mapping[str, Any]

    def __get_pydantic_core_schema__(self, source: object, handler: Any) -> Any:  # noqa: ANN401
        from pydantic_core.core_schema import no_info_before_validator_function

        return no_info_before_validator_function(self.read, handler(source))

    def __get_pydantic_json_schema__(self, core: object, handler: Any) -> dict[str, Any]:  # noqa: ANN401
        return {"anyOf": [handler(core), dict(self.schema)]}


@dataclass(frozen=True, slots=True, eq=False)
class WrittenAs:
    """Another type that a value is written as, and how it is made of that."""

    kind: Any
    read: Callable[[Any], object]


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """A value that is written as something else, such as a quantity with its unit."""

    read: Callable[[object], object]
    """ValueError for what cannot be read."""
    schema: Mapping[str, Any]
    """The JSON Schema of what is written."""
    write: Callable[[Any], object] | None = None
    """Returns a default in the user's spelling; None: as it is."""

    def __get_pydantic_core_schema__(self, _source: object, _handler: object) -> Any:  # noqa: ANN401
        from pydantic_core.core_schema import no_info_plain_validator_function

        return no_info_plain_validator_function(self.read)

    def __get_pydantic_json_schema__(self, _core: object, _handler: object) -> dict[str, Any]:
        return dict(self.schema)


@dataclass(frozen=True, slots=True, eq=False)
class Checked:
    """A check of a value that has its type already."""

    check: Callable[[Any], object]
    """Returns the value; ValueError for one that is not permitted."""
    schema: Mapping[str, Any] | None = None
    """The JSON Schema; None: the type's."""

    def __get_pydantic_core_schema__(self, source: object, handler: Any) -> Any:  # noqa: ANN401
        from pydantic_core.core_schema import no_info_after_validator_function

        return no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> Any:  # noqa: ANN401
        return handler(core) if self.schema is None else dict(self.schema)


class Bounds:
    """Limits of a number (ge, gt, le, lt), or of how long it is (min_length, max_length)."""

    def __init__(self, **limits: float | bool) -> None:
        self._limits = limits

    def __get_pydantic_core_schema__(self, source: object, handler: Any) -> Any:  # noqa: ANN401
        return {**handler(source), **self._limits}


def choice(words: tuple[str, ...], *, later: tuple[str, ...] = ()) -> Read:
    """Return the annotation of a field with one of `words`; `later` are known but refused."""

    def check(value: object) -> str:
        if isinstance(value, str) and value in words:
            return value
        if value in later:
            raise ValueError(f"{value!r} is not in this version: want {one_of(words)}")
        hint = did_you_mean(value, words) if isinstance(value, str) else ""
        raise ValueError(f"want {one_of(words)}, got {shown(value)}{hint}")

    return Read(check, {"type": "string", "enum": list(words)})


def flag(words: tuple[str, ...], *, true: str) -> Read:
    """Return the annotation of a fact that is written as one of two words."""
    written = choice(words)
    [false] = set(words) - {true}
    return Read(
        lambda value: written.read(value) == true,
        written.schema,
        lambda value: true if value else false,
    )


def _version_one(value: object) -> int:
    """Return 1, the only version of the documents' formats; ValueError for anything else."""
    if value != 1 or not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"want version: 1, got {shown(value)}")
    return 1


def number_or(word: str, most: int, default: str | int | None) -> Read:
    """Return the annotation of a whole number from 1 on, or of a word that means `default`."""

    def check(value: object) -> str | int | None:
        if value == word:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most:
            return value
        raise ValueError(f"want {word}, or a whole number from 1 to {most}; got {shown(value)}")

    schema = [
        {"type": "integer", "minimum": 1, "maximum": most},
        {"type": "string", "const": word},
    ]
    return Read(check, {"anyOf": schema}, lambda value: word if value == default else value)


def _quantity(
    kind: Quantity,
    parse: Callable[[object], float] | None = None,
    write: Callable[[float], str] | None = None,
    *,
    positive: bool = False,
) -> Read:
    """Return the annotation of a field of that quantity."""

    def read(value: object) -> float:
        number = (parse or kind.number)(value)
        if positive and number <= 0:
            raise ValueError(f"must be more than 0, got {shown(value)}")
        return number

    schema = {"type": "string", "pattern": kind.pattern, "examples": [kind.example]}
    return Read(read, schema, write)


def float32_size(low_bytes: int, high_bytes: int) -> Read:
    """Return the annotation of a size of whole float32s within bounds."""

    def read(value: object) -> int:
        size_bytes = units.parse_size(value)
        if not low_bytes <= size_bytes <= high_bytes:
            low, high = units.format_size(low_bytes), units.format_size(high_bytes)
            raise ValueError(f"want {low} to {high}, got {shown(value)}")
        if size_bytes % 4:
            raise ValueError(f"want a multiple of 4 bytes (float32), got {shown(value)}")
        return size_bytes

    return Read(read, _quantity(units.SIZE).schema, units.format_size)


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


_FRACTION_SCHEMA = {
    "anyOf": [
        {"type": "number", "minimum": 0, "maximum": 1},
        {"type": "string", "pattern": r"^[0-9]{1,18}(\.[0-9]{1,18})?%$", "examples": ["0.01%"]},
    ]
}


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
Version = Annotated[int, Read(_version_one, {"const": 1})]
Name = Annotated[str, Checked(_name, {"type": "string", "pattern": NAME_PATTERN})]
Argument = Annotated[str, Bounds(min_length=1, max_length=4096), Checked(_argument)]
"""A word of a command line that is passed on as it is."""
Text = Annotated[str, Bounds(min_length=1, max_length=4096), Checked(_line)]
"""One line: it may become part of a file, a header or a message."""
Word = Annotated[Text, Checked(_word)]
"""One line that a program may be given as an argument of its own."""
Count = Annotated[int, Bounds(ge=1, le=1_000_000)]
Duration = Annotated[float, _quantity(units.DURATION, write=units.format_duration)]
PositiveDuration = Annotated[
    float, _quantity(units.DURATION, write=units.format_duration, positive=True)
]
Rate = Annotated[float, _quantity(units.RATE, positive=True)]
Size = Annotated[int, _quantity(units.SIZE, units.parse_size, units.format_size, positive=True)]
Distance = Annotated[float, _quantity(units.DISTANCE)]
Compute = Annotated[float, _quantity(units.COMPUTE, positive=True)]
Budget = Annotated[float, _quantity(units.BUDGET, positive=True)]
PricePerHour = Annotated[float, _quantity(units.PRICE_PER_HOUR)]
PricePerByte = Annotated[float, _quantity(units.PRICE_PER_BYTE)]
Loss = Annotated[float, Read(_loss, _FRACTION_SCHEMA)]
Share = Annotated[float, Read(_share, _FRACTION_SCHEMA, units.format_fraction)]
Number = Annotated[float, Bounds(allow_inf_nan=False)]
Positive = Annotated[float, Bounds(allow_inf_nan=False, gt=0)]
NotNegative = Annotated[float, Bounds(allow_inf_nan=False, ge=0)]
BelowOne = Annotated[float, Bounds(allow_inf_nan=False, ge=0, lt=1)]
