"""Pydantic models of a job's `regime` section as a user writes it."""

from __future__ import annotations

import math
from typing import Annotated, Self

from pydantic import (
    BeforeValidator,
    Field,
    GetJsonSchemaHandler,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from isthmus.topology.spec.regime import (
    ALPHA,
    DELAY,
    FRAGMENTS_MAX,
    KINDS,
    LOCAL,
    MOMENTUM,
    SYNC_EVERY,
    OuterOptimizer,
    Regime,
    regime_of,
)
from isthmus.topology.spec.suggest import one_of, shown
from isthmus.topology.text.validation import BelowOne, Count, KeyedError, Strict, choice, default


def _outer_lr(value: object) -> float | None:
    """Return an outer learning rate; None for `auto`."""
    if value == "auto":
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(value)
    raise ValueError(f"want auto, or a number more than 0; got {shown(value)}")


OuterLr = Annotated[
    float | None,
    PlainValidator(_outer_lr),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0},
                {"type": "string", "const": "auto"},
            ]
        }
    ),
]
_OUTER = OuterOptimizer()
_REGIME = Regime()


class OuterModel(Strict):
    """SGD with Nesterov momentum over the rounds of diloco and streaming."""

    lr: OuterLr = default("auto", "auto: by the number of sites and sync_every.")
    momentum: Annotated[BelowOne | None, Field(description=f"Else {MOMENTUM}.")] = _OUTER.momentum
    ramp_steps: Annotated[
        int,
        Field(
            ge=0,
            le=1_000_000_000,
            description="Inner steps over which lr goes from 1 and momentum from 0 to their values.",
        ),
    ] = _OUTER.ramp_steps


class RegimeModel(Strict):
    """How often sites exchange, and what."""

    kind: Annotated[str, *choice(KINDS)]
    sync_every: Annotated[
        Count | None,
        Field(description=f"Inner steps between two rounds; else {SYNC_EVERY}."),
    ] = None
    outer: OuterModel = Field(default_factory=OuterModel)
    fragments: Annotated[
        int | None,
        Field(
            ge=1,
            description="Of streaming: parts of the model that are exchanged in turn; else the "
            f"largest divisor of sync_every up to {FRAGMENTS_MAX}.",
        ),
    ] = None
    delay: Annotated[
        int | None,
        Field(
            ge=0,
            description="Of streaming: steps from a fragment's sending to its landing, less than "
            f"sync_every / fragments; else {DELAY}, or what is possible.",
        ),
    ] = None
    alpha: Annotated[
        BelowOne | None,
        Field(
            description="Of streaming: share of the site's own value that stays at a landing; "
            f"else {ALPHA}."
        ),
    ] = None
    look: Annotated[
        bool, Field(description="Of delayed: gradients are computed at a look-ahead point.")
    ] = _REGIME.look

    @model_validator(mode="after")
    def _keys_fit_the_kind(self) -> Self:
        for key, kinds in _KINDS_WITH.items():
            if key in self.model_fields_set and self.kind not in kinds:
                raise KeyedError(
                    key, f"has no use with kind: {self.kind}, only with {one_of(kinds)}"
                )
        return self

    @model_validator(mode="after")
    def _fragments_fit_the_round(self) -> Self:
        if self.kind != "streaming":
            return self
        regime = self.resolved()
        period, parts = regime.sync_every, regime.fragments
        if parts > period:
            raise KeyedError(
                "fragments",
                f"want at most sync_every, {period}: a step sends one at most; got {parts}",
            )
        if period % parts:
            raise KeyedError("fragments", f"want a divisor of sync_every, {period}; got {parts}")
        if regime.delay >= period // parts:
            raise KeyedError(
                "delay",
                f"want less than sync_every / fragments, {period // parts}: a fragment lands "
                f"before the next one is sent; got {regime.delay}",
            )
        return self

    def resolved(self) -> Regime:
        """Return the regime with the kind's defaults."""
        return regime_of(
            self.kind,
            sync_every=self.sync_every,
            outer=OuterOptimizer(**self.outer.model_dump()),
            fragments=self.fragments,
            delay=self.delay,
            alpha=self.alpha,
            look=self.look,
        )


_KINDS_WITH = {
    "sync_every": LOCAL,
    "outer": ("diloco", "streaming"),
    "fragments": ("streaming",),
    "delay": ("streaming",),
    "alpha": ("streaming",),
    "look": ("delayed",),
}
"""The kinds that take a key."""


def _kind_alone(value: object) -> object:
    """Return a kind's word as a mapping, and a mapping unchanged."""
    return value if isinstance(value, dict | RegimeModel) else {"kind": value}


class _OrKindSchema:
    """Adds the words of kinds to a mapping's JSON Schema."""

    def __get_pydantic_json_schema__(
        self, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"anyOf": [{"type": "string", "enum": list(KINDS)}, handler(core_schema)]}


Regimes = Annotated[RegimeModel, BeforeValidator(_kind_alone), _OrKindSchema()]
