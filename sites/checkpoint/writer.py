"""Writes checkpoints one after another, in a thread beside training.

All ranks of all sites write into one folder. Sites hold the same bits, so the ranks of the first
site that takes part write model and optimizer, with torch.distributed.checkpoint. Every rank adds
its own state. A site's first rank lists the site's files with their digests. The first site waits
for those lists, a limited time, and writes the manifest, which makes the folder a checkpoint:

    STORE/.step-00000100.g1/        until complete; then renamed to step-00000100
        shared/__RANK_0.distcp .metadata objects.pt own/SITE/RANK.pt             a rank's own
        own/SITE/RANK.residuals.npz       residuals of its shards, written by its gateway
        own/SITE/files.json          the site's list own/SITE/publishes           marks the site
        that writes shared/ and the manifest manifest.json

With a URL, ranks write to local disk and upload, and the manifest comes last.

The data is on the host already (sites/checkpoint/staging.py), and does not change until it is
written.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from isthmus.protos.checkpoint.manifest import MANIFEST, Manifest, StoredFile
from isthmus.protos.checkpoint.store import checkpoint_name, digest_of, joined, opened
from isthmus.protos.failure import one_line, reason_of, text_of
from isthmus.sites.checkpoint.cleaning import remove_parts, remove_superseded
from isthmus.sites.checkpoint.patience import join_patiently
from isthmus.sites.checkpoint.place import (
    LIST,
    OBJECTS,
    OWN,
    PUBLISHES,
    SHARED,
    Place,
    own_path,
    residuals_path,
)
from isthmus.sites.checkpoint.sharded_save import save_sharded
from isthmus.sites.checkpoint.site_group import SiteGroup
from isthmus.sites.checkpoint.training_state import Tensors

PARTS_S = 60.0
"""Wait for the other sites' parts; then the checkpoint is published without them."""
_LOOK_S = 0.05


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """The data that a rank saves for one step."""

    step: int
    publishes: bool
    """Whether this site, the first that takes part, writes the shared part and the manifest."""
    tensors: Tensors = field(default_factory=dict)
    """Copies on the host. Empty unless the site publishes."""
    other_state: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The optimizers' state of this rank's parameters that is no tensor."""
    objects: dict[str, Any] = field(default_factory=dict)
    """Objects that the first rank saves beside the tensors."""
    own: dict[str, Any] = field(default_factory=dict)
    """This rank's own state."""
    residuals: list[Path]
    """Files that the gateway writes; the last one counts."""
    data: dict[str, Any] = field(default_factory=dict)
    """The manifest's entry about the run's data."""
    absent: frozenset[str]
    """Sites whose parts are not awaited."""
    problem: str
    """Why the step cannot be saved; empty: it can."""


_Part = tuple[str, list[StoredFile], dict[str, dict[str, Any]]]
"""A rank's report: its error (or empty), the files written, and its `other_state`."""


class CheckpointWriter:
    """Owns the writing thread. Called by the training thread; one snapshot at a time."""

    def __init__(
        self,
        place: Place,
        wait_copied: Callable[[], None],
        on_written: Callable[[int, float, int], None],
        on_failed: Callable[[int, str], None],
        on_stays: Callable[[int, str], None],
        on_waiting: Callable[[], None],
        absent: Callable[[], frozenset[str]],
    ) -> None:
        """Make the writer. A collective of the site.

        Args:
            place: who writes, and where to.
            wait_copied: waits until the copies of a snapshot are made.
            on_written: called by the writing thread with step, seconds and bytes.
            on_failed: called by the same thread with step and reason.
            on_stays: called by the same thread with step and reason if an old one stays.
            on_waiting: called every second while training waits for a checkpoint.
            absent: returns the lost sites; called by the writing thread.
        """
        self._place = place
        self._wait_copied = wait_copied
        self._on_written = on_written
        self._on_failed = on_failed
        self._on_stays = on_stays
        self._on_waiting = on_waiting
        self._absent = absent
        self.group = SiteGroup()
        """Group for the writing thread's collectives; training has its own."""
        self._thread: threading.Thread | None = None

    def begin(self, snapshot: Snapshot) -> None:
        """Start to write, after waiting for the previous snapshot."""
        self.wait()
        self._thread = threading.Thread(
            target=self._run, args=(snapshot,), name="isthmus-checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is being written.

        The wait is reported for at most ten minutes, so that the rank does not count as hanging.
        """
        if self._thread is not None:
            join_patiently(self._thread, self._on_waiting)
            self._thread.join()
            self._thread = None

    # ------------------------------------------------------------ the thread

    def _run(self, snapshot: Snapshot) -> None:
        begin_s = time.monotonic()
        try:
            num_bytes = self._write(snapshot)
        except Exception as error:  # noqa: BLE001 - the thread's root: training goes on without
            why = _why(error)
            self._on_failed(snapshot.step, why)
            _log(f"the checkpoint of step {snapshot.step} failed: {why}")
            remove_parts(self._place, snapshot.step)
            return
        if num_bytes:
            self._on_written(snapshot.step, time.monotonic() - begin_s, num_bytes)

    def _write(self, snapshot: Snapshot) -> int:
        """Write, and return the checkpoint's bytes if this site publishes; else 0."""
        place = self._place
        folder = place.staging(snapshot.step)
        rank = f"rank {place.rank} of site {place.site}"
        problem = f"{rank}: {snapshot.problem}" if snapshot.problem else ""
        files: list[StoredFile] = []
        try:
            self._wait_copied()
            self._make_folders(snapshot, folder)
        except Exception as error:  # noqa: BLE001 - told to all ranks, or they would wait
            problem = problem or f"{rank}: {_why(error)}"
        agree_on_step(snapshot.step, problem, self.group.gather)
        remove_parts(place, snapshot.step - 1)
        try:
            self._write_files(snapshot, folder)
            paths = self._paths(folder, publishes=snapshot.publishes)
            if snapshot.residuals:
                take_last(snapshot.residuals, folder / residuals_path(place))
                paths.append(residuals_path(place))
            files = [_stored(folder, path) for path in paths]
            if place.is_remote:
                _upload(folder, joined(place.store, checkpoint_name(snapshot.step)), files)
        except Exception as error:  # noqa: BLE001 - told to all ranks, or they would wait
            problem = f"{rank}: {_why(error)}"
        parts = self.group.gather((problem, files, snapshot.other_state))
        problems = [each for each, *_ in parts if each]
        if problems:
            raise OSError(problems[0])
        if place.is_remote:  # the local copy is uploaded
            remove_parts(place, snapshot.step)
        if place.rank != 0:
            return 0
        of_site = [each for _, files, _ in parts for each in files]
        if not snapshot.publishes:
            self._put(snapshot.step, f"{OWN}/{place.site}/{LIST}", _list_bytes(of_site))
            return 0
        objects = snapshot.objects
        for *_, other_state in parts:
            objects["optimizer"]["state"] |= other_state
        of_site.append(self._put_objects(snapshot.step, objects))
        return self._publish(snapshot, of_site)

    def _make_folders(self, snapshot: Snapshot, folder: Path) -> None:
        """Make the folders before any rank writes: a failure later would miss collectives."""
        (folder / own_path(self._place)).parent.mkdir(parents=True, exist_ok=True)
        if snapshot.publishes:
            (folder / OWN / self._place.site / PUBLISHES).touch()
            (folder / SHARED).mkdir(exist_ok=True)

    def _write_files(self, snapshot: Snapshot, folder: Path) -> None:
        own = folder / own_path(self._place)
        if snapshot.publishes:
            save_sharded(snapshot.tensors, folder / SHARED, self.group)
        with own.open("wb") as file:
            torch.save(snapshot.own, file)
            _flush(file)

    def _paths(self, folder: Path, *, publishes: bool) -> list[str]:
        """Return the files that this rank has written."""
        place = self._place
        paths = [own_path(place)]
        if publishes:
            found = (folder / SHARED).glob(f"__{place.rank}_*.distcp")
            paths += [f"{SHARED}/{each.name}" for each in sorted(found)]
            if place.rank == 0:
                paths.append(f"{SHARED}/.metadata")
        return paths

    def _put_objects(self, step: int, objects: dict[str, Any]) -> StoredFile:
        """Write the objects beside the tensors."""
        file = io.BytesIO()
        torch.save(objects, file)
        self._put(step, OBJECTS, file.getvalue())
        file.seek(0)
        return StoredFile(OBJECTS, len(file.getvalue()), digest_of(file))

    def _put(self, step: int, path: str, data: bytes) -> None:
        """Write a small file atomically."""
        place = self._place
        if place.is_remote:
            with opened(joined(place.store, checkpoint_name(step))) as (files, root):
                files.pipe_file(f"{root}/{path}", data)
            return
        target = place.staging(step) / path
        part = target.with_name(f".{target.name}")
        with part.open("wb") as file:
            file.write(data)
            _flush(file)
        part.rename(target)

    def _publish(self, snapshot: Snapshot, files: list[StoredFile]) -> int:
        place, step = self._place, snapshot.step
        lists = self._other_lists(step, snapshot.absent)
        manifest = Manifest(
            run=place.run,
            job=place.job,
            step=step,
            written_s=time.time(),
            ranks={
                site: ranks for site, ranks in place.ranks.items() if site not in snapshot.absent
            },
            missing=tuple(site for site, found in lists.items() if found is None),
            data=snapshot.data,
            files=(*files, *(each for found in lists.values() for each in found or ())),
        )
        self._put(step, MANIFEST, manifest.to_bytes())
        if not place.is_remote:
            _rename(place.staging(step), Path(place.store) / checkpoint_name(step))
        for old_step, why in remove_superseded(place, step):
            self._on_stays(old_step, why)
            _log(f"the checkpoint of step {old_step} cannot be removed: {why}")
        return manifest.num_bytes

    def _other_lists(self, step: int, absent: frozenset[str]) -> dict[str, list[StoredFile] | None]:
        """Wait for the other sites' lists; None: it did not come in time, or the site is lost."""
        place = self._place
        lists: dict[str, list[StoredFile] | None] = {
            site: None for site in place.ranks if site != place.site and site not in absent
        }
        where = (
            joined(place.store, checkpoint_name(step))
            if place.is_remote
            else str(place.staging(step))
        )
        deadline_s = time.monotonic() + PARTS_S
        while True:
            lost = self._absent()  # ask first: files of a lost site are then complete
            for site in [each for each, known in lists.items() if known is None]:
                lists[site] = _list_at(joined(where, OWN, site, LIST))
            awaited = {site for site, known in lists.items() if known is None} - lost
            if not awaited or time.monotonic() >= deadline_s:
                return lists
            time.sleep(_LOOK_S)


def agree_on_step(
    step: int, problem: str, tell_all: Callable[[tuple[int, str]], list[tuple[int, str]]]
) -> None:
    """Wait until all ranks of the site save this step; they come in any order.

    A requested checkpoint is begun by the ranks that learned of it before its step. If one did not,
    all ranks meet at the next checkpoint only: waiting ranks then give this one up, so no file of
    one step gets into another's checkpoint.

    Args:
        step: step that this rank saves.
        problem: why it cannot be saved; empty: it can.
        tell_all: a collective of the site: returns each rank's value, by rank.

    Raises:
        OSError: other ranks save only a later step, or some rank cannot save.
    """
    reports = tell_all((step, problem))
    while len(steps := {each for each, _ in reports}) > 1:
        if step < max(steps):
            late = ", ".join(str(rank) for rank, (each, _) in enumerate(reports) if each > step)
            raise OSError(f"rank {late} had passed step {step} when it heard of it")
        reports = tell_all((step, problem))
    if problems := [each for _, each in reports if each]:
        raise OSError(problems[0])


def take_last(asked: list[Path], target: Path) -> None:
    """Wait for files that the gateway writes, and rename the last one to `target`.

    Raises:
        OSError: a file did not come.
    """
    deadline_s = time.monotonic() + PARTS_S
    for path in asked:
        while not path.exists():
            if time.monotonic() > deadline_s:
                raise OSError(f"the gateway has not written {path.name}: see its log")
            time.sleep(_LOOK_S)
    for path in asked[:-1]:
        path.unlink()
    asked[-1].rename(target)


def _why(error: Exception) -> str:
    """Return an error's text: the operating system's own, or with the type's name."""
    return one_line(text_of(error)) if isinstance(error, OSError) else reason_of(error)


def _flush(file: Any) -> None:  # noqa: ANN401 - any file
    file.flush()
    os.fsync(file.fileno())


def _rename(source: Path, target: Path) -> None:
    """Rename a folder durably: sync its content, then its name, to disk."""
    for folder in [source, *(each for each in source.rglob("*") if each.is_dir())]:
        _sync_folder(folder)
    if target.exists():  # saved before the run went back to an earlier step
        shutil.rmtree(target)
    source.rename(target)
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _stored(folder: Path, path: str) -> StoredFile:
    with (folder / path).open("rb") as file:
        return StoredFile(path, (folder / path).stat().st_size, digest_of(file))


def _upload(folder: Path, place: str, stored: list[StoredFile]) -> None:
    with opened(place) as (files, root):
        for each in stored:
            parent = f"{root}/{each.path}".rpartition("/")[0]
            files.makedirs(parent, exist_ok=True)
            files.put_file(str(folder / each.path), f"{root}/{each.path}")
            (folder / each.path).unlink()


def _list_at(place: str) -> list[StoredFile] | None:
    """Return a site's list; None: not written yet, or the storage does not answer."""
    try:
        with opened(place) as (files, path):
            files.invalidate_cache()
            written = files.cat_file(path)
    except OSError:
        return None
    return [StoredFile(*each) for each in json.loads(written)]


def _log(what: str) -> None:
    """Write a line to this rank's log; ignore errors of a full disk."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"isthmus: {what}\n")


def _list_bytes(files: list[StoredFile]) -> bytes:
    return json.dumps([[each.path, each.num_bytes, each.digest] for each in files]).encode()
