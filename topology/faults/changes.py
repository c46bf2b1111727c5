"""What can be done to an emulation that runs: changes of links, and pauses of sites.

Emulators import this in processes of their own, so it needs nothing but the standard library.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from topology.errors import ConfigError
from topology.units import format_duration, format_fraction, format_rate

KINDS = ("shape", "cut", "heal", "reset", "half_open")
FIGURES = ("bytes_per_s", "delay_s", "jitter_s", "loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of one directed link; ConfigError when its fields contradict each other."""

    kind: str
    """`shape`: other figures, those that are None stay. `cut`: nothing arrives, nobody is told.
    `heal`: no longer cut, and all figures as configured. `reset`: every connection across it is
    reset. `half_open`: the source's end of every connection is closed, the target is not told."""
    source: str
    target: str
    bytes_per_s: float | None = None
    delay_s: float | None = None
    """One way."""
    jitter_s: float | None = None
    loss: float | None = None
    """Share of the packets, 0 to 1."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"kind: want one of {', '.join(KINDS)}; got {self.kind!r}")
        if self.source == self.target:
            raise ConfigError(f"target: want another site than the source, {self.source!r}")
        figures = self.figures()
        if bool(figures) != (self.kind == "shape"):
            some = "at least one of" if self.kind == "shape" else "none of"
            raise ConfigError(f"{self.kind}: want {some} {', '.join(FIGURES)}")
        for name, value in figures.items():
            if not math.isfinite(value) or value < 0 or (name == "bytes_per_s" and value == 0):
                least = "more than 0" if name == "bytes_per_s" else "0 or more"
                raise ConfigError(f"{name}: want {least}, got {value!r}")
        if self.loss is not None and self.loss > 1:
            raise ConfigError(f"loss: want 0 to 1, got {self.loss!r}")

    def figures(self) -> dict[str, float]:
        """Return what a `shape` changes, by name; empty for the other kinds."""
        values = ((name, getattr(self, name)) for name in FIGURES)
        return {name: value for name, value in values if value is not None}

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values; figures that stay are left out."""
        return {
            "kind": self.kind,
            "source": self.source,
            "target": self.target,
            **self.figures(),
        }

    @classmethod
    def from_json(cls, value: object, where: str = "change") -> "Change":
        """Return what `to_json` wrote; for anything else ConfigError, which begins with `where`."""
        fields = _fields(value, where, tuple(each.name for each in dataclasses.fields(cls)))
        for name in FIGURES:
            figure = fields.get(name, 0.0)
            if isinstance(figure, bool) or not isinstance(figure, int | float):
                raise ConfigError(f"{where}.{name}: want a number, got {figure!r:.100}")
        kind, source, target = (_text(fields, name, where) for name in ("kind", "source", "target"))
        try:
            figures = {name: float(fields[name]) for name in FIGURES if name in fields}
            return cls(kind=kind, source=source, target=target, **figures)
        except OverflowError as error:
            raise ConfigError(f"{where}: a number is too large") from error
        except ConfigError as error:
            raise ConfigError(f"{where}.{error.problems[0].message}") from error

    def __str__(self) -> str:
        """Say it in a few words, as `eu -> us: 10Mbit/s, 40ms one way`."""
        words = {
            "cut": "cut",
            "heal": "healed",
            "reset": "connections reset",
            "half_open": f"connections closed at {self.source} only",
        }
        told = words.get(self.kind) or ", ".join(_figure(*each) for each in self.figures().items())
        return f"{self.source} -> {self.target}: {told}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """All processes of a site stop where they are, or go on."""

    site: str
    is_paused: bool
    """False: it goes on."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {"kind": "pause" if self.is_paused else "resume", "site": self.site}

    @classmethod
    def from_json(cls, value: object, where: str = "pause") -> "Pause":
        """Return what `to_json` wrote; for anything else ConfigError, which begins with `where`."""
        fields = _fields(value, where, ("kind", "site"))
        kind = _text(fields, "kind", where)
        if kind not in ("pause", "resume"):
            raise ConfigError(f"{where}.kind: want pause or resume, got {kind!r:.100}")
        return cls(site=_text(fields, "site", where), is_paused=kind == "pause")

    def __str__(self) -> str:
        """Say it in a few words, as `us: paused`."""
        return f"{self.site}: {'paused' if self.is_paused else 'goes on'}"


def _fields(value: object, where: str, names: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: want an object, got {value!r:.100}")
    for name in value:
        if name not in names:
            raise ConfigError(f"{where}: unknown key {name!r:.100}; want {', '.join(names)}")
    return value


def _text(fields: dict[str, Any], name: str, where: str) -> str:
    if name not in fields:
        raise ConfigError(f"{where}: {name} is missing")
    if not isinstance(fields[name], str):
        raise ConfigError(f"{where}.{name}: want a text, got {fields[name]!r:.100}")
    return str(fields[name])


def _figure(name: str, value: float) -> str:
    match name:
        case "bytes_per_s":
            return format_rate(value)
        case "delay_s":
            return f"{format_duration(value)} one way"
        case "jitter_s":
            return f"jitter {format_duration(value)}"
    return f"loss {format_fraction(value)}"
