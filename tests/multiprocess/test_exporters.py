"""A launched run with every exporter on: each tool has the figures of the run's own files."""

from __future__ import annotations

import math
import re

import pytest

from isthmus.orchestrator.exporters.libraries import NEEDS
from tests.fakes.exported_runs import needs_library, receiving
from tests.multiprocess.harness import Bench, job_yaml, topology_yaml
from tests.orchestrator.test_exporters_otlp import pushed
from tests.orchestrator.test_exporters_tensorboard import scalars_of

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),
]

STEPS = 4


def test_every_tool_has_the_figures_of_the_runs_files(
    run: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NEEDS:
        needs_library(name)
    with receiving() as collector, receiving() as hook:
        section = (
            "exporters:\n"
            "  prometheus: {port: 0}\n"
            f"  otlp: {{endpoint: '{collector.url}', every: 1s}}\n"
            "  tensorboard: {folder: tb}\n"
            "  wandb: {mode: offline}\n"
            "  mlflow: {uri: runs, experiment: x}\n"
            f"  webhook: {{url: '{hook.url}', on: [lost, failure, end]}}\n"
        )
        result = run.launch(topology_yaml([(1, 1), (1, 1)]), job_yaml(steps=STEPS) + section)
        result.check()
        run.wait_for_nothing_left(60)
    folder, losses = run.run_folder(), run.losses()
    log = (folder / "coordinator.log").read_text()
    assert "exporter prometheus: http://127.0.0.1:" in log, run.logs()
    assert not re.findall("takes nothing|has missed|may lack|was not exported", log)
    assert not [note for note in result.envelope["data"]["notes"] if "exporter" in note]
    assert len(losses) == STEPS

    assert [each["event"] for each in hook.objects] == ["end"]
    assert hook.objects[0]["text"].startswith(f"run {folder.name} SUCCEEDED")

    (last,) = pushed(collector)["isthmus.loss"].gauge.data_points
    assert math.isclose(last.as_double, losses[-1])
    steps = pushed(collector)["isthmus.steps"].sum.data_points
    assert [point.as_int or point.as_double for point in steps] == [STEPS, STEPS]

    scalars, texts = scalars_of(run.folder / "tb" / folder.name)
    assert [step for step, _ in scalars["loss"]] == list(range(1, STEPS + 1))
    for (_, shown), loss in zip(scalars["loss"], losses, strict=True):
        assert math.isclose(shown, loss, rel_tol=1e-6)
    assert len(texts["events/end"]) == 1

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    client = MlflowClient(str(run.folder / "runs"))
    experiment = client.get_experiment_by_name("x")
    assert experiment is not None
    (kept,) = client.search_runs([experiment.experiment_id])
    assert kept.info.status == "FINISHED"
    history = client.get_metric_history(kept.info.run_id, "loss")
    assert [each.value for each in history] == losses

    assert len(list((folder / "wandb").glob(f"offline-run-*/run-{folder.name}.wandb"))) == 1


def test_a_library_that_is_missing_is_told_before_anything_starts(run: Bench) -> None:
    job = run.write(
        topology_yaml([(1, 1), (1, 1)]),
        job_yaml() + "exporters: {webhook: {}, prometheus: {port: 99999}}\n",
    )
    result = run.isthmus("validate", str(job))
    assert result.code == 2
    assert "want at most 65535, got 99999" in result.err
    result = run.isthmus("launch", str(job), "--set", "exporters.prometheus.port=0")
    assert result.code == 2
    assert "want url, or ISTHMUS_WEBHOOK_URL in the coordinator's environment" in result.err
    assert not list((run.home / "runs").glob("*")) if (run.home / "runs").exists() else True
