"""Where the coordinator sends a run's figures and events while it goes on, as a job asks for it.

Made from YAML by topology/documents/load.py. No secret is in it: keys, tokens and addresses that
are secrets come from the coordinator's environment.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

from isthmus.topology.spec.suggest import shown
from isthmus.topology.spec.yaml_keys import (
    Bounds,
    Checked,
    Key,
    KeyedError,
    PositiveDuration,
    Section,
    Text,
    Word,
    choice,
)

EVENTS = ("lost", "returned", "epoch", "checkpoint", "failure", "end")
"""The kinds of events that are exported: a site was lost, or takes part again; the members or the
trees changed; a checkpoint was written; something failed; the run ended."""
WANDB_MODES = ("online", "offline")
WEBHOOK_URL, WEBHOOK_TOKEN = "ISTHMUS_WEBHOOK_URL", "ISTHMUS_WEBHOOK_TOKEN"
"""Variables of the coordinator: the URL where the job has none, and a bearer token, if wanted."""


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


_URL_SCHEMA = {"type": "string", "pattern": "^https?://", "examples": ["http://host:4318"]}
HttpUrl = Annotated[Text, Checked(_http_url, _URL_SCHEMA)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prometheus(Section):
    """A page that a Prometheus server scrapes: http://HOST:PORT/metrics."""

    host: Word = "127.0.0.1"
    """Address to listen at; 0.0.0.0: all."""
    port: Annotated[int, Bounds(ge=0, le=65535)] = 9464
    """0: any that is free."""
    is_open: Annotated[bool, Key("open")] = False
    """Whoever reaches it reads it, without a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Otlp(Section):
    """Figures pushed to an OpenTelemetry collector, by OTLP over HTTP."""

    endpoint: HttpUrl | None = None
    """Its URL; else by OTEL_EXPORTER_OTLP_ENDPOINT, or http://localhost:4318."""
    every_s: Annotated[PositiveDuration, Key("every")] = 10.0
    """Between two pushes."""
    traces: bool = False
    """Spans, too: of the run, of each site's steps, and of events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBoard(Section):
    """TensorBoard's event files."""

    folder: Text | None = None
    """Relative to this file, at the coordinator; a run has a folder of its own in it. Else
    `tensorboard` in the run's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wandb(Section):
    """A run at Weights & Biases; the key is WANDB_API_KEY in the coordinator's environment."""

    project: Text = "isthmus"
    entity: Text | None = None
    mode: Annotated[str, choice(WANDB_MODES)] = "online"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlflow(Section):
    """A run at an MLflow server, or in a folder."""

    uri: Annotated[Text, Checked(_without_secret)] | None = None
    """A URL, or a folder, relative to this file; else by MLFLOW_TRACKING_URI, or `mlruns` in the
    run's folder."""
    experiment: Text | None = None
    """Else the job's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook(Section):
    """Events posted as JSON."""

    url: HttpUrl | None = None
    """Else by ISTHMUS_WEBHOOK_URL at the coordinator."""
    on: Annotated[tuple[Annotated[str, choice(EVENTS)], ...], Bounds(min_length=1)] = (
        "lost",
        "returned",
        "failure",
        "end",
    )
    """Which events."""

    def check(self) -> None:
        """Refuse an event that is there twice."""
        twice = [event for event in self.on if self.on.count(event) > 1]
        if twice:
            raise KeyedError("on", f"{twice[0]!r} is there twice")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exporters(Section):
    """Where the coordinator sends a run's figures and events: see docs/exporters.md."""

    prometheus: Prometheus | None = None
    otlp: Otlp | None = None
    tensorboard: TensorBoard | None = None
    wandb: Wandb | None = None
    mlflow: Mlflow | None = None
    webhook: Webhook | None = None

    @property
    def asked(self) -> tuple[str, ...]:
        """The names of those that are asked for."""
        return tuple(name for name in NAMES if getattr(self, name) is not None)


NAMES = ("prometheus", "otlp", "tensorboard", "wandb", "mlflow", "webhook")
"""The names of the fields of `Exporters`, as a job writes them."""
