"""A run in MLflow's own store of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.orchestrator.exporters.figures import Point
from isthmus.orchestrator.exporters.mlflow import MlflowRun
from isthmus.orchestrator.exporters.tool import Update
from isthmus.topology.spec.exporters import Mlflow
from tests.fakes.exported_runs import exported_run, needs_library, series_of, spec_with, update_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_library("mlflow")
    for name in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def test_figures_parameters_events_and_the_end_are_there(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    update = update_of(exported_run(tmp_path), spec_with(), is_last=True)
    run = MlflowRun(Mlflow(), "r1", "hello-wan", tmp_path, {"codec": "int8"})
    place = run.open()
    run.send(update)
    run.close()
    client = MlflowClient(str(tmp_path / "mlruns"))
    experiment = client.get_experiment_by_name("hello-wan")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_id in place
    assert (found.info.status, found.info.run_name) == ("FINISHED", "r1")
    assert found.data.params == {"codec": "int8"}
    (event,) = [text for tag, text in found.data.tags.items() if tag.startswith("isthmus.event.")]
    assert event == "step 40: run r1 SUCCEEDED"
    expected = series_of(update.points)
    assert found.data.metrics.keys() == expected.keys()
    for name in ("loss", "step_seconds/oregon", "link_sent_bytes/oregon-to-virginia"):
        history = client.get_metric_history(found.info.run_id, name)
        assert [(each.step, each.value) for each in history] == expected[name], name


def test_the_next_coordinator_goes_on_with_the_same_run(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    for step, state in ((1, "ACTIVE"), (2, "FAILED")):
        run = MlflowRun(Mlflow(experiment="x"), "r1", "job", tmp_path, {"codec": "int8"})
        run.open()
        point = Point(step, 1e9 + step, {"loss": 2.0})
        run.send(Update(samples=(), points=(point,), state=state))
        run.close()
    client = MlflowClient(str(tmp_path / "mlruns"))
    experiment = client.get_experiment_by_name("x")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FAILED"
    history = client.get_metric_history(found.info.run_id, "loss")
    assert [each.step for each in history] == [1, 2]
