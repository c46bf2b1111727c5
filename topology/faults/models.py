"""The fault script as a user writes it. topology/faults/references.py says what goes with what."""

from typing import Annotated

from pydantic import Field, PlainValidator, WithJsonSchema

from topology.faults.script import Span
from topology.suggest import shown
from topology.text.fields import Duration, Fraction, Rate, Strict, version_one
from topology.units import DURATION, parse_duration

MAX_FAULTS = 1000


def parse_span(value: object) -> Span:
    """Return a time, or a range of times as `8s..10s`; ValueError for anything else."""
    low, dots, high = value.partition("..") if isinstance(value, str) else (value, "", "")
    if not dots:
        time_s = parse_duration(value)
        return Span(time_s, time_s)
    span = Span(parse_duration(low), parse_duration(high))
    if span.low_s > span.high_s:
        raise ValueError(f"want the earlier time first, got {shown(value)}")
    return span


def _lasting(value: object) -> Span:
    span = parse_span(value)
    if span.low_s < SHORTEST_S:
        raise ValueError(f"want at least 1ms, got {shown(value)}")
    return span


def _healed(value: object) -> tuple[str, ...]:
    """Return nothing for `all`, else two names."""
    if value == "all":
        return ()
    if isinstance(value, list) and len(value) == 2 and all(isinstance(each, str) for each in value):
        return tuple(value)
    raise ValueError(f"want all, or two sites as [a, b]; got {shown(value)}")


SHORTEST_S = 0.001
"""Of what lasts: an emulator can hardly do less, and a flap's cuts must come to an end."""

_TIME = DURATION.pattern.strip("^$")
_SPAN_SCHEMA = WithJsonSchema(
    {"type": "string", "pattern": rf"^{_TIME}(\.\.{_TIME})?$", "examples": ["5s", "8s..10s"]}
)
_HEAL_SCHEMA = WithJsonSchema(
    {
        "anyOf": [
            {"const": "all"},
            {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 2},
        ]
    }
)
When = Annotated[Span, PlainValidator(parse_span), _SPAN_SCHEMA]
Lasting = Annotated[Span, PlainValidator(_lasting), _SPAN_SCHEMA]
Healed = Annotated[tuple[str, ...], PlainValidator(_healed), _HEAL_SCHEMA]
Ends = Annotated[list[str], Field(min_length=2, max_length=2)]
Groups = Annotated[list[Annotated[list[str], Field(min_length=1)]], Field(min_length=2)]


class FaultModel(Strict):
    """One fault: a time, exactly one action, and what belongs to it."""

    at: Annotated[When, Field(description="Since the script began; a range is drawn from.")]
    link: Annotated[Ends | None, Field(description="Other figures: rate, rtt, jitter, loss.")] = (
        None
    )
    partition: Annotated[
        Groups | None, Field(description="Cut every link between sites of different groups.")
    ] = None
    cut: Annotated[Ends | None, Field(description="Nothing arrives, and nobody is told.")] = None
    flap: Annotated[Ends | None, Field(description="Cut again and again: down, up, for.")] = None
    heal: Annotated[
        Healed | None, Field(description="End what has been done to a link, or to all.")
    ] = None
    pause: Annotated[str | None, Field(description="Stop all processes of a site.")] = None
    reset: Annotated[Ends | None, Field(description="Reset the connections of two sites.")] = None
    half_open: Annotated[
        Ends | None, Field(description="Close the first site's ends; the second is not told.")
    ] = None
    for_: Annotated[
        Lasting | None, Field(alias="for", description="How long; else until it is healed.")
    ] = None
    oneway: Annotated[bool | None, Field(description="From the first site to the second only.")] = (
        None
    )
    rate: Rate | None = None
    rtt: Annotated[Duration | None, Field(description="There and back: half of it each way.")] = (
        None
    )
    jitter: Duration | None = None
    loss: Fraction | None = None
    up: Annotated[Lasting | None, Field(description="Of a flap, between two cuts.")] = None
    down: Annotated[Lasting | None, Field(description="Of a flap, of each cut.")] = None


class FaultsModel(Strict):
    """A fault script: what happens to the emulated WAN, and when."""

    version: Annotated[int, PlainValidator(version_one), WithJsonSchema({"const": 1})]
    seed: Annotated[int, Field(ge=0, lt=1 << 63, description="Of every time that is drawn.")] = 0
    faults: Annotated[list[FaultModel], Field(min_length=1, max_length=MAX_FAULTS)]
