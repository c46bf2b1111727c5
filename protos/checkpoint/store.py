"""A store of a run's checkpoints: a folder, or a URL that fsspec supports.

STORE/step-00000100/       a checkpoint: manifest.json, and the files that it names
STORE/.step-00000100.g1/   under way, or left by killed writers; only in a folder: an object store
has no rename, and there the manifest, written last, decides
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import xxhash

from isthmus.protos.checkpoint.manifest import MANIFEST, MANIFEST_BYTES, Manifest, StoredFile
from isthmus.protos.errors import BadCheckpointError, IsthmusError
from isthmus.protos.failure import reason_of, text_of

_NAME = re.compile(r"step-(\d{8,})")
_READ_BYTES = 4 << 20
_ERRNOS = {
    FileNotFoundError: errno.ENOENT,
    PermissionError: errno.EACCES,
    FileExistsError: errno.EEXIST,
}
"""Error numbers for exceptions that storages raise without one. Other errors at a URL become EIO,
because the numbers of sockets say nothing about files."""


def checkpoint_name(step: int) -> str:
    """Return the name of a step's folder; names sort as steps do."""
    return f"step-{step:08d}"


def joined(place: str, *parts: str) -> str:
    """Join a path or URL with relative parts."""
    return "/".join([place.rstrip("/"), *parts])


def stores_of(places: Sequence[str], run: str) -> tuple[str, ...]:
    """Return a run's stores, at the places that its job names."""
    return tuple(joined(place, run) for place in places)


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A folder with the name of a checkpoint, possibly damaged."""

    place: str
    """Path or URL of the checkpoint."""

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.place.rstrip("/").rsplit("/", 1)[-1]

    @property
    def store(self) -> str:
        """The store that it is in."""
        return self.place.rstrip("/").rpartition("/")[0]

    @property
    def step(self) -> int:
        """The step in the folder's name, after which it was saved."""
        return int(self.name.removeprefix("step-"))

    def manifest(self) -> Manifest:
        """Read the manifest only.

        Raises:
            BadCheckpointError: the manifest is missing or damaged.
            OSError: the storage does not answer.
        """
        try:
            with (
                opened(self.place) as (files, root),
                files.open(f"{root}/{MANIFEST}", "rb") as file,
            ):
                written = file.read(MANIFEST_BYTES)
        except FileNotFoundError as error:
            raise BadCheckpointError(f"{self.name}: has no {MANIFEST}: half written") from error
        return Manifest.from_bytes(written, self.name)

    def has_manifest(self) -> bool:
        """Return whether the manifest exists, so that the checkpoint was once complete.

        Raises:
            OSError: the storage does not answer.
        """
        try:
            with opened(self.place) as (files, root):
                files.info(f"{root}/{MANIFEST}")  # `exists` would turn errors into False
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def remove(self) -> None:
        """Delete the checkpoint, manifest first: after an interruption it counts as unfinished.

        Raises:
            OSError: some file could not be removed.
        """
        with opened(self.place) as (files, root):
            with suppress(FileNotFoundError):
                files.rm_file(f"{root}/{MANIFEST}")
            for path in files.find(root):  # `rm` takes brackets in a URL for a pattern
                files.rm_file(path)
            with suppress(FileNotFoundError):
                files.rm(root, recursive=True)  # folders, where the storage has them

    def verified(self, part: slice = slice(None)) -> Manifest:
        """Verify the manifest's files, or those in `part`, by their digests.

        Raises:
            BadCheckpointError: a file is missing, cut short or changed.
            OSError: the storage does not answer.
        """
        manifest = self.manifest()
        for each in manifest.files[part]:
            self.verify(each)
        return manifest

    def verify(self, stored: StoredFile) -> None:
        """Read a file, and compare its digest.

        Raises:
            BadCheckpointError: it is missing, cut short or changed.
            OSError: the storage does not answer.
        """
        try:
            with opened(self.place) as (files, root):
                path = f"{root}/{stored.path}"
                num_bytes = files.size(path)
                if num_bytes != stored.num_bytes:
                    raise BadCheckpointError(
                        f"{self.name}: {stored.path} has {num_bytes} bytes, want {stored.num_bytes}"
                    )
                with files.open(path, "rb") as file:
                    digest = digest_of(file)
        except FileNotFoundError as error:
            raise BadCheckpointError(f"{self.name}: {stored.path} is missing") from error
        if digest != stored.digest:
            raise BadCheckpointError(
                f"{self.name}: {stored.path} has changed: its digest is {digest[:12]}, "
                f"want {stored.digest[:12]}"
            )


def checkpoints_in(store: str) -> list[StoredCheckpoint]:
    """Return the folders with names of checkpoints, newest first.

    Raises:
        OSError: the storage does not answer.
    """
    return [StoredCheckpoint(joined(store, checkpoint_name(each))) for each in steps_in(store)]


def steps_in(store: str) -> list[int]:
    """Return the steps of which there are folders, newest first.

    Raises:
        OSError: the storage does not answer.
    """
    try:
        with opened(store) as (files, root):
            files.invalidate_cache()  # other processes write there, too
            names = [each.rstrip("/").rsplit("/", 1)[-1] for each in files.ls(root, detail=False)]
    except FileNotFoundError:
        return []
    found = (match for name in names if (match := _NAME.fullmatch(name)) is not None)
    return sorted((int(each[1]) for each in found), reverse=True)


def newest_good(
    stored: Sequence[StoredCheckpoint],
) -> Iterator[tuple[StoredCheckpoint, Manifest | BadCheckpointError]]:
    """Yield checkpoints with their errors, up to the first good one with its manifest.

    A store that does not answer is passed over if there are others.

    Raises:
        OSError: no store answers.
    """
    silent: set[str] = set()
    for each in stored:
        if each.store in silent:
            continue
        try:
            yield each, each.verified()
        except BadCheckpointError as error:
            yield each, error
        except OSError as error:
            silent.add(each.store)
            if silent.issuperset(other.store for other in stored):
                raise
            yield each, BadCheckpointError(f"{each.place}: {text_of(error)}")
        else:
            return


@contextmanager
def opened(place: str) -> Iterator[tuple[Any, str]]:
    """Yield fsspec's file system for a path or URL, and the path on it.

    Raises:
        OSError: fsspec does not know URLs of that kind, or a package that it needs is missing; or
            whatever the storage raises inside (`storage_errors`).
    """
    import fsspec  # takes a tenth of a second: only for runs with checkpoints

    with storage_errors(place):
        try:
            files, root = fsspec.core.url_to_fs(place)
        except (ImportError, ValueError) as error:
            raise OSError(errno.ENODEV, text_of(error), place) from error
        yield files, root.rstrip("/")


@contextmanager
def storage_errors(place: str) -> Iterator[None]:
    """Convert storage exceptions raised inside to OSError with a number and a path or URL.

    Storages raise errors of their own: those of an unreachable S3 are no OSErrors, and others have
    no number. `place` is used if the error names no file.
    """
    try:
        yield
    except IsthmusError:
        raise
    except OSError as error:
        if error.errno is not None and error.filename is not None:
            raise
        of_kind = [code for kind, code in _ERRNOS.items() if isinstance(error, kind)]
        of_folder = [] if "://" in place or error.errno is None else [error.errno]
        code, *_ = [*of_kind, *of_folder, errno.EIO]
        what = error.strerror or text_of(error)
        raise OSError(code, what, place) from error
    except Exception as error:
        what = reason_of(error)
        raise OSError(errno.EIO, what, place) from error


def digest_of(file: Any) -> str:  # noqa: ANN401 - any binary file; fsspec has no types
    """Return the xxh3-128 of a file's remaining bytes, in hex."""
    digest = xxhash.xxh3_128()
    while data := file.read(_READ_BYTES):
        digest.update(data)
    return digest.hexdigest()
