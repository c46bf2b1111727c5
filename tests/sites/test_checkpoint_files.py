"""What a store holds is what was written, or the checkpoint fails; no copy and little memory."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest
import torch

from isthmus.protos.checkpoint.manifest import StoredFile
from isthmus.protos.checkpoint.store import StoredCheckpoint, joined, opened
from isthmus.sites.checkpoint import checkpoint_files
from isthmus.sites.checkpoint.checkpoint_files import CheckpointFiles
from tests.fakes.s3 import S3

PART_BYTES = 5 << 20
"""The smallest part that S3 takes."""


@pytest.fixture
def files(s3: S3, monkeypatch: pytest.MonkeyPatch) -> CheckpointFiles:
    monkeypatch.setattr(checkpoint_files, "BLOCK_BYTES", PART_BYTES)
    return CheckpointFiles(joined(s3.url(), "step-00000001"))


def write(files: CheckpointFiles, data: bytes, path: str = "own/a [1]/0.ü.pt") -> StoredFile:
    with files.create(path) as stream:
        middle = len(data) // 3
        stream.write(data[:middle])
        stream.write(data[middle:])
    return files.written[-1]


@pytest.mark.parametrize(
    "num_bytes", [0, 7, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES]
)
def test_an_etag_says_what_the_store_holds_and_nothing_is_read(
    files: CheckpointFiles, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    read: list[StoredFile] = []
    with monkeypatch.context() as patch:
        patch.setattr(StoredCheckpoint, "verify", lambda _, stored: read.append(stored))
        stored = write(files, os.urandom(num_bytes))
    assert (stored.num_bytes, read) == (num_bytes, [])
    StoredCheckpoint(files.place).verify(stored)


def test_where_an_etag_is_no_digest_the_file_is_read_back(
    files: CheckpointFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of an object that the store encrypts by a key of its own."""
    verify = StoredCheckpoint.verify
    read: list[str] = []

    def noted(self: StoredCheckpoint, stored: StoredFile) -> None:
        read.append(stored.path)
        verify(self, stored)

    monkeypatch.setattr(StoredCheckpoint, "verify", noted)
    with opened(files.place) as (store, _):
        info = store.info

    def encrypted(path: str) -> dict[str, object]:
        monkeypatch.setattr(store, "info", info)
        return {**info(path), "ETag": '"0123"'}

    monkeypatch.setattr(store, "info", encrypted)
    stored = write(files, b"some")
    assert read == [stored.path]


def test_a_file_that_arrives_changed_is_no_part_of_a_checkpoint(
    files: CheckpointFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(files.place) as (store, _):
        call = store.call_s3

    def flipped(method: str, *arguments: object, **options: object) -> object:
        if method == "upload_part" and options["PartNumber"] == 2:
            body = options["Body"]
            assert isinstance(body, bytes)
            options["Body"] = bytes([body[0] ^ 1]) + body[1:]
        return call(method, *arguments, **options)

    monkeypatch.setattr(store, "call_s3", flipped)
    changed = r"does not hold what was written: .*0\.ü\.pt has changed"
    with pytest.raises(OSError, match=changed) as caught:
        write(files, bytes(2 * PART_BYTES))
    assert caught.value.filename == files.place
    assert files.written == []


def test_a_file_that_breaks_off_is_not_completed(files: CheckpointFiles) -> None:
    def break_off() -> None:
        with files.create("shared/0") as stream:
            stream.write(bytes(PART_BYTES + 1))
            raise RuntimeError("half of it")

    with pytest.raises(RuntimeError, match="half of it"):
        break_off()
    with opened(files.place) as (store, root):
        assert store.find(root) == []
        assert store.list_multipart_uploads(root.partition("/")[0]) == []


def test_what_is_streamed_takes_a_few_blocks_of_memory(files: CheckpointFiles) -> None:
    state = {"weight": torch.zeros(20 * PART_BYTES, dtype=torch.uint8)}
    tracemalloc.start()
    try:
        files.save("shared/0", state)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert files.written[0].num_bytes > 20 * PART_BYTES
    assert peak_bytes < 6 * PART_BYTES


def test_a_file_in_a_folder_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def lost(descriptor: int) -> None:
        fsync(descriptor)
        os.ftruncate(descriptor, 3)

    files = CheckpointFiles(str(tmp_path))
    assert write(files, b"some").num_bytes == 4
    monkeypatch.setattr(os, "fsync", lost)
    with pytest.raises(OSError, match="has 3 bytes, want 4"):
        write(files, b"some")
