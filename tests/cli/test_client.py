"""The operator's client: every status becomes its error, and no silence lasts."""

import threading
import time

import grpc
import pytest

from isthmus.orchestrator.client.coordinator_client import Client, CoordinatorUnreachableError
from isthmus.protos.control.v1 import control_pb2
from isthmus.protos.error_statuses import STATUS
from isthmus.protos.errors import (
    DeadlineExceededError,
    IsthmusError,
    NotFoundError,
    StateConflictError,
)
from isthmus.topology.spec.errors import ConfigError
from tests.fakes.scripted_coordinator import ScriptedCoordinator, serving

DOCUMENT = control_pb2.Document(source="job.yaml", text="version: 1\n")


@pytest.fixture
def coordinator() -> ScriptedCoordinator:
    return ScriptedCoordinator(
        runs=[control_pb2.Run(run_id="r1", state=control_pb2.RUN_STATE_ACTIVE)]
    )


def test_unary_calls(coordinator: ScriptedCoordinator) -> None:
    with serving(coordinator) as address, Client(address) as client:
        assert client.submit("r2", DOCUMENT, DOCUMENT).run_id == "r2"
        assert client.get_run("").run_id == "r2"
        assert [run.run_id for run in client.list_runs()] == ["r2", "r1"]
        assert client.cancel_run("r1").state == control_pb2.RUN_STATE_STOPPING
    assert coordinator.submitted[0].job == DOCUMENT


def test_streams_end_with_their_last_item(coordinator: ScriptedCoordinator) -> None:
    coordinator.watched = [control_pb2.Run(active_s=float(at)) for at in range(300)]
    coordinator.lines = [control_pb2.LogLine(site="a", source="rank0", text="hello")]
    coordinator.events = [control_pb2.Event(sequence=4, kind="run.submitted")]
    with serving(coordinator) as address, Client(address) as client:
        assert [run.active_s for run in client.watch_run("r1")] == [float(at) for at in range(300)]
        lines = list(client.read_logs("r1", follow=True, site="a", rank=0, tail=5))
        assert [line.text for line in lines] == ["hello"]
        assert [event.sequence for event in client.read_events("r1", follow=False)] == [4]


@pytest.mark.parametrize("kind", list(STATUS))
def test_each_status_becomes_its_error(
    coordinator: ScriptedCoordinator, kind: type[IsthmusError]
) -> None:
    status = STATUS[kind]
    coordinator.refuses_with = (status, "one line that says why")
    silent = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
    expected = CoordinatorUnreachableError if status in silent else kind
    with serving(coordinator) as address, Client(address) as client:
        with pytest.raises(expected) as told:
            client.get_run("r1")
        with pytest.raises(expected):
            list(client.watch_run("r1"))
    if expected is kind:
        assert str(told.value) == "one line that says why"
    else:
        assert address in str(told.value)


def test_mistakes_found_by_the_coordinator_are_mistakes_in_the_configuration(
    coordinator: ScriptedCoordinator,
) -> None:
    coordinator.refuses_with = (grpc.StatusCode.INVALID_ARGUMENT, "job.yaml:1:1: error: empty")
    with (
        serving(coordinator) as address,
        Client(address) as client,
        pytest.raises(ConfigError, match=r"job\.yaml:1:1"),
    ):
        client.submit("r2", DOCUMENT, DOCUMENT)


def test_nobody_there() -> None:
    with Client("127.0.0.1:1") as client:
        with pytest.raises(CoordinatorUnreachableError, match=r"127\.0\.0\.1:1"):
            client.get_run("")
        with pytest.raises(CoordinatorUnreachableError):
            list(client.read_events("", follow=True))


def test_a_server_that_stops_is_not_there(coordinator: ScriptedCoordinator) -> None:
    coordinator.refuses_with = (grpc.StatusCode.CANCELLED, "CANCELLED")
    with (
        serving(coordinator) as address,
        Client(address) as client,
        pytest.raises(CoordinatorUnreachableError, match=f"{address}: it stopped serving"),
    ):
        client.get_run("r1")


def test_no_such_run_and_a_conflict(coordinator: ScriptedCoordinator) -> None:
    with serving(coordinator) as address, Client(address) as client:
        with pytest.raises(NotFoundError, match="r9"):
            client.get_run("r9")
        coordinator.refuses_with = (grpc.StatusCode.ALREADY_EXISTS, "another run is going on")
        with pytest.raises(StateConflictError, match="going on"):
            client.submit("r2", DOCUMENT, DOCUMENT)


def test_a_silent_stream_of_a_living_coordinator_is_waited_for(
    coordinator: ScriptedCoordinator,
) -> None:
    coordinator.lines = [control_pb2.LogLine(text="only")]
    coordinator.holds_streams = True
    probed = threading.Event()
    answer = coordinator.GetRun

    def get_run(
        request: control_pb2.GetRunRequest, context: grpc.ServicerContext
    ) -> control_pb2.Run:
        if probed.is_set():
            coordinator.refuses_with = (grpc.StatusCode.UNAVAILABLE, "gone by now")
        probed.set()
        return answer(request, context)

    coordinator.GetRun = get_run  # type: ignore[method-assign]
    with serving(coordinator) as address, Client(address, silence_s=0.02) as client:
        lines = client.read_logs("r1", follow=True, site="", rank=-1, tail=0)
        assert next(lines).text == "only"
        with pytest.raises(CoordinatorUnreachableError):
            next(lines)
    assert probed.is_set()


def test_a_watch_ends_at_its_deadline(coordinator: ScriptedCoordinator) -> None:
    coordinator.watched = [control_pb2.Run(active_s=1.0)]
    coordinator.holds_streams = True
    with serving(coordinator) as address, Client(address) as client:
        seen: list[control_pb2.Run] = []
        with pytest.raises(DeadlineExceededError, match="r1"):
            seen.extend(client.watch_run("r1", time.monotonic() + 0.1))
        assert len(seen) <= 1


def test_leaving_a_stream_early_ends_its_thread(coordinator: ScriptedCoordinator) -> None:
    coordinator.watched = [control_pb2.Run(active_s=float(at)) for at in range(2000)]
    with serving(coordinator) as address, Client(address) as client:
        runs = client.watch_run("r1")
        next(runs)
        runs.close()  # type: ignore[attr-defined]
        assert "stream-reader" not in {thread.name for thread in threading.enumerate()}
