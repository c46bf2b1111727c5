"""The kinds of value that both documents are made of, as pydantic reads them.

Strict: a text is not a number, `no` is not false, and a quantity has its unit. Each kind carries
the JSON Schema that an editor shows.
"""

import re
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
)

from topology import units
from topology.suggest import did_you_mean, one_of, shown
from topology.units import Quantity

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$"
"""Names become folders and labels."""


class Strict(BaseModel):
    """A mapping whose keys are all known and whose values have exactly their types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True)


class KeyedError(ValueError):
    """What is wrong with a mapping as a whole, to be told at one of its keys."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def choice(
    words: tuple[str, ...], *, later: tuple[str, ...] = ()
) -> tuple[PlainValidator, WithJsonSchema]:
    """Return what makes a field take one of `words`; those of `later` are known, and refused."""

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
    kind: Quantity, parse: Callable[[object], float], *, positive: bool = False
) -> tuple[PlainValidator, WithJsonSchema]:
    """Return what makes a field read that quantity, and describe itself to an editor."""

    def read(value: object) -> float:
        number = parse(value)
        if positive and number <= 0:
            raise ValueError(f"must be more than 0, got {shown(value)}")
        return number

    schema = {"type": "string", "pattern": kind.pattern, "examples": [kind.example]}
    return PlainValidator(read), WithJsonSchema(schema)


def float32_size(low_bytes: int, high_bytes: int) -> PlainValidator:
    """Return what makes a field read a size of whole float32s within those bounds."""

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

Name = Annotated[
    str, AfterValidator(_name), WithJsonSchema({"type": "string", "pattern": NAME_PATTERN})
]
Text = Annotated[str, Field(min_length=1, max_length=4096)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Duration = Annotated[float, *_quantity(units.DURATION, units.parse_duration)]
PositiveDuration = Annotated[float, *_quantity(units.DURATION, units.parse_duration, positive=True)]
Rate = Annotated[float, *_quantity(units.RATE, units.parse_rate, positive=True)]
Size = Annotated[int, *_quantity(units.SIZE, units.parse_size, positive=True)]
SIZE_SCHEMA = WithJsonSchema(
    {"type": "string", "pattern": units.SIZE.pattern, "examples": [units.SIZE.example]}
)
Distance = Annotated[float, *_quantity(units.DISTANCE, units.parse_distance)]
Compute = Annotated[float, *_quantity(units.COMPUTE, units.parse_compute, positive=True)]
PricePerHour = Annotated[float, *_quantity(units.PRICE_PER_HOUR, units.parse_price_per_hour)]
PricePerByte = Annotated[float, *_quantity(units.PRICE_PER_BYTE, units.parse_price_per_byte)]
Fraction = Annotated[float, PlainValidator(units.parse_fraction), _FRACTION_SCHEMA]
Share = Annotated[float, PlainValidator(_share), _FRACTION_SCHEMA]
Number = Annotated[float, Field(allow_inf_nan=False)]
