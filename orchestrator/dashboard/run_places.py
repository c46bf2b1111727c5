"""Where the runs of this machine are: in HOME, or in the state folder of a standing coordinator."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from isthmus.orchestrator.coordinator.journal import JournalError, JournalReader
from isthmus.orchestrator.run_folder.home import RunFolder, is_folder_name, run_folders

MAX_RUNS = 200
"""The newest runs of the list."""


@dataclass(frozen=True, slots=True)
class RunPlace:
    """The files of one run."""

    run_id: str
    state: Path | None
    """Folder of its coordinator's journal; None: it is on another machine."""
    is_own: bool
    """Whether that coordinator was started for this run alone."""
    elsewhere: str
    """Address of the coordinator that has the run, where `state` is None."""
    submitted_wall_s: float
    home_folder: RunFolder | None = None
    """Its folder in HOME; None: it was found at its coordinator."""


def places_in_home(home: Path) -> list[RunPlace]:
    """Return the runs of HOME, newest first."""
    places = []
    for folder in run_folders(home)[:MAX_RUNS]:
        try:
            places.append(_place(folder))
        except OSError:  # it was removed at this moment
            continue
    return places


def place_in_home(home: Path, run_id: str) -> RunPlace | None:
    """Return one run of HOME; None: there is none of that name."""
    if not is_folder_name(run_id):
        return None
    try:
        return _place(RunFolder(home / "runs" / run_id))
    except OSError:
        return None


def places_in_state(state: Path) -> list[RunPlace]:
    """Return the runs of the coordinator with this state folder, newest first.

    Raises:
        JournalError: there is no journal that this build can read.
    """
    with JournalReader(state) as journal:
        return [_led(run_id, state) for run_id in journal.run_ids()[:MAX_RUNS]]


def place_in_state(state: Path, run_id: str) -> RunPlace | None:
    """Return one run of that coordinator; None: there is none of that name."""
    try:
        with JournalReader(state) as journal:
            is_there = run_id in journal.run_ids()
    except JournalError:
        return None
    return _led(run_id, state) if is_there else None


def _led(run_id: str, state: Path) -> RunPlace:
    return RunPlace(run_id, state, is_own=False, elsewhere="", submitted_wall_s=0.0)


def _place(folder: RunFolder) -> RunPlace:
    """Return where a run of HOME is.

    Raises:
        OSError: it is not there.
    """
    submitted_wall_s, state = folder.submitted_wall_s, folder.state
    return RunPlace(
        run_id=folder.run_id,
        state=state,
        is_own=state == folder.path,
        elsewhere=folder.remote_address or "",
        submitted_wall_s=submitted_wall_s,
        home_folder=folder,
    )
