"""Quantities with units: `80ms`, `1Gbit/s`, `4MiB`, `0.01%`, `900km`, `2.5USD/h`, `989TFLOP/s`.

A number without a unit is never taken where a unit is needed: milliseconds read as seconds are
the classic mistake of configuration files. Arithmetic is exact (fractions) until the last step,
which rounds once to a float or to a whole number of bytes.

Inside isthmus everything is in base units: seconds, bytes, bytes per second, kilometres, US
dollars.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from isthmus.topology.spec.suggest import one_of, shown


class UnitError(ValueError):
    """A text is not the expected quantity; the message lists the units."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """A kind of quantity, with its units in base units, largest last."""

    noun: str
    """Noun with article for messages: `a duration`."""
    units: Mapping[str, Fraction]
    example: str

    @property
    def pattern(self) -> str:
        """Return a regular expression (also valid in ECMAScript) of accepted texts."""
        return rf"^{_NUMBER} ?({'|'.join(re.escape(unit) for unit in self.units)})$"

    def parse(self, value: object) -> Fraction:
        """Return `value` in base units.

        Raises:
            UnitError: the value is not a text of a number and a unit.
        """
        if not isinstance(value, str):
            lacks_unit = isinstance(value, int | float) and value is not True
            hint = " without a unit" if lacks_unit else ""
            raise UnitError(f"{self._wanted}; got {shown(value)}{hint}")
        found = _SPLIT.fullmatch(value)
        if found is None:
            raise UnitError(f"{self._wanted}; got {shown(value)}")
        number, unit = found["number"], found["unit"]
        if number.startswith("-"):
            raise UnitError(f"must not be negative: {shown(value)}")
        if not unit:
            raise UnitError(f"{self._wanted}; got {shown(value)} without a unit")
        if unit not in self.units:
            meant = _meant(unit, self.units)
            hint = f" (did you mean {one_of(meant)}?)" if meant else ""
            raise UnitError(f"unknown unit {shown(unit)}{hint}: {self._wanted}")
        return Fraction(number) * self.units[unit]

    def number(self, value: object) -> float:
        """Return `value` in base units as a float; UnitError if it is no such quantity."""
        return float(self.parse(value))

    @property
    def _wanted(self) -> str:
        return f"want {self.noun} in {', '.join(self.units)}, as {self.example}"


_NUMBER = r"[0-9]{1,18}(\.[0-9]{1,18})?"
_SPLIT = re.compile(rf"(?P<number>-?{_NUMBER}) ?(?P<unit>[^0-9\s.,][^\s]{{0,15}})?")
_PER_SECOND = ("/s", "ps", "/sec", "/second")
_SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "ns": ("nsec", "nsecs", "nanosecond", "nanoseconds"),
    "us": ("\N{MICRO SIGN}s", "\N{GREEK SMALL LETTER MU}s", "usec", "usecs", "microseconds"),
    "ms": ("msec", "msecs", "millisecond", "milliseconds"),
    "s": ("sec", "secs", "second", "seconds"),
    "min": ("m", "mins", "minute", "minutes"),
    "h": ("hr", "hrs", "hour", "hours"),
    "m": ("meter", "meters", "metre", "metres"),
    "km": ("kms", "kilometer", "kilometers", "kilometre", "kilometres"),
    "USD/h": ("$/h", "$/hr", "USD/hr", "USD/hour", "$/hour"),
    "USD/day": ("$/day", "USD/d", "$/d"),
    "USD/month": ("$/month",),
    "USD/GB": ("$/GB",),
    "USD/GiB": ("$/GiB",),
    "USD/TB": ("$/TB",),
    "USD/TiB": ("$/TiB",),
}
"""Unprefixed units with other common spellings, used only for suggestions."""
_PREFIXED = re.compile(r"(?P<prefix>[kMGTP]?i?)(?P<what>bit|B|FLOP)(?P<per>/s)?")


def _spellings(unit: str) -> tuple[str, ...]:
    """Return other common spellings of a unit.

    Lower-case spellings are ambiguous: they are compared without case, with all readings.
    """
    parts = _PREFIXED.fullmatch(unit)
    if parts is None:
        return _SPELLINGS.get(unit, ())
    prefix, what, per = parts["prefix"], parts["what"], parts["per"]
    if what == "FLOP":
        return tuple(f"{prefix}FLOP{end}" for end in ("", "S", "s", "ps", "/sec"))
    names = ("b", "bit", "bits") if what == "bit" else ("B", "Byte", "Bytes")
    if per is None:
        return (*(f"{prefix}{each}" for each in names), *prefix[:1])
    written = tuple(f"{prefix}{name}{end}" for name in names for end in ("", *_PER_SECOND))
    loose = f"{prefix}{what[0]}s".lower(), prefix.lower()  # 10 Mbs, 10 M: bits or bytes?
    return written + loose


def _meant(written: str, units: Iterable[str]) -> list[str]:
    """Return the units that a word may mean, of the same size, currency and kind."""
    words = {unit: (unit, *_spellings(unit)) for unit in units}
    if exact := [unit for unit, spelled in words.items() if written in spelled]:
        return exact
    folded = written.casefold()
    alike = [
        unit for unit, spelled in words.items() if folded in (each.casefold() for each in spelled)
    ]
    # A small b beside a capital is a bit: where there is no such unit, a byte is not meant.
    is_bit = "b" in written and written != folded
    return [] if is_bit and not any("bit" in unit for unit in alike) else alike


def _decimal(prefixes: str, unit: str, base: Fraction = Fraction(1)) -> dict[str, Fraction]:
    """Return `unit` with each decimal prefix, in base units; a space means no prefix."""
    powers = {" ": 0, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5}
    return {f"{prefix.strip()}{unit}": base * 1000 ** powers[prefix] for prefix in prefixes}


def _binary(unit: str) -> dict[str, Fraction]:
    return {f"{prefix}i{unit}": Fraction(1024**power) for power, prefix in enumerate("KMGT", 1)}


DURATION = Quantity(
    "a duration",
    {
        "ns": Fraction(1, 10**9),
        "us": Fraction(1, 10**6),
        "ms": Fraction(1, 10**3),
        "s": Fraction(1),
        "min": Fraction(60),
        "h": Fraction(3600),
    },
    "80ms",
)
RATE = Quantity(
    "a rate",
    {**_decimal(" kMGT", "bit/s", Fraction(1, 8)), **_decimal(" kMGT", "B/s"), **_binary("B/s")},
    "1Gbit/s",
)
SIZE = Quantity("a size", {**_decimal(" kMGT", "B"), **_binary("B")}, "4MiB")
DISTANCE = Quantity("a distance", {"m": Fraction(1, 1000), "km": Fraction(1)}, "900km")
COMPUTE = Quantity("a compute rate", _decimal(" kMGTP", "FLOP/s"), "989TFLOP/s")
BDP = Quantity("a queue", {"BDP": Fraction(1)}, "0.5BDP")
"""Queue sizes in bandwidth-delay products of a link."""
PRICE_PER_HOUR = Quantity("a price", {"USD/h": Fraction(1)}, "2.5USD/h")
BUDGET = Quantity(
    "a budget",
    {
        "USD/h": Fraction(1, 3600),
        "USD/day": Fraction(1, 86_400),
        "USD/month": Fraction(1, 30 * 86_400),
    },
    "200USD/day",
)
"""Base unit: US dollars a second. A month has 30 days."""
PRICE_PER_BYTE = Quantity(
    "a price",
    {
        "USD/GB": Fraction(1, 10**9),
        "USD/GiB": Fraction(1, 2**30),
        "USD/TB": Fraction(1, 10**12),
        "USD/TiB": Fraction(1, 2**40),
    },
    "0.02USD/GB",
)
_PERCENT = Quantity("a share", {"%": Fraction(1, 100)}, "0.01%")


parse_duration = DURATION.number
parse_rate = RATE.number


def parse_size(value: object) -> int:
    """Return whole bytes; UnitError when `value` is no size, or ends within a byte."""
    size = SIZE.parse(value)
    if size.denominator != 1:
        raise UnitError(f"{shown(value)} is not a whole number of bytes")
    return int(size)


def parse_fraction(value: object) -> float:
    """Return a share of 0 to 1, from a number in that range or a text such as `0.01%`.

    Raises:
        UnitError: the value is neither, or not between 0 and 1.
    """
    wanted = "want a share of 0 to 1, or 0% to 100%"
    if isinstance(value, str):
        try:
            share = float(_PERCENT.parse(value))
        except UnitError as error:
            raise UnitError(f"{wanted}; got {shown(value)}") from error
    elif isinstance(value, int | float) and not isinstance(value, bool):
        share = float(value)
    else:
        raise UnitError(f"{wanted}; got {shown(value)}")
    if not 0 <= share <= 1:
        raise UnitError(f"{wanted}; got {shown(value)}")
    return share


def format_duration(duration_s: float) -> str:
    """Return `80ms`, with four significant digits; `parse_duration` reads it back."""
    for unit, limit_s in (("ns", 1e-6), ("us", 1e-3), ("ms", 1.0), ("s", 120.0), ("min", 7200.0)):
        if 0 < duration_s < limit_s:
            return f"{_number(duration_s / float(DURATION.units[unit]))}{unit}"
    return f"{_number(duration_s / 3600)}h" if duration_s else "0s"


def format_rate(bytes_per_s: float) -> str:
    """Return `1Gbit/s`, with four significant digits; `parse_rate` reads it back."""
    return _scaled(bytes_per_s * 8, 1000, ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"))


def format_size(num_bytes: float) -> str:
    """Return `4MiB`, with four significant digits; `parse_size` reads whole ones back."""
    return _scaled(num_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def format_fraction(share: float) -> str:
    """Return `0.01%`, with four significant digits; `parse_fraction` reads it back."""
    return f"{_number(share * 100)}%"


def format_distance(distance_km: float) -> str:
    """Return `900km`, with four significant digits; `parse_distance` reads it back."""
    return f"{_number(distance_km)}km"


def _scaled(value: float, base: int, units: tuple[str, ...]) -> str:
    """Return `value` in the largest unit that gives at least 1, after rounding."""
    power = 0
    while power < len(units) - 1 and float(f"{value / base**power:.4g}") >= base:
        power += 1
    return f"{_number(value / base**power)}{units[power]}"


def _number(value: float) -> str:
    """Return four significant digits in plain decimals, without trailing zeros."""
    if value == 0:
        return "0"
    decimals = max(0, 3 - math.floor(math.log10(abs(value))))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def significant(value: float, num_digits: int) -> float:
    """Return a figure rounded to `num_digits` significant digits, for people."""
    return float(f"{value:.{num_digits}g}")
