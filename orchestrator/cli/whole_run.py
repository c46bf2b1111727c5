"""One embedded run, from its submission until its last process has gone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from isthmus.orchestrator.api.errors import CommandError
from isthmus.orchestrator.api.submission import submit
from isthmus.orchestrator.cli.views import exit_code_of, reason_code
from isthmus.orchestrator.client.recorded_run import RecordedRun
from isthmus.orchestrator.client.run_reader import reading
from isthmus.orchestrator.coordinator.journal import JournalError
from isthmus.orchestrator.core.event_kinds import EventKind
from isthmus.orchestrator.documents import Pair
from isthmus.orchestrator.evidence.bench.experiment import Ended
from isthmus.orchestrator.evidence.record.bench_record import Failed
from isthmus.orchestrator.interruption import INTERRUPTION
from isthmus.orchestrator.run_folder.home import RunChoice, RunFolder
from isthmus.orchestrator.run_folder.state_lock import is_abandoned
from isthmus.protos.catalogue import CATALOGUE
from isthmus.protos.control.v1 import control_pb2
from isthmus.protos.errors import DeadlineExceededError, IsthmusError
from isthmus.protos.training_part import require_training_part

STOP_S = 30.0
"""Time that a run has to end once it was told to."""
POLL_S = 0.02
NOT_EMULATED = "none"


def run_to_end(
    pair: Pair,
    home: Path,
    run_id: str,
    *,
    timeout_s: float,
    show: Callable[[control_pb2.Run], None],
    coordinator: str | None = None,
    faults: Sequence[str] = (),
) -> Ended:
    """Make one run, on this machine unless a coordinator is named.

    Return when nothing of it is left but its folder.

    An interruption, or whatever else is raised while it goes on, cancels it first.

    Args:
        pair: Its documents.
        home: Its folder will be `home`/runs/`run_id`.
        run_id: A new one.
        timeout_s: A run that takes longer is cancelled and has failed.
        show: Is given the run at each change and each second.
        coordinator: Its address; None: one is started.
        faults: As of `submit`.

    Raises:
        CannotTrainError: it would be on this machine, which lacks what it needs.
    """
    if coordinator is None:
        require_training_part()
    with INTERRUPTION.holding():
        try:
            folder = submit(pair, home, run_id, coordinator, faults)
        except (CommandError, IsthmusError) as error:
            return Ended(NOT_EMULATED, Failed(code=error.code, message=str(error)))
        failed = _outcome(home, run_id, timeout_s, show)
        _wait_until_gone(folder)
        return Ended(_emulator(folder), failed)


def _outcome(
    home: Path, run_id: str, timeout_s: float, show: Callable[[control_pb2.Run], None]
) -> Failed | None:
    """Follow a run to its end, and return how it failed, if it did."""
    try:
        return _follow(home, run_id, time.monotonic() + timeout_s, show)
    except DeadlineExceededError:
        _cancel(home, run_id)
        return Failed(code="TIMED_OUT", message=f"it took longer than {timeout_s:g} s")
    except IsthmusError as error:
        return Failed(code=error.code, message=str(error))
    except BaseException:
        _cancel(home, run_id)
        raise


def _follow(
    home: Path, run_id: str, deadline_s: float, show: Callable[[control_pb2.Run], None]
) -> Failed | None:
    with reading(RunChoice(run_id=run_id, home=home)) as reader:
        run = control_pb2.Run()
        for run in reader.watch(deadline_s):
            show(run)
    if not exit_code_of(run):
        return None
    code = reason_code(run)
    return Failed(code=code, message=run.reason or CATALOGUE[code].message)


def _cancel(home: Path, run_id: str) -> None:
    """End a run and wait for its end, for a while: whoever asked is waiting, too."""
    with contextlib.suppress(IsthmusError), reading(RunChoice(run_id=run_id, home=home)) as reader:
        reader.cancel()
        for _ in reader.watch(time.monotonic() + STOP_S):
            pass


def _wait_until_gone(folder: RunFolder) -> None:
    """Wait for the coordinator's own end.

    What it still does would be part of the next measurement, and what it still writes be in the way
    of whoever removes the folder. Its lock goes last, long after its address.
    """
    deadline_s = time.monotonic() + STOP_S
    while not is_abandoned(folder.path) and time.monotonic() < deadline_s:
        INTERRUPTION.check()
        time.sleep(POLL_S)


def _emulator(folder: RunFolder) -> str:
    """Return what emulated the WAN, as the run's journal says."""
    try:
        events = RecordedRun(folder).events(0)
    except JournalError:
        return NOT_EMULATED
    emulated = (each for each in events if each.kind == EventKind.WAN_EMULATED)
    return next((str(each.detail["emulator"]) for each in emulated), NOT_EMULATED)
