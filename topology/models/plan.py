"""What a job says of its plan, as a user writes it. Defaults are those of topology.plan_wishes."""

from typing import Annotated, Self

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from topology.job import CODECS
from topology.plan_wishes import GATEWAYS, MICRO_BATCHES, OBJECTIVES, PLAN_SITES, PlanWishes, Replan
from topology.text.fields import KeyedError, PositiveDuration, Share, Strict, choice, default
from topology.units import format_duration, format_fraction

_WISHES = PlanWishes()
_REPLAN = Replan()
REPORTS_S = 0.5
"""Between two reports of a gateway on its links (sites/gateway/gateway.py)."""


class ReplanModel(Strict):
    """When the plan of a run is made again while it goes on."""

    drift: Share = default(
        format_fraction(_REPLAN.drift), "How far a link is off what the plan counts on."
    )
    lasting: PositiveDuration = default(
        format_duration(_REPLAN.lasting_s), "For so long, all the time; 500ms at least."
    )
    gain: Share = default(
        format_fraction(_REPLAN.gain), "Of the predicted step, that other trees have to save."
    )

    @model_validator(mode="after")
    def _is_measured_in_time(self) -> Self:
        if self.lasting < REPORTS_S:
            raise KeyedError(
                "lasting",
                f"want at least {format_duration(REPORTS_S)}, in which gateways report once; "
                f"got {format_duration(self.lasting)}",
            )
        return self


def _off(value: object) -> object:
    """Return nothing for `off`, and anything else as it is."""
    return None if value == "off" else value


class _OrOffSchema:
    """Adds the word to what an editor is told of a mapping."""

    def __get_pydantic_json_schema__(
        self, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"anyOf": [handler(core_schema), {"type": "string", "const": "off"}]}


Replans = Annotated[ReplanModel | None, BeforeValidator(_off), _OrOffSchema()]


class PlanModel(Strict):
    """What `isthmus plan` may decide; with this section, `launch` makes a plan by itself."""

    codecs: Annotated[
        list[Annotated[str, *choice(CODECS)]],
        Field(
            description="To choose from; of equally fast ones the most exact. Else exchange.codec."
        ),
    ] = Field(default_factory=list)
    sites: Annotated[str, *choice(PLAN_SITES)] = _WISHES.sites
    max_sync_period: Annotated[
        int,
        Field(ge=1, le=100_000, description="Steps between two exchanges that are permitted."),
    ] = _WISHES.max_sync_period
    objective: Annotated[str, *choice(OBJECTIVES)] = _WISHES.objective
    micro_batch: Annotated[
        str,
        *choice(MICRO_BATCHES),
        Field(description="given: trainer.micro_batch; auto: the largest that fits the memory."),
    ] = _WISHES.micro_batch
    gateways: Annotated[
        str,
        *choice(GATEWAYS),
        Field(
            description="unlimited: as if gateways and codecs took no time; with `workload` only."
        ),
    ] = _WISHES.gateways
    replan: Annotated[
        Replans,
        Field(description="Other trees while a run goes on, where links have drifted; or off."),
    ] = Field(default_factory=ReplanModel)

    @model_validator(mode="after")
    def _each_codec_once(self) -> Self:
        twice = [codec for codec in self.codecs if self.codecs.count(codec) > 1]
        if twice:
            raise KeyedError("codecs", f"{twice[0]!r} is there twice")
        return self
