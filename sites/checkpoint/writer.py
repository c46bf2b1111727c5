"""Writes one checkpoint after another, in a thread beside training.

All ranks of all sites write into one folder. Sites hold the same bits, so the ranks of the first
site that takes part write model and optimizer, through torch.distributed.checkpoint; each rank of
each site adds what it has of its own. A site's first rank lists the site's files with their
digests. The first site waits for those lists, a bounded time, and writes the manifest, which makes
a checkpoint of it:

    STORE/.step-00000100.g1/        until it is whole; then renamed to step-00000100
       shared/__RANK_0.distcp .metadata objects.pt
       own/SITE/RANK.pt             a rank's own
       own/SITE/RANK.owed.npz       residuals of its shards, written by its gateway
       own/SITE/files.json          the site's list
       manifest.json

To a URL ranks upload what they have written to local disk, and the manifest comes last.

The copy of the tensors is made while the next forward and backward pass goes on: nothing but the
optimizer's next step changes them, and that one waits for the copy.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import save

from protos.checkpoint.manifest import MANIFEST, Manifest, StoredFile
from protos.checkpoint.store import checkpoint_name, checkpoints_in, digest_of, joined, opened
from sites.checkpoint.training_state import Tensors

PARTS_S = 60.0
"""The first site waits so long for the other sites' parts; then the checkpoint goes without."""
_LOOK_S = 0.05
SHARED, OWN = "shared", "own"
OBJECTS = f"{SHARED}/objects.pt"
_LIST = "files.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Who writes, and where to."""

    store: str
    """The run's folder or URL."""
    local: Path
    """A folder of the site, for what is to be uploaded."""
    run: str
    job: str
    generation: int
    site: str
    rank: int
    ranks: Mapping[str, int]
    """Ranks of each site, in the run's order."""
    keep: int

    @property
    def is_remote(self) -> bool:
        """Whether the store is a URL, with neither folders nor renames."""
        return "://" in self.store

    def staging(self, step: int) -> Path:
        """Return the folder in which this rank's files are written."""
        name = f".{checkpoint_name(step)}.g{self.generation}"
        return (self.local if self.is_remote else Path(self.store)) / name


def own_path(place: Place) -> str:
    """Return where in a checkpoint a rank's own state is."""
    return f"{OWN}/{place.site}/{place.rank}.pt"


def residuals_path(place: Place) -> str:
    """Return where its gateway writes what is owed to its shards."""
    return f"{OWN}/{place.site}/{place.rank}.owed.npz"


@dataclass(frozen=True, slots=True)
class LateState:
    """What comes when the next step begins."""

    objects: dict[str, Any]
    """What the first rank saves beside the tensors."""
    data: dict[str, Any]
    """The manifest's, of the run's data."""
    absent: frozenset[str]
    """Sites whose parts are not waited for."""


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """What a rank saves of one step."""

    step: int
    publishes: bool
    """This site writes what all have, and the manifest: the first one that takes part."""
    tensors: Tensors
    """Empty but where the site publishes."""
    other_state: dict[str, dict[str, Any]]
    """What the optimizer has of this rank's parameters that is no tensor."""
    own: dict[str, Any]
    has_residuals: bool
    """The gateway writes a file of its own."""
    late: LateState = LateState({}, {}, frozenset())


_TELL_EVERY_S = 1.0
_PATIENCE_S = 600.0
"""A store that takes longer hangs, and the rank that waits for it is named as stalled."""

_Part = tuple[str, list[StoredFile], dict[str, dict[str, Any]]]
"""A rank's report: what went wrong, the files that it has written, and its `other_state`."""


class CheckpointWriter:
    """Owns the thread. For the training thread; one snapshot at a time."""

    def __init__(
        self,
        place: Place,
        device: torch.device,
        on_written: Callable[[int, float, int], None],
        on_waiting: Callable[[], None],
    ) -> None:
        """A collective of the site.

        Args:
            place: who writes, and where to.
            device: this rank's.
            on_written: told step, seconds and bytes, by the thread that writes.
            on_waiting: told every second that training waits for a checkpoint to be written.
        """
        self._place = place
        self._on_written = on_written
        self._on_waiting = on_waiting
        self.group = dist.new_group(backend="gloo")
        """The site's ranks, for this thread's collectives: training has its own."""
        on_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_cuda else None  # type: ignore[no-untyped-call]
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=on_cuda,
                use_shared_memory=False,
                use_async_staging=False,  # this thread is beside training already
                use_non_blocking_copy=on_cuda,
            )
        )
        self._thread: threading.Thread | None = None
        self._staged = threading.Event()
        self._is_complete = threading.Event()
        self._snapshot: Snapshot | None = None

    def begin(self, snapshot: Snapshot) -> None:
        """Start to save. Waits until the one before is written."""
        self.wait()
        self._staged.clear()
        self._is_complete.clear()
        self._snapshot = snapshot
        if self._stream is not None:  # copies come after the step, and beside what follows it
            self._stream.wait_stream(torch.cuda.current_stream())
        self._thread = threading.Thread(
            target=self._run, args=(snapshot,), name="isthmus-checkpoint", daemon=True
        )
        self._thread.start()

    def complete(self, late_state: Callable[[], LateState]) -> None:
        """Add what else is saved, and wait until the tensors are copied: they may change then."""
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            snapshot.late = late_state()
            self._is_complete.set()
        if self._thread is not None:
            self._staged.wait()

    def wait(self) -> None:
        """Return when nothing is being written.

        A slow store is no rank that hangs: so this is told meanwhile, for ten minutes at most.
        """
        if self._thread is not None:
            until_s = time.monotonic() + _PATIENCE_S
            while self._thread.is_alive() and time.monotonic() < until_s:
                self._on_waiting()
                self._thread.join(_TELL_EVERY_S)
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Finish what was begun, and release memory."""
        self.wait()
        self._stager.close()

    # ------------------------------------------------------------ the thread

    def _run(self, snapshot: Snapshot) -> None:
        begin_s = time.monotonic()
        try:
            num_bytes = self._write(snapshot)
        except Exception as error:  # noqa: BLE001 - the thread's root: training goes on without
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            sys.stderr.write(f"isthmus: the checkpoint of step {snapshot.step} failed: {why}\n")
            return
        finally:
            self._staged.set()
        if num_bytes:
            self._on_written(snapshot.step, time.monotonic() - begin_s, num_bytes)

    def _write(self, snapshot: Snapshot) -> int:
        """Write, and return the checkpoint's bytes where it was published here; else 0."""
        place = self._place
        folder = place.staging(snapshot.step)
        problem = ""
        files: list[StoredFile] = []
        try:
            self._write_files(snapshot, folder)
            paths = self._paths(folder, publishes=snapshot.publishes)
            if snapshot.has_residuals:
                _wait_for(folder / residuals_path(place))
                paths.append(residuals_path(place))
            files = [_stored(folder, path) for path in paths]
            if place.is_remote:
                _upload(folder, joined(place.store, checkpoint_name(snapshot.step)), files)
        except Exception as error:  # noqa: BLE001 - told to all ranks, or they would wait
            problem = f"rank {place.rank} of site {place.site}: {error}"
        parts = self._gathered((problem, files, snapshot.other_state))
        problems = [each for each, *_ in parts if each]
        if problems:
            raise OSError(problems[0])
        if place.rank != 0:
            return 0
        of_site = [each for _, files, _ in parts for each in files]
        if not snapshot.publishes:
            self._put(snapshot.step, f"{OWN}/{place.site}/{_LIST}", _list_bytes(of_site))
            return 0
        objects = snapshot.late.objects
        for *_, other_state in parts:
            objects["optimizer"]["state"] |= other_state
        of_site.append(self._put_objects(snapshot.step, objects))
        return self._publish(snapshot, of_site)

    def _write_files(self, snapshot: Snapshot, folder: Path) -> None:
        place = self._place
        own = folder / own_path(place)
        own.parent.mkdir(parents=True, exist_ok=True)
        if snapshot.publishes:
            (folder / SHARED).mkdir(exist_ok=True)
            with torch.cuda.stream(self._stream):  # on CPUs, nothing
                staged = self._stager.stage(snapshot.tensors)
            self._staged.set()
            writer = FileSystemWriter(folder / SHARED)
            save(staged, storage_writer=writer, process_group=self.group)
        self._staged.set()
        self._is_complete.wait()
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

    def _gathered(self, own: _Part) -> list[_Part]:
        parts: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(parts, own, group=self.group)
        return parts

    def _put_objects(self, step: int, objects: dict[str, Any]) -> StoredFile:
        """Write what is saved beside the tensors."""
        file = io.BytesIO()
        torch.save(objects, file)
        self._put(step, OBJECTS, file.getvalue())
        file.seek(0)
        return StoredFile(OBJECTS, len(file.getvalue()), digest_of(file))

    def _put(self, step: int, path: str, data: bytes) -> None:
        """Write a small file as a whole or not at all."""
        place = self._place
        if place.is_remote:
            files, root = opened(joined(place.store, checkpoint_name(step)))
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
        lists = self._other_lists(step, snapshot.late.absent)
        manifest = Manifest(
            run=place.run,
            job=place.job,
            step=step,
            written_s=time.time(),
            ranks={
                site: ranks
                for site, ranks in place.ranks.items()
                if site not in snapshot.late.absent
            },
            missing=tuple(site for site, found in lists.items() if found is None),
            data=snapshot.late.data,
            files=(*files, *(each for found in lists.values() for each in found or ())),
        )
        self._put(step, MANIFEST, manifest.to_bytes())
        if not place.is_remote:
            _rename(place.staging(step), Path(place.store) / checkpoint_name(step))
        self._prune(step)
        return manifest.num_bytes

    def _other_lists(self, step: int, absent: frozenset[str]) -> dict[str, list[StoredFile] | None]:
        """Wait for the other sites; None: a site's part did not come in time."""
        place = self._place
        found: dict[str, list[StoredFile] | None] = {
            site: None for site in place.ranks if site != place.site and site not in absent
        }
        where = (
            joined(place.store, checkpoint_name(step))
            if place.is_remote
            else str(place.staging(step))
        )
        files, root = opened(where)
        deadline_s = time.monotonic() + PARTS_S
        while None in found.values() and time.monotonic() < deadline_s:
            for site in [each for each, known in found.items() if known is None]:
                path = f"{root}/{OWN}/{site}/{_LIST}"
                files.invalidate_cache()
                if files.exists(path):
                    found[site] = [StoredFile(*each) for each in json.loads(files.cat_file(path))]
            if None in found.values():
                time.sleep(_LOOK_S)
        return found

    def _prune(self, step: int) -> None:
        """Delete checkpoints beyond the newest, and what killed writers have left."""
        place = self._place
        for old in checkpoints_in(place.store)[place.keep :]:
            files, root = opened(old.place)
            files.rm(root, recursive=True)
        if place.is_remote:
            shutil.rmtree(place.staging(step), ignore_errors=True)
            return
        for left in Path(place.store).glob(".step-*"):
            if left.name < f".{checkpoint_name(step)}":
                shutil.rmtree(left, ignore_errors=True)


def _wait_for(path: Path) -> None:
    """Wait for a file that the gateway writes.

    Raises:
        OSError: it did not come.
    """
    deadline_s = time.monotonic() + PARTS_S
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise OSError(f"the gateway has not written {path.name}: see its log")
        time.sleep(_LOOK_S)


def _flush(file: Any) -> None:  # noqa: ANN401 - any file
    file.flush()
    os.fsync(file.fileno())


def _rename(source: Path, target: Path) -> None:
    """Give a folder its name, for good: what is in it, then its name, is on the disk."""
    for folder in [source, *(each for each in source.rglob("*") if each.is_dir())]:
        _sync_folder(folder)
    if target.exists():  # this step was saved before the run went back to an earlier one
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
    files, root = opened(place)
    for each in stored:
        parent = f"{root}/{each.path}".rpartition("/")[0]
        files.makedirs(parent, exist_ok=True)
        files.put_file(str(folder / each.path), f"{root}/{each.path}")
        (folder / each.path).unlink()


def _list_bytes(files: list[StoredFile]) -> bytes:
    return json.dumps([[each.path, each.num_bytes, each.digest] for each in files]).encode()
