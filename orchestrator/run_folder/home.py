"""HOME, its folders of runs, and the address of each run's coordinator.

HOME/runs/RUN/   of an embedded run: also its coordinator's state (docs/protocols.md)
                 of a run launched with --coordinator: the documents, and remote.json with the
                 coordinator's address and state folder
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from isthmus.orchestrator.run_folder.state_lock import is_abandoned, lock
from isthmus.protos.errors import NotFoundError, StateConflictError
from isthmus.protos.mutual_tls import TlsFiles
from isthmus.protos.security import tls_files, use_tls
from isthmus.protos.user_state import user_state_folder

ANNOUNCED = "coordinator.json"
"""Written by a coordinator when it listens: {"address", "pid", "generation"}."""
CHECKPOINTS = "checkpoints.json"
"""Written by launch for a run with checkpoints: {"stores", "resumed"}, folders or URLs."""
CODE = "code.json"
"""Written by launch for a job with files: {"digest", "source"}."""
PLAN = "plan.json"
"""Written by launch for a planned run: {"why", "predicted", "alternatives"}, for people."""
REMOTE = "remote.json"
"""Written by launch --coordinator: {"address", "state"} of the coordinator."""
JOURNAL = "journal.sqlite3"
"""File with the events of all runs of a coordinator, in its state folder."""
TLS = "tls.json"
"""Written by launch if the topology has mtls: {"ca", "cert", "key"}, paths."""
LOG = "coordinator.log"
SUMMARY = "summary.json"
SPEC = "run_spec.json"
TOPOLOGY = "topology.yaml"
JOB = "job.yaml"
NUMBER = "number.json"
"""Written with the job: {"number"}, one more than that of any earlier run of HOME."""
CLAIM_TRIES = 3
"""Attempts to claim a run's folder that others claim and release at the same time."""

_FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def home_folder(given: Path | None) -> Path:
    """Return `given` (from $ISTHMUS_HOME, say), else the platform's user state folder.

    Raises:
        FileNotFoundError: `given` is None, and this user has no home folder.
    """
    return given.absolute() if given else user_state_folder()


def new_run_id() -> str:
    """Return a unique id that sorts by time."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"


def is_folder_name(text: str) -> bool:
    """Whether `text` may name a run or an emulation, and so a folder."""
    return _FOLDER_NAME.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of one run on this machine."""

    path: Path

    @property
    def run_id(self) -> str:
        """Id of the run: the folder's name."""
        return self.path.name

    @property
    def number(self) -> int:
        """Number of the run in HOME, in the order of submission; 0: an old run without one."""
        found = read_object(self.path / NUMBER).get("number")
        return found if isinstance(found, int) else 0

    @property
    def remote_address(self) -> str | None:
        """Address of the coordinator given with --coordinator; None: an embedded one."""
        return _string(read_object(self.path / REMOTE), "address")

    def remember_remote(self, address: str, state: str = "") -> None:
        """Record the coordinator of the run, and its state folder on its machine."""
        written = json.dumps({"address": address, "state": state})
        (self.path / REMOTE).write_text(written + "\n")

    @property
    def state(self) -> Path | None:
        """The state folder of the run's coordinator; None: it is on another machine."""
        if self.remote_address is None:
            return self.path
        noted = _string(read_object(self.path / REMOTE), "state")
        return Path(noted) if noted and (Path(noted) / JOURNAL).is_file() else None

    @property
    def coordinator_address(self) -> str | None:
        """Address of the run's coordinator; None: its process is gone.

        A restarted one may have another port. For one on another machine it is the recorded
        address.
        """
        noted, state = self.remote_address, self.state
        if state is None:
            return noted
        living = _living(state)
        is_noted = noted and living and noted.rpartition(":")[2] == living.rpartition(":")[2]
        return noted if is_noted else living  # it may be dialled by another name than it binds

    def remember_checkpoints(self, stores: Sequence[str], resumed: str | None) -> None:
        """Record the run's checkpoint stores, and the checkpoint that it resumes from."""
        written = json.dumps({"stores": [*stores], "resumed": resumed})
        (self.path / CHECKPOINTS).write_text(written + "\n")

    @property
    def checkpoint_stores(self) -> tuple[str, ...]:
        """Folders or URLs of the run's checkpoints; empty: it has none."""
        stores = read_object(self.path / CHECKPOINTS).get("stores")
        return tuple(map(str, stores)) if isinstance(stores, list) else ()

    @property
    def resumed_checkpoint(self) -> str | None:
        """Checkpoint that the run resumed from; None: none."""
        return _string(read_object(self.path / CHECKPOINTS), "resumed")

    def remember_code(self, digest: str, source: str) -> None:
        """Record the run's code: the digest of its files, and their folder."""
        (self.path / CODE).write_text(json.dumps({"digest": digest, "source": source}) + "\n")

    @property
    def code(self) -> dict[str, object]:
        """What `remember_code` recorded; empty: nothing was."""
        return read_object(self.path / CODE)

    def remember_plan(self, told: Mapping[str, object]) -> None:
        """Record what the run's plan says beside its decisions."""
        (self.path / PLAN).write_text(json.dumps(told, indent=1) + "\n")

    @property
    def plan(self) -> dict[str, object]:
        """What `remember_plan` recorded; empty: nothing was."""
        return read_object(self.path / PLAN)

    def remember_tls(self) -> None:
        """Record the paths of this process's certificates, for commands about the run."""
        if files := tls_files():
            (self.path / TLS).write_text(json.dumps(asdict(files)) + "\n")

    def use_tls(self) -> None:
        """Use TLS with the run's coordinator, if the run was launched with it."""
        noted = read_object(self.path / TLS)
        ca, cert, key = (_string(noted, name) for name in ("ca", "cert", "key"))
        if ca and cert and key:
            use_tls(TlsFiles(ca=ca, cert=cert, key=key))

    @property
    def submitted_wall_s(self) -> float:
        """Time of submission: that of the job's file, which is written once."""
        return (self.path / JOB).stat().st_mtime

    def give_back(self) -> None:
        """Release the folder: the run was not submitted.

        Files of other writers stay.
        """
        # The job last: while it exists, no other process claims the folder.
        for name in (TOPOLOGY, REMOTE, CHECKPOINTS, CODE, PLAN, TLS, NUMBER, JOB):
            (self.path / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the log of a coordinator that did not start stays
            self.path.rmdir()

    @contextlib.contextmanager
    def being_launched(self) -> Iterator[None]:
        """Mark the run as about to be submitted while the block runs.

        The kernel releases the mark, however the process ends.
        """
        descriptor = lock(self.path / JOB)
        try:
            yield
        finally:
            os.close(descriptor)

    @property
    def is_being_launched(self) -> bool:
        """Whether the run is about to be submitted, and may be unknown to its coordinator."""
        return not is_abandoned(self.path, JOB)

    def living_coordinator(self) -> str | None:
        """Return the address of the folder's own coordinator; None once its process is gone."""
        return _living(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunChoice:
    """The run of a command, and the coordinator to ask."""

    run_id: str = ""
    """Empty: the latest."""
    home: Path | None = None
    """HOME; None: as in `home_folder`."""
    coordinator: str | None = None
    """Coordinator, host:port; None: the one that the run was launched with."""


def run_folders(home: Path) -> list[RunFolder]:
    """Return the folders of all runs, newest first."""
    runs = home / "runs"
    if not runs.is_dir():
        return []
    names = [path for path in runs.iterdir() if is_folder_name(path.name)]
    folders = [RunFolder(path) for path in names if (path / JOB).is_file()]
    return sorted(folders, key=_order, reverse=True)


def find_run(home: Path, run_id: str) -> RunFolder:
    """Return a run's folder; an empty id is the latest.

    Raises:
        NotFoundError: there is no such run.
    """
    if not run_id:
        folders = run_folders(home)
        if not folders:
            raise NotFoundError(f"there is no run in {home / 'runs'}")
        return folders[0]
    folder = RunFolder(home / "runs" / run_id)
    if not is_folder_name(run_id) or not (folder.path / JOB).is_file():
        raise NotFoundError(f"there is no run {run_id!r} in {home / 'runs'}")
    return folder


def claim_run_folder(home: Path, run_id: str, job_text: str) -> tuple[RunFolder, bool]:
    """Return a run's folder, and whether it is new; with concurrent calls, new for only one.

    A folder belongs to a run once it contains the job.

    Raises:
        StateConflictError: others repeatedly claim and release it.
    """
    folder = RunFolder(home / "runs" / run_id)
    for _ in range(CLAIM_TRIES):
        with contextlib.suppress(FileNotFoundError):  # it was released at this moment
            return folder, _claim(folder, job_text)
    raise StateConflictError(f"{folder.path} comes and goes: choose another --run-id")


def read_object(path: Path) -> dict[str, object]:
    """Return a JSON file's object; empty if missing or not valid."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _claim(folder: RunFolder, job_text: str) -> bool:
    """Write a run's job, unless there is one; return whether it was written."""
    folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
    job = folder.path / JOB
    try:
        file = job.open("x", encoding="utf-8")
    except FileExistsError:
        return False
    try:
        with file:
            others = run_folders(folder.path.parent.parent)
            number = 1 + max(each.number for each in others)
            (folder.path / NUMBER).write_text(json.dumps({"number": number}) + "\n")
            file.write(job_text)
    except OSError as error:
        folder.give_back()
        raise OSError(error.errno, error.strerror, str(job)) from error
    return True


def _order(folder: RunFolder) -> tuple[int, int, str]:
    """Return a sort key for the order of submission.

    File times change with the clock, or in a copy of HOME, so they only sort runs from before there
    were numbers.
    """
    number = folder.number
    return number, 0 if number else (folder.path / JOB).stat().st_mtime_ns, folder.run_id


def _living(state: Path) -> str | None:
    """Return the address of a state folder's coordinator; None once its process is gone.

    Only the lock is reliable. A killed coordinator leaves its announcement behind, and its pid may
    be reused. A process may also appear as a zombie while its other threads still hold the lock and
    write.
    """
    announced = read_object(state / ANNOUNCED)
    if not announced or is_abandoned(state):
        return None
    return _string(announced, "address")


def _string(fields: dict[str, object], key: str) -> str | None:
    value = fields.get(key)
    return value if isinstance(value, str) and value else None
