"""What is told of a run whose script makes a mistake at one rank: that, there, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.harness import Bench, Result, job_yaml, topology_yaml

pytestmark = [pytest.mark.multiprocess, pytest.mark.exhaustive]

SCRIPT = Path(__file__).parent / "scripts" / "user_trouble.py"
SITES = [(1, 2), (1, 2)]


def launch(run: Bench, *arguments: object, exchange: str = "", sites: Any = SITES) -> Result:  # noqa: ANN401
    listed = ", ".join(f'"{argument}"' for argument in arguments)
    job = job_yaml(entrypoint=str(SCRIPT)) + f"arguments: [{listed}]\n"
    job = job.replace("exchange: {", f"exchange: {{{exchange}")
    return run.launch(topology_yaml(sites, rtt="2ms"), job)


def notes(result: Result) -> str:
    return "\n".join(result.envelope["data"]["notes"])


@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize("trouble", ["nan", "all-nan"])
def test_a_nan_is_noted_at_once_and_is_not_the_same_data(
    run: Bench, trouble: str, codec: str
) -> None:
    exchange = "" if codec == "fp32" else "error_feedback: true, "
    result = launch(run, 8, trouble, "b", 1, 3, exchange=exchange).check()
    told = [each for each in result.envelope["data"]["notes"] if each.startswith("NON_FINITE")]
    assert "NON_FINITE: site b, rank" in notes(result)
    assert "in step 3 the gradient of " in notes(result)
    assert len(told) == (1 if trouble == "nan" else 2), told
    if trouble == "nan":
        assert told[0].startswith("NON_FINITE: site b, rank 1: in step 3 the gradient of "), told


@pytest.mark.parametrize("trouble", ["nan", "all-nan"])
def test_a_nan_stops_the_run_where_it_says_so(run: Bench, trouble: str) -> None:
    result = launch(run, 8, trouble, "b", 1, 3, exchange="non_finite: stop, ").check(1)
    error = result.envelope["error"]
    assert error["code"] == "NON_FINITE", error
    assert "in step 3 the gradient of " in error["message"]
    if trouble == "nan":
        assert (error["where"]["site"], error["where"]["rank"]) == ("b", 1)
    run.wait_for_nothing_left(20)


@pytest.mark.parametrize("way", ["site", "global"])
def test_same_inputs_and_a_buffer_that_differs_are_noted(run: Bench, way: str) -> None:
    job = job_yaml(entrypoint=str(SCRIPT.with_name("user_unlike.py"))) + f"arguments: [{way}]\n"
    told = notes(run.launch(topology_yaml([(1, 1), (1, 1)], rtt="2ms"), job).check())
    is_wrong = way == "site"
    assert ("called the model with the same inputs in 3 steps" in told) is is_wrong, told
    assert ("a DistributedSampler divides 64 samples by seed 0" in told) is is_wrong, told
    assert ("buffer bias differs between sites a and b after step 1" in told) is is_wrong, told
    assert "buffer count" not in told


def test_a_script_that_forgets_to_attach_fails(run: Bench) -> None:
    result = launch(run, 5, "forget", "b", 1, 3).check(1)
    error = result.envelope["error"]
    assert error["code"] == "NEVER_ATTACHED"
    assert "`site.attach(model, optimizer)`" in error["message"]
    assert "averages=False" in error["hint"]
    events = run.isthmus("events", "--json").check().out
    assert "site.stepped_alone" in events
    run.wait_for_nothing_left(20)


@pytest.mark.parametrize(
    ("trouble", "code", "said"),
    [
        ("end", "SCRIPT_FAILED", "rank 0 of site a ended with status 0 while others"),
        ("quit", "SCRIPT_FAILED", "rank 0 of site a ended with status 0 while others"),
        ("exit3", "SCRIPT_FAILED", "rank 0 of site a exited with status 3"),
        ("term", "RANK_KILLED", "rank 0 of site a was killed by SIGTERM"),
    ],
)
def test_whoever_ends_first_is_named(run: Bench, trouble: str, code: str, said: str) -> None:
    result = launch(run, 300, trouble, "a", 0, 5).check(1)
    error = result.envelope["error"]
    assert (error["code"], error["where"]["site"], error["where"]["rank"]) == (code, "a", 0), error
    assert said in error["message"]
    run.wait_for_nothing_left(20)


def test_of_several_nodes_the_first_end_is_named(run: Bench) -> None:
    result = launch(run, 300, "end", "a", 1, 5, sites=[(2, 1), (1, 1)]).check(1)
    error = result.envelope["error"]
    assert (error["code"], error["where"]["rank"]) == ("SCRIPT_FAILED", 1), error
    assert "rank 1 of site a ended with status 0 while others" in error["message"]


def test_a_site_that_ends_before_the_others_is_named(run: Bench) -> None:
    result = launch(run, 300, "end", "a", 0, 5, sites=[(1, 1), (1, 1)]).check(1)
    error = result.envelope["error"]
    assert error["where"]["site"] == "a", error
