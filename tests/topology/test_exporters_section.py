"""A job's `exporters`: none unless asked, changes no run, and reaches the coordinator whole."""

from __future__ import annotations

from pathlib import PurePath

from isthmus.topology.documents.load import load_job
from isthmus.topology.spec.exporters import (
    Exporters,
    Mlflow,
    Otlp,
    Prometheus,
    TensorBoard,
    Wandb,
    Webhook,
)
from isthmus.topology.spec.hashing import config_hash
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.job_paths import anchored
from isthmus.topology.spec.run_spec import RunSpec
from tests.fakes.run_specs import spec_of
from tests.fakes.worlds import JOB, topology

ALL = """\
exporters:
  prometheus: {host: 0.0.0.0, port: 9999, open: true}
  otlp: {endpoint: "http://collector:4318", every: 5s}
  tensorboard: {folder: tb}
  wandb: {project: p, mode: offline}
  mlflow: {uri: runs}
  webhook: {url: "https://hooks.example/x", on: [lost, end]}
"""


def job(text: str = "") -> Job:
    return load_job(JOB + text, "job.yaml")


def test_nothing_is_exported_unless_asked() -> None:
    assert job().exporters == Exporters()
    assert job().exporters.asked == ()


def test_all_keys_and_their_defaults() -> None:
    assert job(ALL).exporters == Exporters(
        prometheus=Prometheus(host="0.0.0.0", port=9999, is_open=True),
        otlp=Otlp(endpoint="http://collector:4318", every_s=5.0),
        tensorboard=TensorBoard(folder="tb"),
        wandb=Wandb(project="p", mode="offline"),
        mlflow=Mlflow(uri="runs"),
        webhook=Webhook(url="https://hooks.example/x", on=("lost", "end")),
    )
    names = ("prometheus", "otlp", "tensorboard", "wandb", "mlflow", "webhook")
    section = ", ".join(f"{name}: {{}}" for name in names)
    by_default = job(f"exporters: {{{section}}}\n").exporters
    assert by_default == Exporters(
        prometheus=Prometheus(),
        otlp=Otlp(),
        tensorboard=TensorBoard(),
        wandb=Wandb(),
        mlflow=Mlflow(),
        webhook=Webhook(),
    )
    assert by_default.asked == names
    assert by_default.prometheus is not None
    assert by_default.prometheus.host == "127.0.0.1", "nobody else reads unless it is asked for"


def test_the_spec_carries_them() -> None:
    spec = spec_of(job(ALL), topology())
    written = spec.to_bytes()
    assert RunSpec.from_bytes(written).job.exporters == spec.job.exporters


def test_what_is_compared_of_two_runs_is_the_same_with_them() -> None:
    assert config_hash(job(ALL), topology()) == config_hash(job(), topology())


def test_folders_begin_at_the_jobs_file_and_urls_stay() -> None:
    exporters = anchored(job(ALL), PurePath("/jobs")).exporters
    assert exporters.tensorboard == TensorBoard(folder="/jobs/tb")
    assert exporters.mlflow == Mlflow(uri="/jobs/runs")
    for uri in ("http://tracking:5000", "sqlite:///x.db", "databricks"):
        text = f"exporters: {{mlflow: {{uri: '{uri}'}}, tensorboard: {{}}}}\n"
        exporters = anchored(job(text), PurePath("/jobs")).exporters
        assert exporters.mlflow == Mlflow(uri=uri)
        assert exporters.tensorboard == TensorBoard()
