"""A state for others is written beside training, which goes on whatever happens to it."""

from __future__ import annotations

import errno
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.sites.checkpoint import entry_writer
from isthmus.sites.checkpoint.entry_writer import EntryWriter, Part, Written, laid_out
from isthmus.sites.local.entry_folder import (
    INDEX,
    OBJECTS,
    SPARE_BYTES,
    TENSORS,
    Index,
    digests_in,
    entry_folder,
    newest_whole,
    num_pieces,
    remove_states,
    require_room,
)
from tests.fakes.waiting import DEADLINE_S, wait_for

NUMEL = 3 << 20
"""Each tensor has so many elements: 12 MiB, three pieces."""


class Told:
    """Remembers what is reported."""

    def __init__(self) -> None:
        self.done_bytes: list[int] = []
        self.problems: list[str] = []
        self.failures: list[tuple[int, str]] = []

    def progress(self, epoch: int, done_bytes: int, problem: str = "") -> None:
        assert epoch == 7
        self.done_bytes.append(done_bytes)
        self.problems += [problem] if problem else []

    def failed(self, step: int, reason: str) -> None:
        self.failures.append((step, reason))

    def waiting(self) -> None:
        pass


class Ranks:
    """Collectives of ranks that are threads of this process."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count, timeout=DEADLINE_S)
        self._told: list[Any] = [None] * count
        self.num_collectives = 0

    def tell_all(self, rank: int, own: Any) -> list[Any]:  # noqa: ANN401 - anything
        self._told[rank] = own
        self._barrier.wait()
        told = [*self._told]
        if self._barrier.wait() == 0:
            self.num_collectives += 1
        return told


class Site:
    """Writers of all ranks of a node."""

    def __init__(self, folder: Path, count: int = 1, ranks: Ranks | None = None) -> None:
        self.folder = folder
        self.tensors = {
            f"w{at}": torch.arange(NUMEL, dtype=torch.float32) + at for at in range(count)
        }
        extents, num_bytes = laid_out({p: (t.shape, t.dtype) for p, t in self.tensors.items()})
        self.num_bytes = num_bytes
        self.ranks = ranks or Ranks(count)
        self.told = [Told() for _ in range(count)]
        written = Written(folder=folder, epoch=7, step=3, extents=extents, num_bytes=num_bytes)
        self.writers = [
            EntryWriter(
                written,
                Part(
                    rank=at,
                    local_rank=at,
                    num_local_ranks=count,
                    tell_all=lambda own, at=at: self.ranks.tell_all(at, own),  # type: ignore[misc]
                ),
                told,
            )
            for at, told in enumerate(self.told)
        ]

    def start(self) -> None:
        for at, writer in enumerate(self.writers):
            writer.start({f"w{at}": self.tensors[f"w{at}"]})

    def publish(self) -> None:
        for writer in self.writers:
            writer.publish(lambda: {"step": 3})

    def close(self) -> None:
        for writer in self.writers:
            writer.discard()
        for writer in self.writers:
            writer.close()


@pytest.fixture(autouse=True)
def told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry_writer, "TELL_EVERY_S", 0.001)


def test_ranks_write_parts_of_one_state_and_say_how_far_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "entry"
    site = Site(folder, 2)
    site.start()
    site.publish()
    wait_for((folder / INDEX).exists, "the state, written")
    index = Index.from_bytes((folder / INDEX).read_bytes())
    found = digests_in(folder / TENSORS, range(num_pieces(site.num_bytes)))
    assert index.digests[TENSORS] == tuple(found.values())
    assert torch.load(folder / OBJECTS, weights_only=True) == {"step": 3}
    for told in site.told:
        assert told.done_bytes == sorted(told.done_bytes)
        assert not told.problems
    site.close()
    assert not folder.exists()


def test_what_one_rank_cannot_write_none_goes_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "entry"
    site = Site(folder, 2)

    def full(_: Path, num_bytes: int) -> Any:  # noqa: ANN401 - never
        del num_bytes
        if threading.current_thread() is site.writers[1]._thread:
            raise OSError(errno.ENOSPC, "No space left on device", "x")
        return opened(folder / TENSORS, site.num_bytes)

    opened = entry_writer.open_shared
    monkeypatch.setattr(entry_writer, "open_shared", full)
    site.start()
    for writer in site.writers:
        writer.wait_settled()
    site.publish()
    site.close()
    assert not folder.exists()
    reason = f"rank 1: {folder}: No space left on device"
    assert [told.problems for told in site.told] == [[reason], [reason]]
    assert [told.failures for told in site.told] == [[(3, reason)], []]
    assert site.ranks.num_collectives == 1

    monkeypatch.setattr(entry_writer, "open_shared", opened)
    again = Site(folder, 2, site.ranks)  # the next collectives pair with one another
    again.start()
    again.publish()
    wait_for((folder / INDEX).exists, "the next state")
    again.close()


def test_a_disk_without_room_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "entry"
    free = shutil.disk_usage(tmp_path)._replace(free=SPARE_BYTES + NUMEL)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    monkeypatch.setattr(entry_writer, "open_shared", None)
    site = Site(folder)
    site.start()
    site.writers[0].wait_settled()
    site.publish()
    site.close()
    [(step, reason)] = site.told[0].failures
    assert step == 3
    assert reason == f"rank 0: {folder}: it takes 268MiB, and 259MiB are free"
    assert not folder.exists()


def test_a_folder_that_cannot_be_made_ends_no_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    site = Site(tmp_path / "file" / "entry")
    site.start()
    site.writers[0].wait_settled()
    site.publish()
    site.close()
    assert [reason for _, reason in site.told[0].failures] == [
        f"rank 0: {tmp_path}/file/entry: Not a directory"
    ]


def test_objects_that_cannot_be_saved_end_no_training(tmp_path: Path) -> None:
    site = Site(tmp_path / "entry")
    site.start()

    def make() -> dict[str, Any]:
        raise RuntimeError("no such thing")

    site.writers[0].publish(make)
    site.writers[0].wait_settled()
    site.close()
    [(_, reason)] = site.told[0].failures
    assert reason == f"rank 0: {tmp_path}/entry: RuntimeError: no such thing"
    assert not (tmp_path / "entry").exists()


def test_what_nobody_wants_is_given_up_in_silence(tmp_path: Path) -> None:
    site = Site(tmp_path / "entry", 2)
    site.writers[1].discard()  # this rank has heard of it sooner
    site.start()
    for writer in site.writers:
        writer.wait_settled()
    site.close()
    assert [told.failures + told.problems for told in site.told] == [[], []]
    assert not (tmp_path / "entry").exists()


def test_a_state_that_cannot_be_copied_ends_no_training(tmp_path: Path) -> None:
    site = Site(tmp_path / "entry", 2)
    site.writers[0].start({"w0": site.tensors["w0"]})
    site.writers[1].start({}, MemoryError())
    for writer in site.writers:
        writer.wait_settled()
    site.close()
    reason = f"rank 1: {tmp_path}/entry: MemoryError"
    assert site.told[0].failures[0][1].startswith(reason)
    assert not (tmp_path / "entry").exists()


def make_state(node_folder: Path, epoch: int, *, is_whole: bool) -> Path:
    folder = entry_folder(node_folder, epoch)
    folder.mkdir(parents=True)
    (folder / TENSORS).write_bytes(b"x")
    if is_whole:
        (folder / INDEX).write_bytes(b"{}")
    return folder


def test_states_that_were_left_are_removed_but_the_newest_whole_one(tmp_path: Path) -> None:
    assert newest_whole(tmp_path) is None
    for epoch, is_whole in ((9, True), (10, True), (11, False)):
        make_state(tmp_path, epoch, is_whole=is_whole)
    kept = newest_whole(tmp_path)
    assert kept == entry_folder(tmp_path, 10)
    remove_states(tmp_path, but=kept)
    assert [*(tmp_path / "entry").iterdir()] == [kept]
    remove_states(tmp_path)
    assert not [*(tmp_path / "entry").iterdir()]


def test_what_is_written_already_needs_no_more_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / TENSORS).write_bytes(bytes(1 << 20))
    free = shutil.disk_usage(tmp_path)._replace(free=SPARE_BYTES)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    require_room(tmp_path, 1 << 20)
    with pytest.raises(OSError, match="it takes 259MiB, and 257MiB are free"):
        require_room(tmp_path, 3 << 20)
