"""Pydantic models of a job's `exporters` section as a user writes it."""

from __future__ import annotations

import re
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator

from isthmus.topology.spec.exporters import (
    EVENTS,
    WANDB_MODES,
    Mlflow,
    Otlp,
    Prometheus,
    TensorBoard,
    Wandb,
    Webhook,
)
from isthmus.topology.spec.suggest import shown
from isthmus.topology.spec.units import format_duration
from isthmus.topology.text.validation import (
    KeyedError,
    PositiveDuration,
    Strict,
    Text,
    Word,
    choice,
    default,
)

_PROMETHEUS, _OTLP, _TENSORBOARD = Prometheus(), Otlp(), TensorBoard()
_WANDB, _MLFLOW, _WEBHOOK = Wandb(), Mlflow(), Webhook()
_SECRETS_GO = "the job's file is no place for secrets: they go into the coordinator's environment"


def _without_secret(value: str) -> str:
    if urlsplit(value).password is not None:
        raise ValueError(f"has a password, and {_SECRETS_GO}; see docs/exporters.md")
    return value


def _http_url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"\s", value):
        raise ValueError(f"want a URL, as https://host:port/path; got {shown(value)}")
    return _without_secret(value)


HttpUrl = Annotated[
    Text,
    AfterValidator(_http_url),
    WithJsonSchema({"type": "string", "pattern": "^https?://", "examples": ["http://host:4318"]}),
]


class PrometheusModel(Strict):
    """A page that a Prometheus server scrapes: http://HOST:PORT/metrics."""

    host: Annotated[Word, Field(description="Address to listen at; 0.0.0.0: all.")] = (
        _PROMETHEUS.host
    )
    port: Annotated[int, Field(ge=0, le=65535, description="0: any that is free.")] = (
        _PROMETHEUS.port
    )
    open: Annotated[bool, Field(description="Whoever reaches it reads it, without a token.")] = (
        _PROMETHEUS.is_open
    )


class OtlpModel(Strict):
    """Figures pushed to an OpenTelemetry collector, by OTLP over HTTP."""

    endpoint: Annotated[
        HttpUrl | None,
        Field(
            description="Its URL; else by OTEL_EXPORTER_OTLP_ENDPOINT, or http://localhost:4318."
        ),
    ] = _OTLP.endpoint
    every: PositiveDuration = default(format_duration(_OTLP.every_s), "Between two pushes.")
    traces: Annotated[
        bool, Field(description="Spans, too: of the run, of each site's steps, and of events.")
    ] = _OTLP.traces


class TensorBoardModel(Strict):
    """TensorBoard's event files."""

    folder: Annotated[
        Text | None,
        Field(
            description="Relative to this file, at the coordinator; a run has a folder of its own "
            "in it. Else `tensorboard` in the run's folder."
        ),
    ] = _TENSORBOARD.folder


class WandbModel(Strict):
    """A run at Weights & Biases; the key is WANDB_API_KEY in the coordinator's environment."""

    project: Text = _WANDB.project
    entity: Text | None = _WANDB.entity
    mode: Annotated[str, *choice(WANDB_MODES)] = _WANDB.mode


class MlflowModel(Strict):
    """A run at an MLflow server, or in a folder."""

    uri: Annotated[
        Annotated[Text, AfterValidator(_without_secret)] | None,
        Field(
            description="A URL, or a folder, relative to this file; else by MLFLOW_TRACKING_URI, or "
            "`mlruns` in the run's folder."
        ),
    ] = _MLFLOW.uri
    experiment: Annotated[Text | None, Field(description="Else the job's name.")] = (
        _MLFLOW.experiment
    )


class WebhookModel(Strict):
    """Events posted as JSON."""

    url: Annotated[
        HttpUrl | None, Field(description="Else by ISTHMUS_WEBHOOK_URL at the coordinator.")
    ] = _WEBHOOK.url
    on: list[Annotated[str, *choice(EVENTS)]] = Field(
        default_factory=lambda: list(_WEBHOOK.on), min_length=1, description="Which events."
    )

    @model_validator(mode="after")
    def _each_event_once(self) -> Self:
        twice = [event for event in self.on if self.on.count(event) > 1]
        if twice:
            raise KeyedError("on", f"{twice[0]!r} is there twice")
        return self


class ExportersModel(Strict):
    """Where the coordinator sends a run's figures and events: see docs/exporters.md."""

    prometheus: PrometheusModel | None = None
    otlp: OtlpModel | None = None
    tensorboard: TensorBoardModel | None = None
    wandb: WandbModel | None = None
    mlflow: MlflowModel | None = None
    webhook: WebhookModel | None = None
