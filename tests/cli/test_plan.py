"""`isthmus plan`, and launching what it decides."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from isthmus.orchestrator.coordinator.submission import Submission
from isthmus.orchestrator.plans import read_plan
from isthmus.orchestrator.run_folder.home import find_run
from isthmus.topology.documents.load import load_job, load_topology
from isthmus.topology.planner.document import plan_text
from isthmus.topology.planner.plan import make_plan
from isthmus.topology.spec.plan_decisions import NUM_TOLD_ALTERNATIVES
from tests.cli.conftest import SMALL_JOB, SMALL_TOPOLOGY, Isthmus
from tests.cli.runs import a_run
from tests.fakes.run_specs import submission_of
from tests.fakes.scripted_coordinator import ScriptedCoordinator, serving


@functools.cache
def small_plan() -> str:
    """The plan of the small job, as `isthmus plan` writes it."""
    topology = load_topology(SMALL_TOPOLOGY, "topology.yaml")
    return plan_text(make_plan(load_job(SMALL_JOB, "job.yaml"), topology))


@pytest.fixture
def plan(job: Path) -> Path:
    path = job.parent / "plan.yaml"
    path.write_text(small_plan())
    return path


@pytest.fixture
def coordinator() -> Iterator[tuple[ScriptedCoordinator, str]]:
    scripted = ScriptedCoordinator(runs=[], watched=[a_run("SUCCEEDED")], lines=[], events=[])
    with serving(scripted) as address:
        yield scripted, address


def submitted(scripted: ScriptedCoordinator) -> Submission:
    [request] = scripted.submitted
    return submission_of(request)


def test_a_plan_is_checked_by_itself(isthmus: Isthmus, plan: Path) -> None:
    done = isthmus("validate", plan)
    assert "plan is valid; that it fits its job is checked by launch --plan" in done.out
    plan.write_text(plan.read_text().replace("codec: fp32", "codec: fp33"))
    done = isthmus("validate", plan)
    assert done.code == 2
    assert f"{plan}:" in done.err
    assert "did you mean 'fp32'?" in done.err


def test_what_crosses_has_a_price_where_links_have_one(isthmus: Isthmus, job: Path) -> None:
    topology = job.parent / "topology.yaml"
    assert "egress" not in isthmus("plan", job).out
    topology.write_text(
        topology.read_text().replace(
            "100Mbit/s, rtt: 10ms}", "100Mbit/s, rtt: 10ms, egress: 20USD/GB}"
        )
    )
    fp32 = isthmus("plan", job).out
    (line,) = [each for each in fp32.splitlines() if each.startswith("egress: ")]
    assert " a step, $" in line
    assert "a day, $" in line
    assert "for all of the job's steps" in line
    assert "saves" not in line
    assert "egress a step" in fp32
    int8 = isthmus("plan", job, "--set", "exchange.codec=int8").out
    assert "int8 instead of fp32 saves $" in int8


@pytest.mark.no_cover  # it plans
def test_simulations_predict_what_the_plan_does(isthmus: Isthmus, job: Path) -> None:
    # A codec whose ratio was measured once, a link whose emulated sites may open few connections.
    asked = ("--set", "plan={codecs: [bf16-split]}", "--set", "links.0.rtt=100ms", "--json")
    plan = isthmus("plan", job, *asked).envelope["data"]["plan"]
    home = ("--home", job.parent / "home")
    [setting] = isthmus("simulate", job, *asked, *home).envelope["data"]["settings"]
    predicted = setting["result"]["predicted"]
    for key in ("compute_s", "exchange_s"):
        assert predicted[key] == pytest.approx(plan["predicted"][key], rel=1e-5), key
    for key in ("step_s", "efficiency"):
        assert predicted[key] == pytest.approx(plan["predicted"][key], rel=1e-3), key


def test_people_get_sentences_and_tables(isthmus: Isthmus, job: Path) -> None:
    done = isthmus("plan", job)
    assert done.code == 0, done.err
    assert "2 of 3 sites take part" in done.out
    assert "c is left out: with it, a step takes" in done.out
    for heading in ("without it", "with it", "step with 1 Gbit/s more", "instead", "rests on"):
        assert heading in done.out
    assert "links, bandwidth: 100Mbit/s, 100kbit/s (the topology's bandwidth)" in done.out
    assert "micro-batch: 4 sequences a rank at once, at most" in done.out
    assert (
        "gateways a node of a: 1; links ask for 1, ranks allow 2; limited by links\n"
        "gateways a node of b: 1; links ask for 1, ranks allow 1; limited by links\n"
    ) in done.out
    assert max(map(len, done.out.splitlines())) <= 110


@pytest.mark.no_cover  # it plans
def test_programs_get_the_plan(isthmus: Isthmus, job: Path) -> None:
    data = isthmus("plan", job, "--json").envelope["data"]
    placement = data["plan"]["decisions"]["placement"]
    assert [each["site"] for each in placement] == ["a", "b"]
    assert sum(each["sequences"] for each in placement) == 12
    assert data["out"] is None
    assert data["gateways_per_node"]["a"] == {
        "num_gateways": 1,
        "asked": {"links": 1, "ranks": 2},
        "limit": "links",
    }
    assert list(data["gateways_per_node"]) == ["a", "b"]


@pytest.mark.no_cover  # it plans
def test_a_plan_is_compared_with_another(isthmus: Isthmus, job: Path, plan: Path) -> None:
    same = isthmus("plan", job, "--diff", plan)
    assert same.out.strip() == f"no difference to {plan}"
    wish = "plan.codecs=[int4]"
    differs = isthmus("plan", job, "--set", wish, "--diff", plan, "--json").envelope["data"]
    changes = {each["path"]: each for each in differs["changes"]}
    assert changes["decisions.exchange.codec"]["before"] == "fp32"
    assert changes["decisions.exchange.codec"]["after"] == "int4"
    assert (
        "decisions.exchange.codec: fp32 → int4"
        in isthmus("plan", job, "--set", wish, "--diff", plan).out
    )


def test_a_plan_is_executed_as_it_is(
    isthmus: Isthmus,
    job: Path,
    plan: Path,
    coordinator: tuple[ScriptedCoordinator, str],
    home: Path,
) -> None:
    scripted, address = coordinator
    text = plan.read_text().replace("codec: fp32", "codec: int8")  # a decision that was edited
    plan.write_text(text)
    at = ("--coordinator", address)
    done = isthmus("launch", job, "--plan", plan, "--set", "trainer.steps=3", "--detach", *at)
    assert done.code == 0, done.err
    run = submitted(scripted)
    assert [site.name for site in run.spec.topology.sites] == ["a", "b"]
    assert len(run.described.sites) == 3
    assert run.spec.job.exchange.codec == "int8"
    assert run.spec.job.trainer.steps == 3
    kept, planned = find_run(home, "").plan, read_plan(plan).plain
    assert kept["alternatives"] == planned["alternatives"][:NUM_TOLD_ALTERNATIVES]
    assert kept["alternatives"]
    assert (kept["why"], kept["predicted"]) == (planned["why"], planned["predicted"])


@pytest.mark.no_cover  # it plans
def test_a_job_that_says_plan_is_planned(
    isthmus: Isthmus, job: Path, coordinator: tuple[ScriptedCoordinator, str]
) -> None:
    scripted, address = coordinator
    job.write_text(f"{SMALL_JOB}plan: {{codecs: [fp32, int4]}}\n")
    done = isthmus("launch", job, "--detach", "--coordinator", address)
    assert done.code == 0, done.err
    assert "plan: 2 of 3 sites take part" in done.err
    assert [each.site for each in submitted(scripted).spec.job.placement] == ["a", "b"]


def test_a_job_that_does_not_is_not(
    isthmus: Isthmus, job: Path, coordinator: tuple[ScriptedCoordinator, str]
) -> None:
    scripted, address = coordinator
    done = isthmus("launch", job, "--detach", "--coordinator", address)
    assert done.code == 0
    assert "plan" not in done.err
    assert submitted(scripted).spec.job.placement == ()


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("sequences: 4", "sequences: 5", "the sequences add up to 13, and trainer.global_batch"),
        ("site: b", "site: bb", "unknown site 'bb' (did you mean 'b'?)"),
        ("tree: gather", "tree: star\n    hub: c", "unknown site 'c'"),
        ("chunk: 2MiB", "chunk: 1KiB", "want 64KiB to 16MiB"),
    ],
)
def test_edited_decisions_are_checked_at_the_plans_lines(
    isthmus: Isthmus, job: Path, plan: Path, old: str, new: str, told: str
) -> None:
    text = plan.read_text()
    assert old in text, text
    plan.write_text(text.replace(old, new, 1))
    done = isthmus("launch", job, "--plan", plan)
    assert done.code == 2
    assert told in done.err
    assert f"{plan}:" in done.err


def test_a_plan_for_another_topology_is_refused(isthmus: Isthmus, job: Path, plan: Path) -> None:
    done = isthmus("launch", job, "--plan", plan, "--set", "links.0.rtt=20ms")
    assert done.code == 2
    assert f"{plan}:5:" in done.err
    assert f"`isthmus plan {job} --out {plan}`" in done.err


@pytest.mark.no_cover  # it plans
def test_a_plan_that_cannot_be_written_names_its_file(
    isthmus: Isthmus, job: Path, tmp_path: Path
) -> None:
    path = tmp_path / "absent" / "plan.yaml"
    error = isthmus("plan", job, "--out", path, "--json").envelope["error"]
    assert (error["code"], error["where"]) == ("FILE_ERROR", {"file": str(path)})


def test_what_trains_nothing_has_no_plan(isthmus: Isthmus, job: Path) -> None:
    error = isthmus("plan", job, "--set", "probe={}", "--json").envelope["error"]
    assert error["code"] == "INVALID_CONFIG"
    assert error["where"][0]["path"] == "probe"


def test_a_batch_too_small_for_all_sites_is_planned_for_some_and_launched(
    isthmus: Isthmus, job: Path, coordinator: tuple[ScriptedCoordinator, str]
) -> None:
    scripted, address = coordinator
    job.write_text(SMALL_JOB.replace("global_batch: 12", "global_batch: 2"))
    refused = isthmus("validate", job)
    assert refused.code == 2
    assert "with a `plan` section, `launch` leaves sites out" in refused.err
    path = job.parent / "small.yaml"
    planned = isthmus("plan", job, "--out", path)
    assert planned.code == 0, planned.err
    assert "is left out: each rank takes a sequence at least" in planned.out.replace("\n", " ")
    done = isthmus("launch", job, "--plan", path, "--detach", "--coordinator", address)
    assert done.code == 0, done.err
    assert submitted(scripted).spec.topology.num_ranks <= 2
    job.write_text(job.read_text() + "plan: {}\n")
    assert isthmus("validate", job).code == 0
