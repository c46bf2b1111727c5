"""The agent's small parts: outbox, socket folder, documents."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

import pytest

from protos.control.v1 import control_pb2 as control
from protos.limits import CONTROL_MESSAGE_BYTES
from sites.agent.documents import read_documents
from sites.agent.outbox import BULK_BYTES, Outbox
from sites.agent.site_failures import SiteError
from sites.agent.sockets import SOCKET_PATH_BYTES, socket_folder
from tests.fakes.agent_bench import SCRIPT, job_yaml, prepare, topology_yaml


def metric(step: int) -> control.Metric:
    """Return a small one."""
    return control.Metric(kind="step", rank=0, step=step, values={"loss": 1.0})


def take_all(outbox: Outbox) -> list[control.AgentMessage]:
    """Return everything that waits."""
    outbox.end()

    async def taken() -> list[control.AgentMessage]:
        messages = []
        while (message := await asyncio.wait_for(outbox.take(), 10)) is not None:
            messages.append(message)
        return messages

    return asyncio.run(taken())


def test_metrics_travel_in_order_in_messages_of_bounded_size() -> None:
    outbox = Outbox()
    for step in range(5000):
        outbox.put_metric("r1", 1, metric(step))
    outbox.put(control.AgentMessage(ended=control.SiteEnded(run_id="r1")))
    outbox.put_metric("r2", 2, metric(0))
    outbox.put_heartbeat(1)
    outbox.put_heartbeat(2)
    first, *messages = take_all(outbox)
    assert first.heartbeat.sequence == 2
    assert [each.WhichOneof("kind") for each in messages[-2:]] == ["ended", "metrics"]
    assert messages[-1].metrics.run_id == "r2"
    steps = [each.step for message in messages[:-2] for each in message.metrics.metrics]
    assert steps == list(range(5000))
    assert all(message.ByteSize() <= CONTROL_MESSAGE_BYTES for message in messages)


def test_metrics_are_dropped_when_nobody_takes_them_but_nothing_else_is() -> None:
    outbox = Outbox()
    size = metric(1 << 20).ByteSize()
    for step in range(BULK_BYTES // size + 1000):
        outbox.put_metric("r1", 1, metric(step))
    outbox.put(control.AgentMessage(ended=control.SiteEnded(run_id="r1")))
    *batches, last = take_all(outbox)
    assert last.HasField("ended")
    assert sum(each.ByteSize() for each in batches) <= BULK_BYTES
    outbox.put_metric("r1", 1, metric(7))  # there is room again
    assert take_all(outbox)[0].metrics.metrics[0].step == 7


def test_a_digest_too_large_for_a_message_keeps_its_sum() -> None:
    outbox = Outbox()
    names = [f"layer.{number}.weight" for number in range(5000)]
    outbox.put_digest(control.Digest(step=1, combined=9, tensors=[1] * 5000, names=names))
    outbox.put_digest(control.Digest(step=2, combined=9, tensors=[1] * 50, names=names[:50]))
    large, small = (each.digest for each in take_all(outbox))
    assert (large.combined, list(large.names)) == (9, [])
    assert len(small.names) == 50


def test_the_socket_folder_is_private_short_and_gone_afterwards() -> None:
    with socket_folder() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        assert len(str(folder / "node12.sock")) < SOCKET_PATH_BYTES
        (folder / "node0.sock").touch()
    assert not folder.exists()


def test_a_killed_agents_folder_is_swept_and_a_living_ones_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory(prefix="t-") as short:  # pytest's own paths are too long
        monkeypatch.setattr(tempfile, "tempdir", short)
        _check_sweeping(Path(short))


def _check_sweeping(base: Path) -> None:
    dead = base / f"isthmus-agent-{2**22 - 1}-x"
    other = base / f"isthmus-agent-{os.getppid()}-x"
    for folder in (dead, other):
        folder.mkdir()
        (folder / "node0.sock").touch()
    with socket_folder() as mine, socket_folder():
        assert mine.exists()
        assert other.exists()
        assert not dead.exists()


def test_a_temporary_folder_with_a_long_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(OSError, match="set TMPDIR"), socket_folder():
        pass
    assert list(long.iterdir()) == []


def test_documents_say_what_to_start(tmp_path: Path) -> None:
    order = prepare(topology_yaml(2, 3), job_yaml("done"))
    documents = read_documents(order, "a", tmp_path)
    assert documents.folder == tmp_path / "r1"
    assert documents.command == (str(SCRIPT), "done")
    assert documents.node_folder(1).is_dir()
    environment = documents.environment(Path("/s"))
    assert Path(environment["ISTHMUS_JOB"]).read_text() == order.job.text
    assert environment["ISTHMUS_OVERRIDES"] == '{"job": [], "topology": []}'
    assert documents.name == "r1-1"


def test_an_embedded_agents_folder_is_its_runs_already(tmp_path: Path) -> None:
    state = tmp_path / "runs" / "r1" / "sites" / "a"
    assert read_documents(prepare(topology_yaml(), job_yaml()), "a", state).folder == state


def test_a_relative_script_is_beside_the_job_file(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    order = prepare(topology_yaml(), job_yaml(entrypoint="train.py"))
    order.job.source = str(tmp_path / "job.yaml")
    assert read_documents(order, "a", tmp_path).command == (str(tmp_path / "train.py"),)


def _other_hash(order: control.Prepare) -> None:
    order.config_hash = "0" * 64


def _bad_yaml(order: control.Prepare) -> None:
    order.job.text = "version: 1\nnam: x\n"


def _bad_name(order: control.Prepare) -> None:
    order.run_id = "../x"


def _no_script(order: control.Prepare) -> None:
    order.CopyFrom(prepare(topology_yaml(), job_yaml(entrypoint="/no/such.py")))


@pytest.mark.parametrize(
    ("spoil", "code", "said"),
    [
        (_other_hash, "CONFIG_MISMATCH", "site a resolves the configuration to"),
        (_bad_yaml, "INVALID_CONFIG", "nam"),
        (_bad_name, "PROTOCOL_VIOLATION", "no name of a run"),
        (_no_script, "LAUNCH_FAILED", "/no/such.py"),
    ],
)
def test_what_cannot_be_started_is_said(
    tmp_path: Path, spoil: object, code: str, said: str
) -> None:
    order = prepare(topology_yaml(), job_yaml())
    spoil(order)  # type: ignore[operator]
    with pytest.raises(SiteError, match=said) as caught:
        read_documents(order, "a", tmp_path)
    assert caught.value.code == code


def test_a_site_that_is_not_in_the_topology_is_named(tmp_path: Path) -> None:
    with pytest.raises(SiteError, match="no site 'z'"):
        read_documents(prepare(topology_yaml(), job_yaml()), "z", tmp_path)
