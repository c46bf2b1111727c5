"""Writes checkpoints one after another, in a thread beside training.

All ranks of all sites write into one store, or into several, one after the other. Sites hold the
same bits, so the ranks of the first site that takes part write model and optimizer, with
torch.distributed.checkpoint. Every rank adds its own state. A site's first rank lists the site's
files with their digests. The first site waits for those lists, a limited time, and writes the
manifest, which makes the folder a checkpoint:

    STORE/.step-00000100.g1/        until complete; then renamed to step-00000100
        shared/__RANK_0.distcp .metadata objects.pt
        own/SITE/RANK.pt                  a rank's own
        own/SITE/RANK.residuals.npz       residuals of its shards, written by its gateway
        own/SITE/files.json               the site's list
        own/SITE/publishes                marks the site that writes shared/ and the manifest
        manifest.json

At a URL files have their final names from the beginning, and the manifest comes last.

The data is on the host already (sites/checkpoint/staging.py), and does not change until it is
written everywhere. A store that fails holds nobody up: the others are written all the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isthmus.protos.checkpoint.manifest import MANIFEST, Manifest, StoredFile
from isthmus.protos.checkpoint.store import StoredCheckpoint, checkpoint_name, joined, opened
from isthmus.protos.failure import one_line, reason_of, text_of
from isthmus.sites.checkpoint.checkpoint_files import CheckpointFiles
from isthmus.sites.checkpoint.cleaning import remove_asked, remove_parts, remove_superseded
from isthmus.sites.checkpoint.patience import join_patiently
from isthmus.sites.checkpoint.place import (
    LIST,
    OBJECTS,
    OWN,
    PUBLISHES,
    Place,
    own_path,
    residuals_path,
)
from isthmus.sites.checkpoint.sharded_save import of_all, save_sharded
from isthmus.sites.checkpoint.site_group import SiteGroup
from isthmus.sites.checkpoint.training_state import Tensors

PARTS_S = 60.0
"""Wait for the other sites' parts; then the checkpoint is published without them."""
_LOOK_S = 0.05
_COPY_BYTES = 4 << 20


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
    """Files that the gateway writes on this node; the last one counts."""
    data: dict[str, Any] = field(default_factory=dict)
    """The manifest's entry about the run's data."""
    absent: frozenset[str]
    """Sites whose parts are not awaited."""
    problem: str
    """Why the step cannot be saved; empty: it can."""


class CheckpointWriter:
    """Owns the writing thread. Called by the training thread; one snapshot at a time."""

    def __init__(
        self,
        places: Sequence[Place],
        wait_copied: Callable[[], None],
        on_written: Callable[[int, float, int], None],
        on_failed: Callable[[int, str], None],
        on_store_failed: Callable[[int, str], None],
        on_stays: Callable[[int, str], None],
        on_waiting: Callable[[], None],
        absent: Callable[[], frozenset[str]],
    ) -> None:
        """Make the writer. A collective of the site.

        Args:
            places: who writes, and where to: one for each store.
            wait_copied: waits until the copies of a snapshot are made.
            on_written: called by the writing thread with step, seconds and bytes, once the first
                store has the checkpoint.
            on_failed: called by the same thread with step and reason if no store has it.
            on_store_failed: called by the same thread with step and reason for a store that lacks
                it while another has it.
            on_stays: called by the same thread with step and reason if an old one stays.
            on_waiting: called every second while training waits for a checkpoint.
            absent: returns the lost sites; called by the writing thread.
        """
        self._places = places
        self._wait_copied = wait_copied
        self._on_written = on_written
        self._on_failed = on_failed
        self._on_store_failed = on_store_failed
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
        try:
            self._prepare(snapshot)
        except Exception as error:  # noqa: BLE001 - the thread's root: training goes on without
            self._fail(snapshot.step, _why(error))
        else:
            self._write_all(snapshot)
        remove_asked(self._places[0], snapshot.step)

    def _prepare(self, snapshot: Snapshot) -> None:
        """Wait until all ranks of the site save this step, and have all that they save."""
        rank = self._places[0].rank
        problem = f"rank {rank}: {snapshot.problem}" if snapshot.problem else ""
        try:
            self._wait_copied()
        except Exception as error:  # noqa: BLE001 - told to all ranks, or they would wait
            problem = problem or f"rank {rank}: {_why(error)}"
        agree_on_step(snapshot.step, problem, self.group.gather)
        remove_asked(self._places[0], snapshot.step - 1)
        of_all(self.group, lambda: wait_written(snapshot.residuals))

    def _write_all(self, snapshot: Snapshot) -> None:
        """Write into each store, and report those that fail."""
        step, begin_s = snapshot.step, time.monotonic()
        failed: dict[str, str] = {}
        is_written = False
        for place in self._places:
            try:
                num_bytes = self._write(place, snapshot)
            except Exception as error:  # noqa: BLE001 - another store may take it
                failed[place.store] = _why(error)
                remove_parts(place, step)
                continue
            if num_bytes and not is_written:
                self._on_written(step, time.monotonic() - begin_s, num_bytes)
            is_written = True
        if not is_written:
            self._fail(step, "; ".join(failed.values()))
            return
        for store, why in failed.items():
            self._on_store_failed(step, f"{store}: {why}")
            _log(f"the checkpoint of step {step} is not in {store}: {why}")

    def _fail(self, step: int, why: str) -> None:
        self._on_failed(step, why)
        _log(f"the checkpoint of step {step} failed: {why}")

    def _write(self, place: Place, snapshot: Snapshot) -> int:
        """Write into a store; return the checkpoint's bytes if this rank publishes it, else 0."""
        step, publishes, group = snapshot.step, snapshot.publishes, self.group
        files = CheckpointFiles(place.made_in(step))
        remove_parts(place, step - 1)
        if publishes and not place.is_remote:
            of_all(group, lambda: _mark(Path(files.place, OWN, place.site, PUBLISHES)))
        if publishes:
            save_sharded(snapshot.tensors, files, group)
        parts = of_all(group, lambda: _write_own(place, snapshot, files))
        if place.rank != 0:
            return 0
        of_site = [stored for written, _ in parts for stored in written]
        if not publishes:
            _put(place, step, f"{OWN}/{place.site}/{LIST}", _list_bytes(of_site))
            return 0
        for _, other_state in parts:
            snapshot.objects["optimizer"]["state"] |= other_state
        files.save(OBJECTS, snapshot.objects)
        return self._publish(place, snapshot, [*of_site, files.written[-1]])

    def _publish(self, place: Place, snapshot: Snapshot, files: list[StoredFile]) -> int:
        step = snapshot.step
        lists = self._other_lists(place, step, snapshot.absent)
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
        _put(place, step, MANIFEST, manifest.to_bytes())
        StoredCheckpoint(place.made_in(step)).manifest()  # as the store holds it
        if not place.is_remote:
            _rename(Path(place.made_in(step)), Path(place.store) / checkpoint_name(step))
        for old_step, why in remove_superseded(place, step):
            self._on_stays(old_step, why)
            _log(f"the checkpoint of step {old_step} cannot be removed: {why}")
        return manifest.num_bytes

    def _other_lists(
        self, place: Place, step: int, absent: frozenset[str]
    ) -> dict[str, list[StoredFile] | None]:
        """Wait for the other sites' lists; None: it did not come in time, or the site is lost."""
        lists: dict[str, list[StoredFile] | None] = {
            site: None for site in place.ranks if site != place.site and site not in absent
        }
        deadline_s = time.monotonic() + PARTS_S
        while True:
            lost = self._absent()  # ask first: files of a lost site are then complete
            for site in [each for each, known in lists.items() if known is None]:
                lists[site] = _list_at(joined(place.made_in(step), OWN, site, LIST))
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


def wait_written(asked: Sequence[Path]) -> None:
    """Wait for files that the gateway writes.

    Raises:
        OSError: a file did not come.
    """
    deadline_s = time.monotonic() + PARTS_S
    for path in asked:
        while not path.exists():
            if time.monotonic() > deadline_s:
                raise OSError(f"the gateway has not written {path.name}: see its log")
            time.sleep(_LOOK_S)


def _mark(mark: Path) -> None:
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()


def _write_own(
    place: Place, snapshot: Snapshot, files: CheckpointFiles
) -> tuple[list[StoredFile], dict[str, dict[str, Any]]]:
    """Write a rank's own state; return the files that it has written, and its `other_state`."""
    files.save(own_path(place), snapshot.own)
    if snapshot.residuals:
        with (
            snapshot.residuals[-1].open("rb") as source,
            files.create(residuals_path(place)) as stream,
        ):
            shutil.copyfileobj(source, stream, _COPY_BYTES)
    return files.written, snapshot.other_state


def _put(place: Place, step: int, path: str, data: bytes) -> None:
    """Write a small file atomically."""
    if place.is_remote:
        with opened(place.made_in(step)) as (files, root):
            files.pipe_file(f"{root}/{path}", data)
        return
    target = Path(place.made_in(step), path)
    part = target.with_name(f".{target.name}")
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.rename(target)


def _why(error: Exception) -> str:
    """Return an error's text: the operating system's own, or with the type's name."""
    return one_line(text_of(error)) if isinstance(error, OSError) else reason_of(error)


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
