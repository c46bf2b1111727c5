"""Writes the files of one checkpoint into its store, and checks what the store holds then.

Files are streamed: nothing passes over a local disk, and of a file at most a few blocks are in
memory. In a folder a file is flushed to disk and read back. A URL is uploaded in blocks. An ETag of
the store, where it has one that is a digest of these blocks, spares the reading.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import torch
import xxhash
from fsspec.spec import AbstractBufferedFile

from isthmus.protos.checkpoint.manifest import StoredFile
from isthmus.protos.checkpoint.store import StoredCheckpoint, opened, storage_errors
from isthmus.protos.errors import BadCheckpointError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

BLOCK_BYTES = 32 << 20
"""Bytes of one part of an upload. S3 takes 10,000 parts: 320 GB a file."""


class StoredStream(io.RawIOBase):
    """A file that is written in whole blocks, which makes the parts of an upload predictable."""

    def __init__(self, file: Any, place: str) -> None:  # noqa: ANN401 - as fsspec has them
        """`file` is open for writing; errors name `place`."""
        self._file = file
        self._place = place
        self._digest = xxhash.xxh3_128()
        self._blocks = [hashlib.md5(usedforsecurity=False)]
        self._num_bytes = 0

    def writable(self) -> bool:
        """Whether it can be written: always."""
        return True

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._num_bytes

    def write(self, data: ReadableBuffer) -> int:
        """Write all of `data`."""
        octets = memoryview(data).cast("B")
        begin = 0
        while begin < len(octets):
            if self._num_bytes and self._num_bytes % BLOCK_BYTES == 0:
                self._blocks.append(hashlib.md5(usedforsecurity=False))
            end = begin + BLOCK_BYTES - self._num_bytes % BLOCK_BYTES
            piece = octets[begin:end]
            with storage_errors(self._place):
                self._file.write(piece)
            self._digest.update(piece)
            self._blocks[-1].update(piece)
            self._num_bytes += len(piece)
            begin = end
        return len(octets)

    def stored(self, path: str) -> StoredFile:
        """Return what the manifest is to say of the file."""
        return StoredFile(path, self._num_bytes, self._digest.hexdigest())

    @property
    def etag(self) -> str:
        """The ETag that S3-like stores give a file uploaded in these blocks."""
        if self._num_bytes < BLOCK_BYTES:
            return self._blocks[0].hexdigest()
        whole = b"".join(block.digest() for block in self._blocks)
        return f"{hashlib.md5(whole, usedforsecurity=False).hexdigest()}-{len(self._blocks)}"


class CheckpointFiles:
    """The files that one rank writes into one checkpoint."""

    def __init__(self, place: str) -> None:
        """`place` is the folder or URL that the checkpoint is made in."""
        self.place = place
        self.written: list[StoredFile] = []
        """Files that the store holds as they were written."""

    @contextmanager
    def create(self, path: str) -> Iterator[StoredStream]:
        """Write a file; the block ends once the store holds it.

        Raises:
            OSError: the store does not take it, or holds something else.
        """
        with opened(self.place) as (files, root):
            target = f"{root}/{path}"
            files.makedirs(target.rpartition("/")[0], exist_ok=True)
            file = files.open(target, "wb", block_size=BLOCK_BYTES)
        stream = StoredStream(file, self.place)
        try:
            yield stream
            with storage_errors(self.place):
                if "://" not in self.place:
                    file.flush()
                    os.fsync(file.fileno())
                file.close()
        except BaseException:
            _give_up(file)
            raise
        with storage_errors(self.place):
            files.invalidate_cache()
            etag = files.info(target).get("ETag", "").strip('"')
        stored = stream.stored(path)
        if etag != stream.etag:  # none, or that of other parts or an encrypted object
            self._verify(stored)
        self.written.append(stored)

    def save(self, path: str, saved: object) -> None:
        """Write an object as `torch.save` does.

        Raises:
            OSError: as `create` does.
        """
        with self.create(path) as stream:
            torch.save(saved, cast("BinaryIO", stream))

    def _verify(self, stored: StoredFile) -> None:
        try:
            StoredCheckpoint(self.place).verify(stored)
        except BadCheckpointError as error:
            raise OSError(
                errno.EIO, f"the store does not hold what was written: {error}", self.place
            ) from error


def _give_up(file: Any) -> None:  # noqa: ANN401 - any binary file; fsspec has no types
    """Close a file without completing its upload, where that can be."""
    with suppress(Exception):  # the error that led here counts
        if isinstance(file, AbstractBufferedFile):
            file.discard()
            file.closed = True
        else:
            file.close()
