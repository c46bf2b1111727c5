"""A checkpoint out of turn is asked for so far ahead that every rank has looked by then."""

from pathlib import Path

import pytest

from protos.checkpoint.requests import (
    is_written,
    look_every_s,
    request_checkpoint,
    requested_step,
)


@pytest.mark.parametrize(("step_s", "ahead"), [(0.1, 50), (60.0, 1), (0.0, 5000)])
def test_the_step_is_two_looks_and_what_is_told_late_ahead(
    tmp_path: Path, step_s: float, ahead: int
) -> None:
    store = str(tmp_path / "store")
    assert requested_step(store) is None
    step = request_checkpoint(store, 7, step_s)
    assert step == 7 + 2 + ahead
    assert requested_step(store) == step
    assert not is_written(store, step)
    assert look_every_s("s3://bucket/run") > look_every_s(store)


@pytest.mark.parametrize("written", [b"", b"{}", b'{"step": "7"}', b"[]"])
def test_what_is_no_request_asks_for_nothing(tmp_path: Path, written: bytes) -> None:
    (tmp_path / "request.json").write_bytes(written)
    assert requested_step(str(tmp_path)) is None
