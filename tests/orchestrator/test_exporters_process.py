"""A coordinator's exporters: a real process beside it, whatever becomes of either."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from isthmus.orchestrator.coordinator.journal import Journal, JournalReader
from isthmus.orchestrator.core.journaled_run import RecordedEvent
from isthmus.orchestrator.exporters import libraries
from isthmus.orchestrator.exporters.__main__ import _facts
from isthmus.orchestrator.exporters.position import POSITION
from isthmus.orchestrator.exporters.prometheus import page_token_path
from isthmus.orchestrator.run_folder.home import RunFolder
from isthmus.orchestrator.run_folder.run_files import RunFiles
from isthmus.protos import metrics
from isthmus.protos.control.v1 import control_pb2
from isthmus.protos.own_processes import own_command
from tests.fakes.coordinators import FakeAgent, active, coordinating, status_of
from tests.fakes.exported_runs import exported_run, needs_library, receiving, records_of
from tests.fakes.recorded_runs import append_line, metric
from tests.fakes.run_specs import spec_of_texts
from tests.fakes.waiting import until
from tests.fakes.worlds import JOB, topology_text
from tests.orchestrator.test_exporters_tensorboard import scalars_of

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

WITHIN_S = 60.0


def append(journal: Journal, event: RecordedEvent) -> None:
    journal.append(
        event.kind,
        wall_s=event.wall_s,
        generation=event.generation,
        run_id=event.run_id,
        site=event.site,
        detail=event.detail,
    )


def started(folder: RunFolder, run_id: str = "r1") -> subprocess.Popen[str]:
    words = ("--run", run_id, "--folder", str(folder.path), "--state", str(folder.path))
    return subprocess.Popen(
        own_command("isthmus.orchestrator.exporters", *words),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """Wait for the end of a process by itself; return what it said."""
    out, err = process.communicate(timeout=WITHIN_S)
    assert (process.returncode, err) == (0, "")
    return [json.loads(line) for line in out.splitlines()]


@contextlib.contextmanager
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def all_of(received_url: str) -> str:
    return f"{{webhook: {{url: '{received_url}', on: [lost, failure, end]}}}}"


def test_a_run_that_has_ended_is_exported_once_however_often_it_is_asked(tmp_path: Path) -> None:
    with receiving() as received:
        folder = exported_run(tmp_path, all_of(received.url))
        for _ in range(2):
            said = finished(started(folder))
            assert [each["is_warning"] for each in said] == [False]
        assert [each["event"] for each in received.objects] == ["end"]
    assert (folder.path / POSITION).is_file()


def test_a_dead_endpoint_is_one_line_for_people_and_what_was_missed(tmp_path: Path) -> None:
    needs_library("prometheus")
    with taken_port() as port:
        folder = exported_run(tmp_path, f"{{prometheus: {{port: {port}}}}}")
        said = finished(started(folder))
    assert [each["is_warning"] for each in said] == [True, True]
    assert said[0]["text"].startswith("prometheus gets no data: OSError: 127.0.0.1:")
    assert said[1]["text"].startswith("prometheus has missed ")


def test_it_ends_when_nobody_holds_its_stdin(tmp_path: Path) -> None:
    with receiving() as received:
        folder = exported_run(tmp_path, all_of(received.url))
        process = started(folder)
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None
        assert finished(process)


@pytest.mark.parametrize("name", ["prometheus", "webhook"])
def test_a_process_imports_only_what_is_asked_for(tmp_path: Path, name: str) -> None:
    if name == "prometheus":
        needs_library(name)
    program = (
        "import sys; from isthmus.orchestrator.exporters.__main__ import _tools; "
        "from isthmus.topology.spec.run_spec import RunSpec; from pathlib import Path; "
        "folder = Path(sys.argv[1]); "
        "spec = RunSpec.from_bytes((folder / 'run_spec.json').read_bytes()); "
        "_tools(spec, 'r1', folder); print(sorted(sys.modules))"
    )
    folder = exported_run(tmp_path, f"{{{name}: {{}}}}", steps=1)
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder.path)],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=True,
    )
    loaded = {each.partition(".")[0] for each in eval(done.stdout)}
    heavy = {module.partition(".")[0] for _, module in libraries.NEEDS.values()}
    assert not loaded & (heavy | {"torch", "rich", "click"})


def test_the_coordinator_and_the_command_line_import_no_tool() -> None:
    program = (
        "import sys, isthmus.orchestrator.coordinator.__main__, isthmus.orchestrator.cli.launch; "
        "print(sorted(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=True,
    )
    loaded = {each.partition(".")[0] for each in eval(done.stdout)}
    assert not loaded & {module.partition(".")[0] for _, module in libraries.NEEDS.values()}


async def steps(agent: FakeAgent, *numbers: int) -> None:
    values = {metrics.LOSS: 2.0, metrics.SITE_TOKENS: 8.0, metrics.STEP_S: 0.5}
    batch = [
        control_pb2.Metric(kind=metrics.STEP, step=number, values=values) for number in numbers
    ]
    await agent.say(metrics=control_pb2.MetricBatch(metrics=batch))


def page(caplog: pytest.LogCaptureFixture, number: int = 0) -> str:
    """Return the address of a run's page, once it is logged."""
    found = re.findall(r"exporter prometheus: (http://\S+)", caplog.text)
    return found[number] if len(found) > number else ""


def value(url: str, name: str) -> float | None:
    headers = {"Authorization": f"Bearer {page_token_path().read_text()}"}
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        text = answer.read().decode()
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return None if found is None else float(found[1])


async def test_a_run_is_exported_while_it_goes_on_and_by_the_next_coordinator(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Counters go on where they were, and no event comes twice."""
    needs_library("prometheus")
    caplog.set_level(logging.INFO)
    name = 'isthmus_steps_total{run="run-1",site="a"}'

    with receiving() as received:
        section = f"exporters: {{prometheus: {{port: 0}}, webhook: {{url: '{received.url}', on: [epoch, end]}}}}\n"
        async with coordinating(tmp_path) as bench:
            agents = await active(bench, "a", "b", job=JOB + section)
            for agent in agents:
                await steps(agent, 1, 2, 3)
            await until(lambda: page(caplog) != "", lambda: caplog.text)
            await until(lambda: value(page(caplog), name) == 3)
            assert value(page(caplog), 'isthmus_loss{run="run-1"}') == 2.0
            rate = value(page(caplog), 'isthmus_tokens_per_second{run="run-1"}')
            assert rate == 32.0
        async with coordinating(tmp_path) as bench:
            await until(lambda: page(caplog, 1) != "", lambda: caplog.text)
            await until(lambda: value(page(caplog, 1), name) == 3)
            bench.control.runs.cancel("run-1", "enough")
            assert (await bench.ended()).reason_code == "CANCELLED"
    assert [each["event"] for each in received.objects] == ["end"]
    assert received.objects[0]["text"].startswith("run run-1 CANCELLED")


async def test_a_dead_endpoint_is_a_note_of_the_run_which_goes_on(tmp_path: Path) -> None:
    needs_library("prometheus")

    with taken_port() as port:
        section = f"exporters: {{prometheus: {{port: {port}}}}}\n"
        async with coordinating(tmp_path) as bench:
            await active(bench, "a", "b", job=JOB + section)
            run = await bench.until(lambda run: any("exporter" in each for each in run.notes))
            (note,) = [each for each in run.notes if "exporter" in each]
            assert note.startswith("exporter prometheus gets no data: OSError: 127.0.0.1:")
            assert run.state == control_pb2.RUN_STATE_ACTIVE


async def test_a_killed_process_is_a_note_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    with receiving() as received:
        section = f"exporters: {{webhook: {{url: '{received.url}'}}}}\n"
        async with coordinating(tmp_path) as bench:
            await active(bench, "a", "b", job=JOB + section)
            await until(lambda: "exporter webhook: posts" in caplog.text)
            exporting = bench.control.runs.latest._exporting  # type: ignore[union-attr]
            assert exporting is not None
            assert exporting._process is not None
            os.kill(exporting._process.pid, 9)
            run = await bench.until(lambda run: any("exporter" in each for each in run.notes))
            assert "exporters: their process ended with status -9" in run.notes
            assert run.state == control_pb2.RUN_STATE_ACTIVE


async def test_a_job_whose_exporter_is_not_installed_is_refused_with_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = {"otlp": ("otel", "no_such_library")}
    monkeypatch.setattr(libraries, "NEEDS", needs)
    monkeypatch.delenv("ISTHMUS_WEBHOOK_URL", raising=False)

    async with coordinating(tmp_path) as bench:
        job = JOB + "exporters: {otlp: {}, webhook: {}}\n"
        code, told = await status_of(bench.submit(job=job))
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert "job.yaml:5:19: error: no_such_library is not installed in " in told
        assert "pip install 'isthmus[otel]'" in told
        assert (
            "job.yaml:5:32: error: want url, or ISTHMUS_WEBHOOK_URL in the coordinator's "
            "environment" in told
        )


def test_the_next_exporters_go_on_where_the_ones_before_were_asked_to_end(tmp_path: Path) -> None:
    """Every step and event is there once, though the coordinator was gone in between."""
    needs_library("tensorboard")
    with receiving() as received:
        exporters = (
            f"{{tensorboard: {{}}, webhook: {{url: '{received.url}', on: [checkpoint, end]}}}}"
        )
        whole = exported_run(tmp_path / "whole", exporters)
        folder = RunFolder(tmp_path / "part")
        with JournalReader(whole.path) as journal:
            *begun, ended = journal.events("r1")
        files, records = RunFiles(folder.path), records_of(whole)
        half = len(records) // 2
        with Journal(folder.path) as journal:
            files.write_spec((whole.path / "run_spec.json").read_bytes())
            for part, events in ((records[:half], begun), (records[half:], [ended])):
                files.append_metrics(part)
                saved = {"note": "checkpoint", "step": len(part)}
                for each in (*events, replace(begun[-1], kind="checkpoint.written", detail=saved)):
                    append(journal, each)
                process = started(folder, "r1")
                process.stdin.close()  # type: ignore[union-attr]
                process.stdin = None
                finished(process)
        assert [each["event"] for each in received.objects] == ["checkpoint", "end", "checkpoint"]
    scalars, _ = scalars_of(folder.path / "tensorboard")
    assert [step for step, _ in scalars["loss"]] == list(range(1, 41))
    assert [step for step, _ in scalars["step_seconds/virginia"]] == list(range(1, 41))


def test_damaged_lines_are_passed_over(tmp_path: Path) -> None:
    with receiving() as received:
        folder = exported_run(tmp_path, all_of(received.url))
        append_line(folder, "no json\n")
        append_line(folder, '{"site": "oregon"}\n')
        append_line(folder, json.dumps(metric("oregon", "step", 41, 1.0, {})) + "\n")
        process = started(folder)
        out, err = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 0, out
    assert "2 lines of the metrics make no sense and were not exported" in err
    assert [each["step"] for each in received.objects] == [41]


def test_what_is_said_of_a_run_is_the_scripts_own() -> None:
    """The shipped trainer's batch is not a script's, which may have its own in its arguments."""
    here = topology_text()
    shipped = _facts(spec_of_texts(JOB, here))
    assert shipped["global_batch"] == 48
    assert "arguments" not in shipped
    script = f"{JOB}entrypoint: train.py\narguments: [--batch, '16', a b]\n"
    said = _facts(spec_of_texts(script, here))
    assert "global_batch" not in said
    assert (said["entrypoint"], said["arguments"]) == ("/jobs/train.py", "--batch 16 'a b'")
    long = f"{JOB}entrypoint: train.py\narguments: ['{'x' * 400}', '{'y' * 400}']\n"
    assert len(_facts(spec_of_texts(long, here))["arguments"]) == 500
