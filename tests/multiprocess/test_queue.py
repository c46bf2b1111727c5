"""Several runs at one coordinator, by the command line."""

import pytest

from tests.multiprocess.harness import Bench
from tests.multiprocess.test_up import of_run, written

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.exhaustive]


def test_runs_that_wait_begin_by_priority(run: Bench) -> None:
    topology = written(run, {})
    job = str(run.folder / "job.yaml")
    run.isthmus("up", topology).check()
    for name, priority in (("one", "0"), ("two", "0"), ("three", "5")):
        run.isthmus("launch", job, "--run-id", name, "--priority", priority, "--detach").check()
    queue = run.isthmus("queue", "--json").check().envelope["data"]
    assert [(each["run_id"], each["position"]) for each in queue["runs"]] == [
        ("one", None),
        ("three", 1),
        ("two", 2),
    ]
    assert queue["sites"] == {"a": "one", "b": "one"}
    assert [each["waits_for"] for each in queue["runs"]] == [{}, *[{"one": ["a", "b"]}] * 2]
    cancelled = run.isthmus("cancel", "two", "--json").check().envelope["data"]
    assert cancelled["state"] == "CANCELLED"
    run.isthmus("wait", "two").check(6)
    run.isthmus("wait", "one").check()
    run.isthmus("wait", "three").check()
    assert run.isthmus("queue", "--json").check().envelope["data"]["runs"] == []
    run.isthmus("down", topology).check()
    assert of_run(run) == []


def test_without_a_coordinator_to_wait_at_a_priority_is_none(run: Bench) -> None:
    """The one that launch starts takes this one run."""
    written(run, {})
    failed = run.isthmus("launch", str(run.folder / "job.yaml"), "--priority", "1", "--json")
    assert failed.check(2).envelope["error"]["code"] == "USAGE"
