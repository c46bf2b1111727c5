"""The agent's small parts: outbox, socket folder."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from pathlib import Path

import pytest

from isthmus.protos.control.v1 import control_pb2 as control
from isthmus.protos.limits import CONTROL_MESSAGE_BYTES
from isthmus.sites.agent.session import BULK_BYTES, Outbox
from isthmus.sites.node.sockets import SOCKET_PATH_BYTES, socket_folder


def metric(step: int) -> control.Metric:
    """Return a small one."""
    return control.Metric(kind="step", rank=0, step=step, values={"loss": 1.0})


def take_all(outbox: Outbox) -> list[control.AgentMessage]:
    """Return everything that waits."""
    outbox._ended = True  # without saying so

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


@pytest.mark.no_cover
def test_metrics_are_dropped_when_nobody_takes_them_but_nothing_else_is() -> None:
    outbox = Outbox()
    size = metric(1 << 20).ByteSize()
    for step in range(BULK_BYTES // size + 1000):
        outbox.put_metric("r1", 1, metric(step))
    outbox.put(control.AgentMessage(ended=control.SiteEnded(run_id="r1")))
    *batches, last = take_all(outbox)
    assert last.HasField("ended")
    assert sum(each.ByteSize() for each in batches) <= BULK_BYTES
    outbox.put_metric("r1", 1, metric(7))
    assert take_all(outbox) == [], "what was sent may have to be sent again"
    outbox.put_metric("r1", 1, control.Metric(kind="checkpoint", step=8))
    (*_, last) = take_all(outbox)
    assert [each.step for each in last.metrics.metrics] == [8], "the run's outcome depends on it"
    outbox.acknowledge(last.sequence)
    outbox.put_metric("r1", 1, metric(7))  # there is room again
    assert take_all(outbox)[0].metrics.metrics[0].step == 7


def test_what_a_broken_connection_lost_is_taken_again_in_order() -> None:
    outbox = Outbox()
    outbox.put_metric("r1", 1, metric(0))
    outbox.put_digest(control.Digest(step=1))
    (first, second) = take_all(outbox)
    outbox.put_metric("r1", 1, metric(1))
    assert (first.sequence, second.sequence) == (1, 2)
    outbox.go_on(1)
    assert [each.sequence for each in take_all(outbox)] == [2, 3]
    outbox.go_on(None)
    again = take_all(outbox)
    assert [each.sequence for each in again] == [1, 2]
    assert again[1].metrics.metrics[0].step == 1


def test_a_digest_is_kept_in_short_rather_than_dropped() -> None:
    outbox = Outbox()
    names = [f"layer.{number}" for number in range(1000)]
    for step in range(1000):
        outbox.put_digest(control.Digest(step=step, combined=9, tensors=[1] * 1000, names=names))
    digests = [each.digest for each in take_all(outbox)]
    assert [each.step for each in digests] == list(range(1000))
    assert sum(each.ByteSize() for each in digests) < 2 * BULK_BYTES
    assert (len(digests[0].names), len(digests[-1].names)) == (1000, 0)


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
        assert len(str(folder / "gateway127.sock")) < SOCKET_PATH_BYTES
        (folder / "gateway0.sock").touch()
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
        (folder / "gateway0.sock").touch()
    with socket_folder() as mine, socket_folder():
        assert mine.exists()
        assert other.exists()
        assert not dead.exists()


@pytest.mark.parametrize("characters", [40, 50, 60, 70, 80, 90, 100, 200])
def test_sockets_have_short_paths_whatever_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, characters: int
) -> None:
    with tempfile.TemporaryDirectory(prefix="t-") as short:
        base = Path(short, "x" * (characters - len(short) - 1))
        base.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(base))
        with socket_folder() as folder:
            assert (folder.parent == base) == (characters <= 50)
            assert len(str(folder / "gateway9999.sock")) <= SOCKET_PATH_BYTES
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(folder / "gateway9999.sock"))
        assert not folder.exists()
