"""`import isthmus` as a client: runs of a scripted coordinator, and what is cheap to import."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

import isthmus
from isthmus.orchestrator.api.launching import job_of_script
from isthmus.orchestrator.documents import load_pair
from isthmus.protos.versions import build
from tests.cli.runs import a_run
from tests.fakes.scripted_coordinator import ScriptedCoordinator, serving


def test_a_run_is_launched_looked_at_and_cancelled(files: Path, home: Path) -> None:
    ended = a_run("SUCCEEDED")
    scripted = ScriptedCoordinator(runs=[ended], watched=[ended])
    lines: list[str] = []
    with serving(scripted) as address:
        run = isthmus.launch(
            files / "job.yaml",
            coordinator=address,
            settings={"trainer.steps": 7},
            run_id=ended.run_id,
            home=home,
            say=lines.append,
        )
        assert list(scripted.submitted[0].job.overrides) == ["trainer.steps=7"]
        status = run.wait(timeout_s=30)
        assert (status.state, status.id, status.is_over) == ("SUCCEEDED", ended.run_id, True)
        assert {site.name for site in status.sites} == {"a", "b"}
        assert asyncio.run(run.wait_async(30)) == status
        assert isthmus.Run(home=home).status() == run.status()
        assert [each.id for each in isthmus.connect(address).runs()] == [ended.run_id]
        run.cancel()
        assert repr(run) == f"<isthmus.Run {ended.run_id}>"


def test_a_run_that_failed_raises_what_broke_first(files: Path, home: Path) -> None:
    failed = a_run("FAILED")
    failed.reason_code, failed.reason = "SCRIPT_FAILED", "rank 1 of site a: ValueError: a mistake"
    with serving(ScriptedCoordinator(runs=[failed], watched=[failed])) as address:
        run = isthmus.launch(
            files / "job.yaml", coordinator=address, run_id=failed.run_id, home=home, say=print
        )
        with pytest.raises(isthmus.IsthmusError, match="a mistake") as raised:
            run.wait()
    assert raised.value.code == "SCRIPT_FAILED"


def test_mistakes_and_absent_coordinators_are_errors(files: Path, home: Path) -> None:
    with pytest.raises(isthmus.ConfigError, match="want at least 1, got -1"):
        isthmus.launch(files / "job.yaml", settings={"trainer.steps": -1}, home=home)
    with pytest.raises(isthmus.ConfigError, match="there is no such script"):
        isthmus.launch("nowhere.py", home=home)
    with pytest.raises(isthmus.IsthmusError, match="no coordinator answers"):
        isthmus.connect("127.0.0.1:1")
    with pytest.raises(isthmus.IsthmusError, match="there is no run"):
        isthmus.Run(home=home)


def test_a_script_needs_no_yaml(tmp_path: Path) -> None:
    script = tmp_path / "project" / "my-train.py"
    script.parent.mkdir()
    script.touch()
    path = job_of_script(script, tmp_path / "home", sites=3, ranks=2)
    pair = load_pair(path)
    assert [site.num_ranks for site in pair.topology.sites] == [2, 2, 2]
    assert len(pair.topology.links) == 6
    assert (pair.job.entrypoint, pair.job.working_folder) == (str(script), str(script.parent))
    assert job_of_script(script, tmp_path / "home", sites=3, ranks=2) == path


def test_a_plan_says_why(files: Path) -> None:
    plan = isthmus.plan(files / "job.yaml")
    assert plan.why
    assert plan.decisions.keys() >= {"placement", "reduction"}
    assert "decisions:" in plan.text


def test_the_import_is_cheap_and_says_its_version() -> None:
    told = "import sys, isthmus; print(isthmus.__version__, sorted(sys.modules))"
    out = subprocess.check_output([sys.executable, "-c", told], text=True)
    assert out.startswith(build())
    for heavy in ("torch", "grpc", "numpy", "pydantic", "rich", "asyncio"):
        assert f"'{heavy}'" not in out
    assert set(isthmus.__all__) <= set(dir(isthmus))
