"""A checkpoint out of turn is asked for so far ahead that every rank has looked by then."""

from pathlib import Path

import pytest

from isthmus.protos.checkpoint.manifest import MANIFEST, Manifest
from isthmus.protos.checkpoint.requests import (
    is_written,
    look_every_s,
    request_checkpoint,
    requested_step,
    saved_step,
)
from isthmus.protos.checkpoint.store import checkpoint_name


@pytest.mark.parametrize(("step_s", "ahead"), [(0.1, 50), (60.0, 1), (0.0, 5000)])
def test_the_step_is_two_looks_and_what_is_told_late_ahead(
    tmp_path: Path, step_s: float, ahead: int
) -> None:
    store = str(tmp_path / "store")
    assert requested_step(store) is None
    step = request_checkpoint((store,), 7, step_s)
    assert step == 7 + 2 + ahead
    assert requested_step(store) == step
    assert not is_written(store, step)
    assert saved_step((store,), step, 7) is None
    assert look_every_s("s3://bucket/run") > look_every_s(store)


@pytest.mark.parametrize("written", [b"", b"{}", b'{"step": "7"}', b"[]"])
def test_what_is_no_request_asks_for_nothing(tmp_path: Path, written: bytes) -> None:
    (tmp_path / "request.json").write_bytes(written)
    assert requested_step(str(tmp_path)) is None


def test_of_two_that_ask_both_have_what_the_later_one_asked_for(tmp_path: Path) -> None:
    store = str(tmp_path)
    first, second = (request_checkpoint((store,), latest, 0.1) for latest in (7, 9))
    place = tmp_path / checkpoint_name(second)
    place.mkdir()
    manifest = Manifest(run="run", job="job", step=second, written_s=0.0, ranks={})
    (place / MANIFEST).write_bytes(manifest.to_bytes())
    assert [saved_step((store,), first, 7), saved_step((store,), second, 9)] == [second, second]
    assert saved_step((store,), first, second) is None, "it was there before it was asked for"


def test_one_that_could_be_saved_only_later_is_the_one_that_was_asked_for(tmp_path: Path) -> None:
    store = str(tmp_path)
    step = request_checkpoint((store,), 7, 0.1)
    for saved in (step - 1, step + 20):
        place = tmp_path / checkpoint_name(saved)
        place.mkdir()
        manifest = Manifest(run="run", job="job", step=saved, written_s=0.0, ranks={})
        (place / MANIFEST).write_bytes(manifest.to_bytes())
        assert saved_step((store,), step, 7) == (saved if saved > step else None)


def test_one_store_of_several_that_answers_will_do(tmp_path: Path) -> None:
    good, gone = str(tmp_path / "store"), "nothing://bucket/run"
    step = request_checkpoint((good, gone), 7, 0.1)
    assert requested_step(good) == step
    assert saved_step((good, gone), step, 7) is None
    place = tmp_path / "store" / checkpoint_name(step)
    place.mkdir()
    manifest = Manifest(run="run", job="job", step=step, written_s=0.0, ranks={})
    (place / MANIFEST).write_bytes(manifest.to_bytes())
    assert saved_step((gone, good), step, 7) == step
    with pytest.raises(OSError, match="Protocol not known"):
        request_checkpoint((gone, gone), 7, 0.1)
