"""Pydantic models of the plan file. Decisions have the same limits as in a job."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from isthmus.topology.spec.codec_names import CODECS
from isthmus.topology.spec.job import (
    BUCKET,
    CHANNELS,
    CHUNK,
    LINK_CODECS_MAX,
    LinkCodec,
    Placed,
    Reduction,
)
from isthmus.topology.spec.regime import Regime
from isthmus.topology.spec.yaml_keys import Count, NotNegative, Text, Version, choice
from isthmus.topology.spec.yaml_models import Strict

Seconds = NotNegative
Share = NotNegative
Dollars = NotNegative


class MadeForModel(Strict):
    """Hashes of the plan's job and topology: isthmus.topology.spec.hashing.plan_hashes."""

    job: Text
    topology: Text


class DecidedExchangeModel(Strict):
    """The decisions on how gradients cross."""

    codec: Annotated[str, choice(CODECS)]
    codecs: Annotated[list[LinkCodec], Field(max_length=LINK_CODECS_MAX)] = Field(
        default_factory=list
    )
    """Codecs of links that have their own; empty: those of the job."""
    chunk: Annotated[int, CHUNK]
    bucket: Annotated[int, BUCKET]
    channels_per_link: Annotated[int | None, CHANNELS]


class DecisionsModel(Strict):
    """The decisions that a launch with this plan carries out."""

    placement: Annotated[list[Placed], Field(min_length=1)]
    exchange: DecidedExchangeModel
    reduction: Reduction
    micro_batch: Count | None = None
    regime: Regime | None = None


class PredictedModel(Strict):
    """The predicted step."""

    step_s: Seconds
    compute_s: Seconds
    """Compute seconds of the slowest site."""
    exchange_s: Seconds
    """Seconds of an exchange without overlap."""
    efficiency: Share
    """Tokens per second as a share of the sum of the sites alone."""
    tokens_per_s: Share
    egress_bytes_per_step: Share
    usd_per_step: Dollars
    egress_usd_per_step: Dollars = 0.0
    """US dollars of what a step sends; part of `usd_per_step`."""
    fp32_egress_usd_per_step: Dollars = 0.0
    """The same if all of it crossed as float32."""
    egress_usd_per_run: Dollars | None = None
    """For all steps of the job; absent: its script decides how many."""


class AlternativeModel(Strict):
    """Another plan that was considered."""

    what: Text
    step_s: Seconds
    usd_per_step: Dollars


class SiteModel(Strict):
    """One site of the topology, taking part or not."""

    site: Text
    sequences: Annotated[int, Field(ge=0)]
    compute_s: Seconds
    step_s_otherwise: Seconds | None = None
    """Seconds of the step without this site, or with it if it takes no part; absent if
    impossible."""


class LinkModel(Strict):
    """One link between sites that take part."""

    between: Annotated[list[Text], Field(min_length=2, max_length=2)]
    busy: Share
    """Share of a step that the link is busy, in the busier direction."""
    step_s_with_one_more_gbit_s: Seconds
    codecs: list[Text] = Field(default_factory=list)
    """The codecs of the chunks that cross the link."""
    connections: Annotated[int, Field(ge=0)] = 0
    """Number of connections that each two gateways begin with."""
    connections_because: Text = "not said"
    egress_usd_per_step: Dollars = 0.0
    """US dollars of what a step sends, both directions together."""


class FrontModel(Strict):
    """A cut that no other beats in time and memory."""

    cut: Text
    alone_s: Seconds
    memory_bytes: Share


class InsideModel(Strict):
    """The inside of a site that takes part, where the job describes its model."""

    site: Text
    cut: Text
    micro_batches: Count
    alone_s: Seconds
    """Seconds of a step without other sites; `busy_s` to `optimizer_s` are its parts."""
    busy_s: Seconds
    """Seconds of the slowest stage's layers, with `collectives_s` of tensor, context, expert
    groups."""
    collectives_s: Seconds
    transfers_s: Seconds
    bubble_s: Seconds
    exposed_s: Seconds
    """Seconds of the replicas' own exchange that nothing hides."""
    optimizer_s: Seconds
    window_s: Seconds
    """Seconds of backward pass that hide leaving gradients."""
    memory_bytes: Share
    memory_of_bytes: Share
    fullest_node: Share
    """Share of all gradients that crosses the fullest node's gateway."""
    mfu: Share
    """Model FLOPs utilisation in the joint step."""
    front: list[FrontModel]
    too_large: list[Text]
    """Faster cuts that do not fit, with the reasons."""


class InputModel(Strict):
    """An input figure of the plan."""

    what: Text
    value: Text
    origin: Text


class PlanFileModel(Strict):
    """A plan file."""

    version: Version
    made_for: MadeForModel
    decisions: DecisionsModel
    predicted: PredictedModel
    binding: Text
    why: list[Text]
    warnings: list[Text]
    alternatives: list[AlternativeModel]
    sites: list[SiteModel]
    links: list[LinkModel]
    inside: list[InsideModel] = Field(default_factory=list)
    inputs: list[InputModel]
