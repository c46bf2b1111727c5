"""A signal ends every command that waits, whenever it comes, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import os
import queue
import random
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name

import grpc
import pytest

from isthmus.orchestrator.cli.main import main
from isthmus.orchestrator.cli.whole_run import run_to_end
from isthmus.orchestrator.documents import load_pair
from isthmus.orchestrator.interruption import (
    INTERRUPTION,
    SAME_S,
    Interrupted,
    Interruption,
    first_signal,
    run_command,
)
from isthmus.orchestrator.run_folder.home import run_folders
from isthmus.protos.control.v1 import control_pb2
from tests.cli.conftest import Isthmus, Result
from tests.cli.runs import a_run
from tests.fakes.scripted_coordinator import ScriptedCoordinator, serving
from tests.fakes.signals_at import signal_at

HIDE_CURSOR, SHOW_CURSOR = b"\x1b[?25l", b"\x1b[?25h"
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Cancellable(ScriptedCoordinator):
    """Whatever state a run is in, it can be cancelled, and then nothing more is said of it."""

    def CancelRun(  # noqa: N802 - gRPC fixes the name
        self, request: control_pb2.CancelRunRequest, context: grpc.ServicerContext
    ) -> control_pb2.Run:
        self.holds_streams = False
        self.runs[0].state = control_pb2.RUN_STATE_ACTIVE
        return super().CancelRun(request, context)


@contextmanager
def following() -> Iterator[tuple[ScriptedCoordinator, str]]:
    """Give a coordinator whose streams never end by themselves, and its address."""
    scripted = Cancellable(
        runs=[a_run("ACTIVE")],
        watched=[a_run("ACTIVE")],
        lines=[control_pb2.LogLine(site="a", source="rank0", text="hello", sequence=1)],
        events=[control_pb2.Event(sequence=4, kind="run.submitted")],
        holds_streams=True,
    )
    with serving(scripted) as address:
        yield scripted, address


def interrupted_at(
    isthmus: Isthmus, line: int | None, signum: int, arguments: list[str]
) -> tuple[Result, int, ScriptedCoordinator]:
    """Run a command with a signal at one of its lines; at the latest once it follows its stream."""
    with following() as (scripted, address), signal_at(line, signum) as sender:
        scripted.before_end = sender.send
        done = isthmus(*arguments, "--coordinator", address)
    return done, sender.num_lines, scripted


COMMANDS = {
    "status": ["status", "--watch"],
    "status, json": ["status", "--watch", "--json"],
    "logs": ["logs", "-f", "--json"],
    "events": ["events", "-f"],
    "wait": ["wait", "--json"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(COMMANDS))
def test_a_signal_at_any_moment_ends_a_command_that_waits(isthmus: Isthmus, name: str) -> None:
    arguments = COMMANDS[name]
    interrupted_at(isthmus, None, signal.SIGINT, arguments)  # imports what it needs
    _, num_lines, _ = interrupted_at(isthmus, None, signal.SIGINT, arguments)
    for seed in range(12):
        chance = random.Random(seed)
        line, signum = chance.randrange(1, num_lines), chance.choice(SIGNALS)
        done, *_ = interrupted_at(isthmus, line, signum, arguments)
        told = f"{seed=} {line=} {done}"
        assert done.code == 128 + signum, told
        assert "Traceback" not in done.err, told
        if "--json" in arguments:
            assert done.lines[-1]["data"] == {"interrupted": True}, told
            assert done.lines[-1]["exit_code"] == done.code, told
            assert sum("schema_version" in each for each in done.lines) == 1, told


@pytest.mark.slow
def test_a_signal_at_any_moment_of_a_launch(isthmus: Isthmus, files: Path, home: Path) -> None:
    arguments = ["launch", str(files / "job.yaml")]
    interrupted_at(isthmus, None, signal.SIGINT, arguments)
    done, num_lines, scripted = interrupted_at(isthmus, None, signal.SIGINT, arguments)
    assert (done.code, len(scripted.submitted)) == (130, 1), done
    for seed in range(8):
        chance = random.Random(seed)
        signum = chance.choice(SIGNALS)
        # Half of them among the last, where it submits and follows.
        line = chance.randrange(num_lines * (seed % 2) * 9 // 10 + 1, num_lines)
        before = len(run_folders(home))
        done, _, scripted = interrupted_at(isthmus, line, signum, arguments)
        told = f"{seed=} {line=} {done}"
        assert done.code == 128 + signum, told
        assert "Traceback" not in done.err, told
        assert len(run_folders(home)) - before == len(scripted.submitted), told
        if scripted.submitted:
            assert f"isthmus cancel {scripted.submitted[0].run_id}" in done.err, told


@pytest.mark.parametrize("after", ["api.submission._submit_to", "api.launching.submit"])
def test_a_signal_just_after_a_run_was_submitted(
    isthmus: Isthmus, files: Path, home: Path, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    place = f"isthmus.orchestrator.{after}"
    done_first = resolve_name(place)

    def then_a_signal(*arguments: object, **named: object) -> object:
        result = done_first(*arguments, **named)
        signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(place, then_a_signal)
    done, _, scripted = interrupted_at(
        isthmus, None, signal.SIGINT, ["launch", str(files / "job.yaml")]
    )
    (submitted,) = scripted.submitted
    assert [each.run_id for each in run_folders(home)] == [submitted.run_id]
    assert done.code == 130
    assert f"isthmus cancel {submitted.run_id}" in done.err, done


@pytest.mark.slow
def test_a_signal_at_any_moment_cancels_a_run_that_was_submitted(files: Path, home: Path) -> None:
    pair = load_pair(files / "job.yaml")

    def run(line: int | None, name: str) -> tuple[int, ScriptedCoordinator]:
        with following() as (scripted, address), signal_at(line, signal.SIGINT) as sender:
            scripted.before_end = sender.send
            with (
                INTERRUPTION.listening(is_program=False),
                pytest.raises(KeyboardInterrupt),
                INTERRUPTION.holding(),
            ):
                run_to_end(pair, home, name, timeout_s=60, show=lambda _: None, coordinator=address)
        return sender.num_lines, scripted

    num_lines, _ = run(None, "counted")
    for seed in range(12):
        line = random.Random(seed).randrange(1, num_lines)
        _, scripted = run(line, f"run-{seed}")
        states = [each.state for each in scripted.runs if each.run_id == f"run-{seed}"]
        assert len(states) == len(scripted.submitted), f"{seed=} {line=}"
        assert set(states) <= {control_pb2.RUN_STATE_STOPPING}, f"{seed=} {line=} {states}"


@pytest.mark.slow
def test_the_cursor_is_given_back_whenever_the_signal_comes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("ISTHMUS_HOME", str(tmp_path))
    num_lines, _, _ = on_a_terminal(None, signal.SIGINT)
    num_hidden = 0
    for seed in range(8):
        line = random.Random(seed).randrange(num_lines // 2, num_lines)
        _, code, shown = on_a_terminal(line, signal.SIGTERM)
        assert code == 143, f"{seed=} {line=} {shown!r}"
        assert b"Traceback" not in shown, f"{seed=} {line=} {shown!r}"
        if HIDE_CURSOR in shown:
            num_hidden += 1
            assert shown.rindex(HIDE_CURSOR) < shown.rindex(SHOW_CURSOR), f"{seed=} {line=}"
    assert num_hidden


def on_a_terminal(line: int | None, signum: int) -> tuple[int, int, bytes]:
    """Watch a run with stderr on a terminal.

    Return the lines it took, its status, what was shown.
    """
    terminal, end = os.openpty()
    shown: list[bytes] = []
    reader = threading.Thread(target=_drain, args=(terminal, shown))
    before = sys.stderr
    with os.fdopen(end, "w", encoding="utf-8", errors="replace") as stream:
        reader.start()
        sys.stderr = stream
        try:
            with following() as (scripted, address), signal_at(line, signum) as sender:
                scripted.before_end = sender.send
                code = main(["status", "--watch", "--coordinator", address])
        finally:
            sys.stderr = before
    reader.join(10)
    assert not reader.is_alive()
    os.close(terminal)
    return sender.num_lines, code, b"".join(shown)


def _drain(terminal: int, shown: list[bytes]) -> None:
    try:
        while data := os.read(terminal, 65536):
            shown.append(data)
    except OSError:  # how Linux tells that the other end is closed
        return


class Clock:
    """A time that a test sets, and where a process would have ended."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.left_with: list[int] = []
        self.interruption = Interruption(lambda: self.now_s, self.left_with.append)


@pytest.mark.parametrize("signum", SIGNALS)
def test_what_is_held_is_interrupted_where_it_waits_and_once(signum: int) -> None:
    clock = Clock()
    with clock.interruption.listening(is_program=False), clock.interruption.holding():
        signal.raise_signal(signum)
        with pytest.raises(Interrupted) as raised:
            clock.interruption.check()
        clock.interruption.check()
    assert clock.interruption.answer(raised.value) == 128 + signum


def test_where_nothing_is_held_a_signal_raises_at_once_and_is_never_lost() -> None:
    clock = Clock()
    with clock.interruption.listening(is_program=False):
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(Interrupted), clock.interruption.holding():  # as if it had been lost
            raise AssertionError("nothing new is begun")
        with clock.interruption.holding():
            clock.interruption.check()


def test_a_second_signal_ends_the_process_and_an_echo_does_not() -> None:
    clock = Clock()
    with clock.interruption.listening(is_program=False), clock.interruption.holding():
        signal.raise_signal(signal.SIGTERM)
        clock.now_s += SAME_S / 2
        signal.raise_signal(signal.SIGTERM)
        assert clock.left_with == []
        clock.now_s += SAME_S
        signal.raise_signal(signal.SIGINT)
        assert clock.left_with == [130]


def test_what_is_printed_to_somebody_slow_is_interrupted_at_once() -> None:
    clock = Clock()
    with clock.interruption.listening(is_program=False), clock.interruption.holding():
        with pytest.raises(Interrupted), clock.interruption.releasing():
            signal.raise_signal(signal.SIGINT)
        clock.interruption.check()


def test_handlers_are_given_back_and_ignored_signals_stay_ignored() -> None:
    before = signal.getsignal(signal.SIGINT)
    old = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with INTERRUPTION.listening(is_program=False):
            assert signal.getsignal(signal.SIGINT) is not before
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGTERM, old)


def test_an_error_made_of_an_interruption_is_told_as_one(
    isthmus: Isthmus, monkeypatch: pytest.MonkeyPatch
) -> None:
    def importing(*_: object) -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt as error:
            raise ImportError("numpy.core failed to import") from error

    monkeypatch.setattr("isthmus.orchestrator.cli.main.LazyGroup.get_command", importing)
    done = isthmus("status", "--json")
    assert done.code == done.envelope["exit_code"] == 143
    assert not done.err


def test_a_wait_for_an_item_ends_with_it_at_its_deadline_or_by_a_signal() -> None:
    items: queue.Queue[int] = queue.Queue()
    with INTERRUPTION.listening(is_program=False), INTERRUPTION.holding():
        items.put(7)
        assert INTERRUPTION.next_of(items, 0.0) == 7
        with pytest.raises(queue.Empty):
            INTERRUPTION.next_of(items, 0.0)
        sender = threading.Timer(0, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
        sender.start()
        with pytest.raises(Interrupted):
            INTERRUPTION.next_of(items, 60.0)
        sender.join(10)


def test_a_coroutine_is_cancelled() -> None:
    ended: list[str] = []

    async def measure() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
            await asyncio.wait_for(asyncio.Event().wait(), 60)
        finally:
            ended.append("it has cleaned up")

    with INTERRUPTION.listening(is_program=False), pytest.raises(Interrupted):
        run_command(measure)
    assert ended


def test_what_a_cancelled_coroutine_fails_with_is_not_told_and_a_second_signal_is_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left_with: list[int] = []
    monkeypatch.setattr(INTERRUPTION, "_exit_now", left_with.append)
    clock = [100.0]
    monkeypatch.setattr(INTERRUPTION, "_now_s", lambda: clock[0])

    async def measure() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
            await asyncio.wait_for(asyncio.Event().wait(), 60)
        finally:
            raise OSError("what it used is gone")

    with INTERRUPTION.listening(is_program=False), INTERRUPTION.holding():
        with pytest.raises(Interrupted):
            run_command(measure)
        gc.collect()
        clock[0] += 2 * SAME_S
        signal.raise_signal(signal.SIGTERM)
    assert left_with == [143]
    assert not caplog.records


def test_a_signal_before_a_loop_listens_is_raised_there() -> None:
    async def never() -> None:
        raise AssertionError("nothing is begun")

    async def serve() -> None:
        signal.raise_signal(signal.SIGTERM)
        with first_signal():
            await never()

    with (
        INTERRUPTION.listening(is_program=False),
        INTERRUPTION.holding(),
        pytest.raises(Interrupted),
    ):
        asyncio.run(serve())
