"""`isthmus plan` for a job that describes its model, and launching what it decides."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Isthmus
from tests.cli.runs import a_run
from tests.fakes.described import TWO_SITES_YAML
from tests.fakes.run_specs import submission_of
from tests.fakes.scripted_coordinator import ScriptedCoordinator, serving
from tests.topology.test_planner_parallel_document import JOB_YAML, two_sites_plan


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "topology.yaml").write_text(TWO_SITES_YAML)
    (tmp_path / "job.yaml").write_text(JOB_YAML)
    (tmp_path / "train.py").write_text("")
    return tmp_path / "job.yaml"


@pytest.fixture
def plan(job: Path) -> Path:
    (job.parent / "plan.yaml").write_text(two_sites_plan())
    return job.parent / "plan.yaml"


@pytest.mark.exhaustive
def test_people_get_the_degrees_explained(isthmus: Isthmus, job: Path) -> None:
    done = isthmus("plan", job)
    assert done.code == 0, done.err
    for words in ("a, b: tensor", "MFU"):
        assert words in " ".join(done.out.split())
    assert max(map(len, done.out.splitlines())) <= 110


@pytest.mark.exhaustive
def test_degrees_are_compared_by_site(isthmus: Isthmus, job: Path, plan: Path) -> None:
    assert isthmus("plan", job, "--diff", plan).out.strip() == f"no difference to {plan}"
    wish = "workload.at_most.zero_stage=0"
    changed = isthmus("plan", job, "--set", wish, "--diff", plan, "--json").envelope["data"]
    paths = {each["path"] for each in changed["changes"]}
    assert "decisions.placement.a.zero_stage" in paths


@pytest.mark.no_cover  # it plans
def test_a_launch_hands_the_degrees_on(isthmus: Isthmus, job: Path, plan: Path) -> None:
    scripted = ScriptedCoordinator(runs=[], watched=[a_run("SUCCEEDED")], lines=[], events=[])
    with serving(scripted) as address:
        done = isthmus("launch", job, "--plan", plan, "--detach", "--coordinator", address)
    assert done.code == 0, done.err
    [request] = scripted.submitted
    run = submission_of(request).spec
    assert [each.site for each in run.job.placement] == ["a", "b"]
    for each in run.job.placement:
        assert each.parallel is not None
        assert each.parallel.num_ranks == 8


def test_a_model_that_fits_nowhere_is_told_at_its_line(isthmus: Isthmus, job: Path) -> None:
    done = isthmus("plan", job, "--set", "workload.width=16384", "--set", "workload.layers=200")
    assert done.code == 2
    assert "job.yaml:8:3: error: " in done.err
    assert "no set of sites can train this model. a: " in done.err
    assert "does not fit: needs" in done.err
