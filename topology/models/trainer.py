"""What a job says to the shipped trainer, as a user writes it. topology.job has the defaults."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from topology.job import COMPUTES, Trainer
from topology.text.fields import (
    Count,
    KeyedError,
    Number,
    Share,
    Size,
    Strict,
    Text,
    choice,
    default,
)
from topology.units import format_fraction, format_size

_TRAINER = Trainer()
_MODEL, _DATA, _OPTIMIZER = _TRAINER.model, _TRAINER.data, _TRAINER.optimizer

Positive = Annotated[Number, Field(gt=0)]
NotNegative = Annotated[Number, Field(ge=0)]
Momentum = Annotated[Number, Field(ge=0, lt=1)]


class ModelModel(Strict):
    """Shape of the byte-level GPT that ships."""

    layers: Annotated[int, Field(ge=1, le=256)] = _MODEL.layers
    heads: Annotated[int, Field(ge=1, le=256)] = _MODEL.heads
    width: Annotated[int, Field(ge=1, le=65536, description="A multiple of heads.")] = _MODEL.width
    context: Annotated[int, Field(ge=1, le=1 << 20, description="Bytes a sequence.")] = (
        _MODEL.context
    )

    @model_validator(mode="after")
    def _heads_divide_the_width(self) -> Self:
        if self.width % self.heads:
            raise KeyedError("width", f"want a multiple of heads, {self.heads}; got {self.width}")
        return self


class DataModel(Strict):
    """Which text is learnt."""

    files: list[Text] = Field(
        default_factory=list,
        description="Globs, relative to this file; none: Python's own standard library.",
    )
    held_out: Share = default(
        format_fraction(_DATA.held_out), "Share of the files that is only evaluated."
    )
    max_bytes: Size = default(format_size(_DATA.max_bytes), "Of text, at most.")

    @model_validator(mode="after")
    def _something_is_learnt(self) -> Self:
        if self.held_out == 1:
            raise KeyedError("held_out", "must be less than 100%: nothing would be learnt")
        return self


class OptimizerModel(Strict):
    """AdamW with linear warm-up and cosine decay."""

    learning_rate: Positive = _OPTIMIZER.learning_rate
    min_learning_rate: NotNegative = _OPTIMIZER.min_learning_rate
    warmup_steps: Annotated[int, Field(ge=0, le=1_000_000)] = _OPTIMIZER.warmup_steps
    weight_decay: NotNegative = _OPTIMIZER.weight_decay
    beta1: Momentum = _OPTIMIZER.beta1
    beta2: Momentum = _OPTIMIZER.beta2
    clip_norm: Positive = _OPTIMIZER.clip_norm

    @model_validator(mode="after")
    def _rate_decays(self) -> Self:
        if self.min_learning_rate > self.learning_rate:
            raise KeyedError(
                "learning_rate",
                f"want at least min_learning_rate, {self.min_learning_rate:g}; "
                f"got {self.learning_rate:g}",
            )
        return self


class TrainerModel(Strict):
    """What the shipped trainer does; a script of your own may read it too."""

    compute: Annotated[str, *choice(COMPUTES)] = _TRAINER.compute
    steps: Count = _TRAINER.steps
    global_batch: Annotated[Count, Field(description="Sequences a step, over all sites.")] = (
        _TRAINER.global_batch
    )
    micro_batch: Annotated[
        Count, Field(description="Sequences that a rank takes through the model at once, at most.")
    ] = _TRAINER.micro_batch
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = _TRAINER.seed
    evaluate_every: Annotated[Count, Field(description="Steps; one is always made at the end.")] = (
        _TRAINER.evaluate_every
    )
    evaluation_batches: Count = _TRAINER.evaluation_batches
    model: ModelModel = Field(default_factory=ModelModel)
    data: DataModel = Field(default_factory=DataModel)
    optimizer: OptimizerModel = Field(default_factory=OptimizerModel)
