"""Where the coordinator sends a run's figures and events while it goes on, as a job asks for it.

Made from YAML by topology/documents/load.py. No secret is in it: keys, tokens and addresses that
are secrets come from the coordinator's environment.
"""

from __future__ import annotations

from dataclasses import dataclass

EVENTS = ("lost", "returned", "epoch", "checkpoint", "failure", "end")
"""The kinds of events that are exported: a site was lost, or takes part again; the members or the
trees changed; a checkpoint was written; something failed; the run ended."""
WANDB_MODES = ("online", "offline")
WEBHOOK_URL, WEBHOOK_TOKEN = "ISTHMUS_WEBHOOK_URL", "ISTHMUS_WEBHOOK_TOKEN"
"""Variables of the coordinator: the URL where the job has none, and a bearer token, if wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prometheus:
    """The settings of the page that a Prometheus server scrapes."""

    host: str = "127.0.0.1"
    """The address that it listens at."""
    port: int = 9464
    """0: any that is free."""
    is_open: bool = False
    """Whether whoever reaches the page reads it, without a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Otlp:
    """The settings of pushing figures to an OpenTelemetry collector, by OTLP over HTTP."""

    endpoint: str | None = None
    """The collector's URL; None: by OTEL_EXPORTER_OTLP_ENDPOINT, else this machine's port 4318."""
    every_s: float = 10.0
    """Seconds between two pushes."""
    traces: bool = False
    """Whether spans are pushed, too: of the run, of its steps at each site, and of its events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBoard:
    """The settings of writing TensorBoard's event files."""

    folder: str | None = None
    """A folder, in which each run has one of its own; None: `tensorboard` in the run's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wandb:
    """The settings of a run at Weights & Biases."""

    project: str = "isthmus"
    entity: str | None = None
    mode: str = "online"
    """One of WANDB_MODES."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlflow:
    """The settings of a run at an MLflow server, or in a folder."""

    uri: str | None = None
    """A URL or a folder; None: by MLFLOW_TRACKING_URI, else `mlruns` in the run's folder."""
    experiment: str | None = None
    """None: the job's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """The settings of posting events as JSON."""

    url: str | None = None
    """None: by WEBHOOK_URL, for a URL that is a secret."""
    on: tuple[str, ...] = ("lost", "returned", "failure", "end")
    """Some of EVENTS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exporters:
    """The settings of all exporters; None: not asked for."""

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
