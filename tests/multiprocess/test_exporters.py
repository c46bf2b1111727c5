"""A launched run with every exporter on: each tool has the figures of the run's own files."""

from __future__ import annotations

import json
import math
import re
import urllib.request

import pytest

from isthmus.orchestrator.exporters.libraries import NEEDS
from isthmus.protos.catalogue import ExitCode
from tests.fakes.exported_runs import needs_library, receiving
from tests.multiprocess.harness import Bench, job_yaml, kill, topology_yaml
from tests.multiprocess.test_coordinator_restart import Deployment
from tests.orchestrator.test_exporters_otlp import pushed
from tests.orchestrator.test_exporters_otlp_traces import spans_of
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
            "  prometheus: {port: 0, open: true}\n"
            f"  otlp: {{endpoint: '{collector.url}', every: 1s, traces: true}}\n"
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
    assert not re.findall("gets no data|has missed|may lack|was not exported", log)
    assert not [note for note in result.envelope["data"]["notes"] if "exporter" in note]
    assert len(losses) == STEPS

    assert [each["event"] for each in hook.objects] == ["end"]
    assert hook.objects[0]["text"].startswith(f"run {folder.name} SUCCEEDED")

    (last,) = pushed(collector)["isthmus.loss"].gauge.data_points
    assert math.isclose(last.as_double, losses[-1])
    steps = pushed(collector)["isthmus.steps"].sum.data_points
    assert [point.as_int or point.as_double for point in steps] == [STEPS, STEPS]

    spans = spans_of(collector, folder.name)
    assert sorted(each.name for each in spans) == ["end", "run", *["step"] * 2 * STEPS]

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


@pytest.mark.exhaustive
def test_a_lost_site_is_posted_while_the_others_go_on(run: Bench) -> None:
    with receiving() as hook:
        topology = topology_yaml([(1, 1)] * 3, detect_within="5s", min_sites=1, max_restarts=0)
        section = f"exporters: {{webhook: {{url: '{hook.url}', on: [lost, epoch, end]}}}}\n"
        job = run.write(topology, job_yaml(steps=60) + section)
        process = run.start("launch", str(job), "--json")
        run.wait_for("first steps", lambda: num_steps(run) > 15)
        agent = run.pids("isthmus.sites.agent", "--site c")[0]
        kill(run.children(agent, "isthmus.sites.gateway")[0])
        process.communicate(timeout=120)
        assert process.returncode == ExitCode.WITH_LOSSES, run.logs()
        run.wait_for_nothing_left(60)
    assert [each["event"] for each in hook.objects] == ["epoch", "lost", "end"]
    epoch, lost, end = hook.objects
    assert epoch["text"].startswith("epoch 1: a, b take part: site c: ")
    assert lost["site"] == "c"
    assert lost["text"].startswith("the run continues without site c: ")
    assert end["step"] == 60


def num_steps(run: Bench) -> int:
    folders = list((run.home / "runs").glob("*/metrics.jsonl"))
    return folders[0].read_text().count('"kind": "step"') if folders else 0


@pytest.mark.exhaustive
def test_after_a_killed_coordinator_every_step_is_there_once(run: Bench) -> None:
    for name in ("prometheus", "tensorboard"):
        needs_library(name)
    with receiving() as hook:
        section = (
            "exporters:\n"
            "  prometheus: {port: 0, open: true}\n"
            "  tensorboard: {folder: tb}\n"
            f"  webhook: {{url: '{hook.url}', on: [lost, failure, end]}}\n"
        )
        deployed = Deployment(run, job_yaml(steps=400) + section)
        folder = deployed.state / "runs" / "one"
        run.wait_for("first steps", lambda: len(deployed.steps()) > 40)
        run.wait_for("event files", lambda: (run.folder / "tb").exists())
        deployed.kill()
        deployed.start(deployed.address)
        log = folder / "logs" / "coordinator.log"
        run.wait_for("the page", lambda: len(pages(log.read_text())) == 2)
        page = pages(log.read_text())[-1]
        run.wait_for("steps", lambda: counted(page) > 100)
        assert counted(page) <= max(step for site, step in deployed.steps() if site == "a")
        deployed.check(400)
        run.wait_for("end", lambda: not run.pids("isthmus.orchestrator.exporters"))
    assert [each["event"] for each in hook.objects] == ["end"]
    scalars, _ = scalars_of(run.folder / "tb" / "one")
    for name in ("loss", "step_seconds/a", "step_seconds/b"):
        assert [step for step, _ in scalars[name]] == list(range(1, 401)), name
    assert json.loads((folder / "exporters.json").read_text())["line"] > 800


def pages(log: str) -> list[str]:
    return re.findall(r"exporter prometheus: (http://\S+)", log)


def counted(page: str) -> float:
    with urllib.request.urlopen(page, timeout=10) as answer:
        text = answer.read().decode()
    found = re.search(r'^isthmus_steps_total\{run="one",site="a"\} (\S+)$', text, re.MULTILINE)
    return float(found[1]) if found else 0.0
