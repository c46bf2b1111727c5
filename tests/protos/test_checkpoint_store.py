"""What lies in storage as a checkpoint is read as it was written, or refused with the reason."""

import errno
import re
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from isthmus.protos.checkpoint.manifest import MANIFEST, Manifest, StoredFile
from isthmus.protos.checkpoint.requests import is_written, requested_step
from isthmus.protos.checkpoint.store import (
    StoredCheckpoint,
    checkpoint_name,
    checkpoints_in,
    digest_of,
    joined,
    newest_good,
    opened,
)
from isthmus.protos.errors import BadCheckpointError

URL = "memory://bucket/run"


def write(store: Path, step: int) -> Path:
    """Write a checkpoint of two files."""
    folder = store / checkpoint_name(step)
    (folder / "own").mkdir(parents=True)
    files = []
    for name in ("shared", "own/0"):
        (folder / name).write_bytes(name.encode() * step)
        with (folder / name).open("rb") as file:
            files.append(StoredFile(name, (folder / name).stat().st_size, digest_of(file)))
    manifest = Manifest(
        run="run",
        job="job",
        step=step,
        written_s=1.5,
        ranks={"a": 2, "b": 1},
        missing=("b",),
        data={"next": 3, "holes": [[1, 2]]},
        files=tuple(files),
    )
    (folder / MANIFEST).write_bytes(manifest.to_bytes())
    assert Manifest.from_bytes(manifest.to_bytes(), "here") == manifest
    return folder


def problem_of(folder: Path) -> str:
    with pytest.raises(BadCheckpointError) as caught:
        StoredCheckpoint(str(folder)).verified()
    return str(caught.value)


def test_checkpoints_are_listed_newest_first_and_nothing_else_is(tmp_path: Path) -> None:
    for step in (5, 123456789, 40):
        write(tmp_path, step)
    (tmp_path / ".step-00000099.g1").mkdir()
    (tmp_path / "notes.txt").write_text("")
    assert [each.name for each in checkpoints_in(str(tmp_path))] == [
        "step-123456789",
        "step-00000040",
        "step-00000005",
    ]
    assert checkpoints_in(str(tmp_path / "nowhere")) == []


def test_the_newest_good_one_is_found_behind_bad_ones(tmp_path: Path) -> None:
    good, bad = write(tmp_path, 5), write(tmp_path, 6)
    (bad / "own" / "0").unlink()
    (first, problem), (second, manifest) = newest_good(checkpoints_in(str(tmp_path)))
    assert (first.place, str(problem)) == (str(bad), "step-00000006: own/0 is missing")
    assert second.place == str(good)
    assert isinstance(manifest, Manifest)
    assert manifest.num_bytes == 5 * len("sharedown/0")


def test_a_store_that_does_not_answer_is_passed_over_where_another_holds_it(
    tmp_path: Path,
) -> None:
    gone = [StoredCheckpoint(f"nothing://bucket/run/step-0000000{step}") for step in (6, 5)]
    write(tmp_path, 5)
    (stored,) = checkpoints_in(str(tmp_path))
    (first, problem), (second, manifest) = newest_good([gone[0], stored, gone[1]])
    assert (first, second) == (gone[0], stored)
    assert str(problem).startswith("nothing://bucket/run/step-00000006: ")
    assert isinstance(manifest, Manifest)
    with pytest.raises(OSError, match="Protocol not known"):
        list(newest_good(gone))


def test_a_file_cut_short_or_changed_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, 7)
    data = (folder / "shared").read_bytes()
    (folder / "shared").write_bytes(data[:-1])
    assert problem_of(folder) == "step-00000007: shared has 41 bytes, want 42"
    (folder / "shared").write_bytes(data[:-1] + b"\0")
    assert problem_of(folder).startswith("step-00000007: shared has changed: its digest is ")


@pytest.mark.parametrize("bit", range(0, 8 * 400, 251))
def test_any_flipped_bit_of_a_manifest_is_noticed(tmp_path: Path, bit: int) -> None:
    folder = write(tmp_path, 7)
    data = bytearray((folder / MANIFEST).read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    if data[bit // 8 : bit // 8 + 1].isspace():
        pytest.skip("between two values")
    (folder / MANIFEST).write_bytes(data)
    assert problem_of(folder).startswith("step-00000007: ")


@pytest.mark.parametrize("written", [b"", b"{", b"[]", b'{"format": 2, "digest": ""}', b"{}"])
def test_what_is_no_manifest_is_refused(tmp_path: Path, written: bytes) -> None:
    folder = write(tmp_path, 7)
    (folder / MANIFEST).write_bytes(written)
    assert problem_of(folder).startswith("step-00000007: ")


def test_without_a_manifest_it_is_half_written(tmp_path: Path) -> None:
    folder = write(tmp_path, 7)
    (folder / MANIFEST).unlink()
    assert problem_of(folder) == "step-00000007: has no manifest.json: half written"


def test_a_url_is_a_place_like_a_folder(tmp_path: Path) -> None:
    fsspec.filesystem("memory").put(str(write(tmp_path, 9)), joined(URL, ""), recursive=True)
    (stored,) = checkpoints_in(URL)
    assert stored.verified().step == 9
    fsspec.filesystem("memory").rm(URL, recursive=True)


def test_a_url_that_cannot_be_opened_is_an_error_of_the_storage() -> None:
    with (
        pytest.raises(OSError, match="Protocol not known: nothing") as caught,
        opened("nothing://bucket/runs"),
    ):
        pass
    assert caught.value.filename == "nothing://bucket/runs"
    assert requested_step("nothing://bucket/runs") is None
    assert not is_written("nothing://bucket/runs", 1)


class UnreachableError(Exception):
    """As botocore's, it is no OSError."""


@pytest.mark.parametrize(
    ("raised", "kind", "text"),
    [
        (
            UnreachableError("no route\nto it"),
            OSError,
            "[Errno 5] UnreachableError: no route to it: ",
        ),
        (PermissionError("Access Denied"), PermissionError, "[Errno 13] Access Denied: "),
        (
            FileNotFoundError("bucket/run"),
            FileNotFoundError,
            "[Errno 2] FileNotFoundError: bucket/run, PLACE: ",
        ),
        (TimeoutError(), OSError, "[Errno 5] TimeoutError, PLACE: "),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), OSError, "[Errno 5] refused: "),
    ],
)
def test_whatever_a_storage_raises_is_an_oserror_with_its_url(
    raised: Exception, kind: type[OSError], text: str
) -> None:
    with pytest.raises(OSError, match="memory://bucket/run") as caught, opened(URL):
        raise raised
    assert type(caught.value) is kind
    said = re.sub(r"in \w+, protos/test_checkpoint_store\.py:\d+", "PLACE", str(caught.value))
    assert said == f"{text}'{URL}'"
    assert caught.value.__cause__ is raised


def test_a_full_disk_stays_one() -> None:
    with pytest.raises(OSError, match="full") as caught, opened("/data/run"):
        raise OSError(errno.ENOSPC, "full")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "/data/run")


def test_what_storages_name_well_and_errors_of_our_own_pass_as_they_are() -> None:
    for raised in (OSError(errno.EIO, "broken", "/disk"), BadCheckpointError("half written")):
        with pytest.raises(type(raised)) as caught, opened(URL):
            raise raised
        assert caught.value is raised


def test_a_store_that_cannot_be_reached_says_so_everywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with opened(URL) as (files, root):
        files.pipe_file(f"{root}/request.json", b'{"step": 7}')
    assert requested_step(URL) == 7
    with monkeypatch.context() as network:
        network.setattr(MemoryFileSystem, "_open", refuse)
        network.setattr(MemoryFileSystem, "ls", refuse)
        assert requested_step(URL) is None
        assert not is_written(URL, 7)
        with pytest.raises(OSError, match=f"UnreachableError: no route: '{URL}/step-00000007'"):
            list(newest_good([StoredCheckpoint(joined(URL, checkpoint_name(7)))]))
        with pytest.raises(OSError, match=f"UnreachableError: no route: '{URL}'"):
            checkpoints_in(URL)
    fsspec.filesystem("memory").rm(URL, recursive=True)


def refuse(*_: object, **__: object) -> None:
    raise UnreachableError("no route")
