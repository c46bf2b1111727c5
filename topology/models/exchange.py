"""How gradients cross, and who sums them, as a job says it. Defaults are those of topology.job."""

from typing import Annotated, Self

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from topology.job import CODECS, NON_FINITE, SCHEDULES, TREES, Exchange, Reduction
from topology.suggest import shown
from topology.text.fields import (
    SIZE_SCHEMA,
    KeyedError,
    Size,
    Strict,
    Text,
    choice,
    default,
    float32_size,
)
from topology.trees.trees import TREES_MAX, WEIGHT_MAX
from topology.units import format_size

_EXCHANGE = Exchange()
_REDUCTION = Reduction()
EXACT_MAX = 64
"""Patterns of names in a job."""
LINK_CODECS_MAX = 1000
"""Links with codecs of their own."""
CHANNELS_MAX = 32
"""Of one link, as a job may name it."""


def _channels(value: object) -> int | None:
    """Return a number of connections; None for `auto`."""
    if value == "auto":
        return None
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= CHANNELS_MAX:
        return value
    raise ValueError(f"want auto, or a whole number from 1 to {CHANNELS_MAX}; got {shown(value)}")


Chunk = Annotated[int, float32_size(64 << 10, 16 << 20), SIZE_SCHEMA]
"""A chunk is one frame of protos/frame.py, whose payload ends below 17 MiB: 16 MiB leaves room for
any codec's overhead. Under 64 KiB the cost of a message outweighs its bytes."""
Channels = Annotated[
    int | None,
    PlainValidator(_channels),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1, "maximum": CHANNELS_MAX},
                {"type": "string", "const": "auto"},
            ]
        }
    ),
]
Bucket = Annotated[int, float32_size(64 << 10, 1 << 30), SIZE_SCHEMA]


class LinkCodecModel(Strict):
    """The codec of one link."""

    between: Annotated[
        list[Text], Field(min_length=2, max_length=2, description="Two sites; both ways alike.")
    ]
    codec: Annotated[str, *choice(CODECS)]


class ExchangeModel(Strict):
    """How gradients cross the WAN."""

    codec: Annotated[str, *choice(CODECS)] = _EXCHANGE.codec
    codecs: list[LinkCodecModel] = Field(
        default_factory=list,
        max_length=LINK_CODECS_MAX,
        description="Of links that have their own: a tree takes the smallest of its links'.",
    )
    exact: list[Text] = Field(
        default_factory=list,
        max_length=EXACT_MAX,
        description="Patterns of parameters' names, as '*norm*': their gradients are not rounded, "
        "nor are those of one dimension.",
    )
    error_feedback: Annotated[
        bool, Field(description="Add what a lossy codec loses of a gradient to the next one.")
    ] = _EXCHANGE.error_feedback
    non_finite: Annotated[
        str,
        *choice(NON_FINITE),
        Field(
            description="A NaN or an infinity among the gradients crosses unchanged, "
            "or ends the run."
        ),
    ] = _EXCHANGE.non_finite
    chunk: Chunk = default(
        format_size(_EXCHANGE.chunk_bytes),
        "Of float32, before the codec: 64KiB to 16MiB. "
        "Unit of checksums, scheduling and reduction.",
    )
    channels_per_link: Channels = default(
        "auto",
        "TCP connections between each two gateways, exactly so many; auto: what fills the link, "
        "and more where packets are lost, up to the link's max_flows.",
    )
    bucket: Bucket = default(
        format_size(_EXCHANGE.bucket_bytes), "Of float32 a DDP bucket, in the shipped trainer."
    )
    window: Annotated[
        Size | None,
        Field(description="Unacknowledged bytes a peer; else from bandwidth times RTT."),
    ] = None
    schedule: Annotated[str, *choice(SCHEDULES)] = _EXCHANGE.schedule

    @model_validator(mode="after")
    def _window_holds_a_chunk(self) -> Self:
        if self.window is not None and self.window < self.chunk:
            raise KeyedError("window", f"want at least the chunk, {format_size(self.chunk)}")
        return self


class TreeModel(Strict):
    """One reduction tree over all sites."""

    root: Annotated[Text, Field(description="The site that forms the whole sum.")]
    parents: Annotated[
        dict[str, Text],
        Field(min_length=1, description="Whom each other site sends its sum to."),
    ]
    weight: Annotated[
        int,
        Field(ge=1, le=WEIGHT_MAX, description="Share of the chunks, relative to the other trees."),
    ] = 1


class ReductionModel(Strict):
    """Which sites sum, and where."""

    tree: Annotated[str, *choice(TREES)] = _REDUCTION.tree
    hub: Annotated[str | None, Field(description="The star's centre.")] = _REDUCTION.hub
    groups: list[Annotated[list[Text], Field(min_length=1)]] = Field(
        default_factory=list,
        description="Of a hierarchy: sites near each other; by their round trips when absent.",
    )
    trees: list[TreeModel] = Field(
        default_factory=list,
        max_length=TREES_MAX,
        description="Instead of a form: exactly these, each over all sites.",
    )

    @model_validator(mode="after")
    def _keys_fit_the_form(self) -> Self:
        if self.hub is not None and self.tree not in ("auto", "star"):
            raise KeyedError("hub", f"has no use with tree: {self.tree}")
        if self.groups and self.tree != "hierarchy":
            raise KeyedError("groups", f"has no use with tree: {self.tree}; want tree: hierarchy")
        if self.trees and (self.tree != "auto" or self.hub is not None):
            other = "hub" if self.hub is not None else f"tree: {self.tree}"
            raise KeyedError("trees", f"has no use with {other}: the trees say it all")
        return self
