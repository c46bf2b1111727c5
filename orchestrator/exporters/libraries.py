"""What exporters want to be there before a run begins: libraries, and an address for a webhook."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping

from isthmus.topology.spec.errors import Problem
from isthmus.topology.spec.exporters import WEBHOOK_URL, Exporters
from isthmus.topology.spec.job import Job
from isthmus.topology.text.yaml_document import Document

NEEDS = {
    "prometheus": ("prometheus", "prometheus_client"),
    "otlp": ("otel", "opentelemetry.exporter.otlp.proto.http"),
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow"),
}
"""By exporter: the extra that installs its library, and a module of it. It is looked for, and not
imported."""


def exporter_problems(job: Job, document: Document, environ: Mapping[str, str]) -> list[Problem]:
    """Return what lacks on this machine, the coordinator's, for the exporters of a job.

    Args:
        job: The job.
        document: What it was read from.
        environ: The coordinator's environment.
    """
    if job.exporters == Exporters():
        return []
    return [
        document.problem(("exporters", name), message)
        for name, message in _lacking(job.exporters, environ)
    ]


def _lacking(exporters: Exporters, environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name in exporters.asked:
        if name in NEEDS and not _is_installed(NEEDS[name][1]):
            extra, module = NEEDS[name]
            yield (
                name,
                f"{module.partition('.')[0]} is not installed in {sys.prefix}: "
                f"pip install 'isthmus[{extra}]'",
            )
    webhook = exporters.webhook
    if webhook is not None and not webhook.url and not environ.get(WEBHOOK_URL):
        yield "webhook", f"want url, or {WEBHOOK_URL} in the coordinator's environment"


def _is_installed(module: str) -> bool:
    try:
        found = importlib.util.find_spec(module)
    except ImportError:
        return False
    return found is not None and found.origin is not None
