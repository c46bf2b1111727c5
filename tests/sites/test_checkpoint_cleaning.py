"""What is removed of checkpoints, and what stays because a process may still write it."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from isthmus.protos.checkpoint.manifest import MANIFEST
from isthmus.protos.checkpoint.store import checkpoint_name, joined, opened
from isthmus.sites.checkpoint.cleaning import remove_asked, remove_parts, remove_superseded
from isthmus.sites.checkpoint.place import LIST, OWN, PUBLISHES, SHARED, Place
from tests.fakes.s3 import S3


def place_of(
    site: str,
    store: Path | str,
    *,
    rank: int = 0,
    local_rank: int = 0,
    generation: int = 2,
    keep: int = 3,
    local: Path = Path("unused"),
) -> Place:
    return Place(
        store=str(store), local=local, run="run", job="job", generation=generation,
        site=site, rank=rank, local_rank=local_rank, ranks={"a": 2, "b": 2, "c": 1}, keep=keep,
    )  # fmt: skip


def write(folder: Path, *paths: str) -> None:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("some")


def left(folder: Path) -> set[str]:
    return {str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()}


BY_A = (f"{SHARED}/__0_0.distcp", f"{OWN}/a/0.pt", f"{OWN}/a/{PUBLISHES}")
BY_B = (f"{OWN}/b/0.pt", f"{OWN}/b/.1.residuals.npz")


def test_a_site_that_does_not_publish_removes_its_part_unless_it_is_listed(tmp_path: Path) -> None:
    folder = Path(place_of("b", tmp_path).made_in(7))
    write(folder, *BY_A, *BY_B, f"{OWN}/b/{LIST}")
    remove_parts(place_of("b", tmp_path), 7)
    assert left(folder) == {*BY_A, *BY_B, f"{OWN}/b/{LIST}"}, "a may publish it"
    (folder / OWN / "b" / LIST).unlink()
    remove_parts(place_of("b", tmp_path), 6)
    assert left(folder) == {*BY_A, *BY_B}, "a later step"
    remove_parts(place_of("b", tmp_path, rank=1), 7)
    assert left(folder) == {*BY_A, *BY_B}, "one rank does it"
    remove_parts(place_of("b", tmp_path), 7)
    assert left(folder) == {*BY_A}


def test_the_site_that_was_to_publish_leaves_only_what_others_still_write(tmp_path: Path) -> None:
    folder = Path(place_of("a", tmp_path).made_in(7))
    by_c = f"{OWN}/c/0.pt"
    write(folder, MANIFEST, *BY_A, *BY_B, f"{OWN}/b/{LIST}", by_c)
    remove_parts(place_of("a", tmp_path), 7)
    assert left(folder) == {f"{OWN}/a/{PUBLISHES}", by_c}
    write(folder, f"{OWN}/c/{LIST}")
    remove_parts(place_of("a", tmp_path), 8)
    assert list(tmp_path.iterdir()) == []


def test_what_an_earlier_start_left_goes_whatever_its_step_and_a_later_one_stays(
    tmp_path: Path,
) -> None:
    before, after = (Path(place_of("a", tmp_path, generation=each).made_in(9)) for each in (1, 3))
    for folder in (before, after):
        write(folder, *BY_A)
    write(tmp_path, "notes.txt")
    remove_parts(place_of("a", tmp_path), 7)
    assert sorted(tmp_path.iterdir()) == sorted([after, tmp_path / "notes.txt"])


def test_what_a_gateway_wrote_goes_with_its_folder_by_each_nodes_first_rank(
    tmp_path: Path,
) -> None:
    place = place_of("b", "memory://bucket/run", rank=1, local=tmp_path)
    for step in (7, 8):
        write(place.asked(step, 0).parent, place.asked(step, 0).name)
    remove_asked(place_of("b", "unused", rank=1, local_rank=1, local=tmp_path), 7)
    assert place.asked(7, 0).exists()
    remove_asked(place, 7)
    assert list(tmp_path.iterdir()) == [place.asked(8, 0).parent]
    remove_asked(place_of("b", "unused", local=tmp_path / "absent"), 7)


@pytest.mark.parametrize("kind", ["folder", "url"])
def test_only_whole_ones_count_among_those_to_keep(tmp_path: Path, kind: str, s3: S3) -> None:
    store = str(tmp_path / "store") if kind == "folder" else s3.url()
    with opened(store) as (files, root):
        for step, is_whole in ((1, True), (2, True), (3, False), (4, False), (5, True), (6, False)):
            for name in ("shared/0", *([MANIFEST] if is_whole else [])):
                path = f"{root}/{checkpoint_name(step)}/{name}"
                files.makedirs(path.rpartition("/")[0], exist_ok=True)
                files.pipe_file(path, b"some")
    assert remove_superseded(place_of("a", store, keep=2, local=tmp_path / "local"), 5) == []
    with opened(store) as (files, root):
        names = sorted(each.rpartition("/")[2] for each in files.ls(root, detail=False))
        assert names == ["step-00000002", "step-00000005", "step-00000006"], "6 is being written"


def test_one_that_stays_is_named_and_the_others_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        write(tmp_path / checkpoint_name(step), MANIFEST, "shared/0")
    write(Path(place_of("b", tmp_path).made_in(2)), *BY_B, f"{OWN}/b/{LIST}")
    local = type(fsspec.filesystem("file"))
    remove = local.rm

    def refuse(files: object, path: str, **options: bool) -> None:
        if "step-00000002" in path:
            raise PermissionError("Access Denied")
        remove(files, path, **options)

    monkeypatch.setattr(local, "rm", refuse)
    place = joined(str(tmp_path), checkpoint_name(2))
    assert remove_superseded(place_of("a", tmp_path, keep=1), 3) == [
        (2, f"[Errno 13] Access Denied: '{place}'")
    ]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
