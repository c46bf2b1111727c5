"""Contents kept on disk by their digests, in bounded space: what is carried to sites.

A content is there as a whole or not at all, so a transfer that broke goes on with what is missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import IO, Final

from isthmus.protos.control.v1.control_pb2 import BlobPart
from isthmus.protos.errors import CorruptDataError, NotFoundError, RemoteProtocolError
from isthmus.protos.limits import BLOB_PART_BYTES, CARRIED_BYTES

STORE_BYTES: Final = 4 << 30
"""Limit on what a machine keeps for later runs; what goes on is kept beyond it."""


class Blobs:
    """A store of contents in a folder. Processes may share it."""

    def __init__(self, folder: Path) -> None:
        """Touch nothing yet. What one sender sends goes to an instance of its own."""
        self.folder = folder
        self._sender = secrets.token_hex(4)

    def path(self, digest: str) -> Path:
        """Return where a content lies, if it is there."""
        return self.folder / digest[:2] / digest

    def missing(self, digests: Iterable[str]) -> list[str]:
        """Return the digests whose contents are not there, each once; use the others."""
        found = []
        for digest in dict.fromkeys(digests):
            try:
                os.utime(self.path(digest))
            except FileNotFoundError:
                found.append(digest)
        return found

    def read(self, digest: str) -> bytes:
        """Return a content.

        Raises:
            NotFoundError: it is not there.
            CorruptDataError: it has changed on disk.
        """
        with contextlib.suppress(FileNotFoundError):
            content = self.path(digest).read_bytes()
            self._require(digest, hashlib.sha256(content).hexdigest())
            return content
        raise NotFoundError(f"{self.folder} has no content {digest}")

    def parts(self, digests: Iterable[str]) -> Iterator[BlobPart]:
        """Yield contents in parts, one content after the other."""
        for digest in digests:
            try:
                file = self.path(digest).open("rb")
            except FileNotFoundError:
                raise NotFoundError(f"{self.folder} has no content {digest}") from None
            with file:
                yield from parts_of(digest, file)

    def put(self, content: bytes) -> str:
        """Keep a content, and return its digest."""
        digest = hashlib.sha256(content).hexdigest()
        if self.missing([digest]):
            self.take(BlobPart(digest=bytes.fromhex(digest), data=content, is_last=True))
        return digest

    def take(self, part: BlobPart) -> str | None:
        """Write a part of a content. Return its digest with the last one, once it is checked.

        Raises:
            CorruptDataError: the content is not the digest's.
            RemoteProtocolError: the digest is none.
            OSError: the disk refuses.
        """
        if len(part.digest) != hashlib.sha256().digest_size:
            raise RemoteProtocolError("a content's part without its digest")
        digest = part.digest.hex()
        path = self.path(digest)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        scratch = path.with_name(f"{digest}.{self._sender}.part")
        with scratch.open("ab" if part.offset else "wb") as file:
            if file.tell() != part.offset or part.offset + len(part.data) > CARRIED_BYTES:
                raise RemoteProtocolError(f"a part of {digest} at {part.offset} has no place")
            file.write(part.data)
        if not part.is_last:
            return None
        with scratch.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != digest:
            scratch.unlink()
        self._require(digest, found)
        scratch.replace(path)
        return digest

    def copy(self, digest: str, to: Path) -> None:
        """Copy a content into a new file, and check it; errors as of `read`."""
        try:
            shutil.copyfile(self.path(digest), to)
        except FileNotFoundError:
            raise NotFoundError(f"{self.folder} has no content {digest}") from None
        with to.open("rb") as file:
            self._require(digest, hashlib.file_digest(file, "sha256").hexdigest())

    def keep_within(self, limit_bytes: int, used: Collection[str]) -> None:
        """Remove what was used least recently until the rest fits; never what is in `used`."""
        found = []
        for path in self.folder.glob("??/*"):
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                found.append((path.name in used, stat.st_mtime, stat.st_size, path))
        left_bytes = sum(num_bytes for _, _, num_bytes, _ in found)
        for is_used, _, num_bytes, path in sorted(found):
            if is_used or left_bytes <= limit_bytes:
                return
            path.unlink(missing_ok=True)
            left_bytes -= num_bytes

    def _require(self, digest: str, found: str) -> None:
        if found != digest:
            self.path(digest).unlink(missing_ok=True)
            raise CorruptDataError(f"a carried file is not what it was: {digest} is {found}")


def parts_of(digest: str, file: IO[bytes]) -> Iterator[BlobPart]:
    """Yield a file in parts, at least one."""
    offset, data = 0, file.read(BLOB_PART_BYTES)
    while True:
        following = file.read(BLOB_PART_BYTES)
        name = bytes.fromhex(digest)
        yield BlobPart(digest=name, offset=offset, data=data, is_last=not following)
        if not following:
            return
        offset, data = offset + len(data), following
