"""Where the checkpoints of one run lie: a folder, or a URL that fsspec knows.

STORE/step-00000100/   a checkpoint: manifest.json, and the files that it names
STORE/.step-00000100/  one that is being written, or whose writers were killed; in a folder only: an
                       object store has no such thing, and there the manifest, written last, decides
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from protos.checkpoint.manifest import MANIFEST, MANIFEST_BYTES, Manifest, StoredFile
from protos.errors import BadCheckpointError

_NAME = re.compile(r"step-(\d{8,})")
_READ_BYTES = 4 << 20


def checkpoint_name(step: int) -> str:
    """Return the name of a step's folder; names sort as steps do."""
    return f"step-{step:08d}"


def joined(place: str, *parts: str) -> str:
    """Return a path or URL below another."""
    return "/".join([place.rstrip("/"), *parts])


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A folder that has the name of a checkpoint. It may be a bad one."""

    place: str
    """A path or URL."""

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.place.rstrip("/").rsplit("/", 1)[-1]

    def manifest(self) -> Manifest:
        """Read the manifest, and nothing else.

        Raises:
            BadCheckpointError: there is none, or it is damaged.
            OSError: the storage does not answer.
        """
        files, root = opened(self.place)
        try:
            with files.open(f"{root}/{MANIFEST}", "rb") as file:
                written = file.read(MANIFEST_BYTES)
        except FileNotFoundError as error:
            raise BadCheckpointError(f"{self.name}: has no {MANIFEST}: half written") from error
        return Manifest.from_bytes(written, self.name)

    def verified(self, part: slice = slice(None)) -> Manifest:
        """Read the manifest, and all of its files, or those in `part`, and compare digests.

        Raises:
            BadCheckpointError: one is missing, cut short or changed.
            OSError: the storage does not answer.
        """
        manifest = self.manifest()
        for each in manifest.files[part]:
            self._verify(each)
        return manifest

    def _verify(self, stored: StoredFile) -> None:
        files, root = opened(self.place)
        path = f"{root}/{stored.path}"
        try:
            num_bytes = files.size(path)
            if num_bytes != stored.num_bytes:
                raise BadCheckpointError(
                    f"{self.name}: {stored.path} has {num_bytes} bytes, want {stored.num_bytes}"
                )
            with files.open(path, "rb") as file:
                found = digest_of(file)
        except FileNotFoundError as error:
            raise BadCheckpointError(f"{self.name}: {stored.path} is missing") from error
        if found != stored.digest:
            raise BadCheckpointError(
                f"{self.name}: {stored.path} has changed: its digest is {found[:12]}, "
                f"want {stored.digest[:12]}"
            )


def checkpoints_in(store: str) -> list[StoredCheckpoint]:
    """Return what has the name of a checkpoint there, newest first; nothing where there is none.

    Raises:
        OSError: the storage does not answer.
    """
    files, root = opened(store)
    try:
        names = [each.rstrip("/").rsplit("/", 1)[-1] for each in files.ls(root, detail=False)]
    except FileNotFoundError:
        return []
    steps = sorted(
        (int(match[1]), name) for name in names if (match := _NAME.fullmatch(name)) is not None
    )
    return [StoredCheckpoint(joined(store, name)) for _, name in reversed(steps)]


def newest_good(
    stored: Sequence[StoredCheckpoint],
) -> Iterator[tuple[StoredCheckpoint, Manifest | BadCheckpointError]]:
    """Yield each checkpoint with what is wrong with it, up to the first good one: its manifest."""
    for each in stored:
        try:
            yield each, each.verified()
        except BadCheckpointError as error:
            yield each, error
        else:
            return


def opened(place: str) -> tuple[Any, str]:
    """Return fsspec's file system of a path or URL, and the path on it."""
    import fsspec  # takes a tenth of a second, which runs without checkpoints can spare

    files, root = fsspec.core.url_to_fs(place)
    return files, root.rstrip("/")


def digest_of(file: Any) -> str:  # noqa: ANN401 - any binary file; fsspec has no types
    """Return the xxh3-128 of what is left to read, in hex."""
    digest = xxhash.xxh3_128()
    while data := file.read(_READ_BYTES):
        digest.update(data)
    return digest.hexdigest()
