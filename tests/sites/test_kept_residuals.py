"""The residuals of a rank's shards come back as they were, and to the same chunks only."""

from pathlib import Path

import numpy as np
import pytest

from isthmus.protos.errors import LocalProtocolError
from isthmus.protos.frame import Kind
from isthmus.sites.codecs.registry import codec_named
from isthmus.sites.gateway.reduction.kept_residuals import read_residuals, write_residuals
from isthmus.sites.gateway.reduction.residuals import Residuals

CODEC = codec_named("int8")
VALUES = np.linspace(-1.0, 3.0, 300, dtype=np.float32)


def encoded(residuals: Residuals, chunk: int) -> bytes:
    """Return what crosses of one chunk of bucket 5."""
    bucket = residuals.bucket(5, layout=7, numel=900)
    return bytes(bucket.encode(chunk, Kind.CONTRIBUTION, CODEC, VALUES).payload)


def test_a_resumed_encoder_goes_on_as_the_first_would(tmp_path: Path) -> None:
    first = Residuals()
    for chunk in (0, 1, 1, 2):
        encoded(first, chunk)
    path = tmp_path / "own" / "a" / "0.residuals.npz"
    write_residuals(path, first.kept(lambda numel, _: range(1, numel // 300)), chunk_numel=300)
    assert [each.name for each in path.parent.iterdir()] == [path.name]

    resumed = Residuals()
    resumed.restore(read_residuals(path, chunk_numel=300))
    assert encoded(resumed, 0) == encoded(Residuals(), 0), "of another rank: not kept"
    assert encoded(resumed, 1) == encoded(first, 1) != encoded(Residuals(), 1)
    assert encoded(resumed, 2) == encoded(first, 2)


def test_another_grid_forgets_all(tmp_path: Path) -> None:
    residuals = Residuals()
    encoded(residuals, 0)
    write_residuals(tmp_path / "residuals", residuals.kept(lambda *_: range(3)), chunk_numel=300)
    assert read_residuals(tmp_path / "residuals", chunk_numel=256) == {}


def test_what_is_no_file_of_residuals_is_refused(tmp_path: Path) -> None:
    (tmp_path / "residuals").write_bytes(b"something else")
    for path in (tmp_path / "residuals", tmp_path / "nowhere"):
        with pytest.raises(LocalProtocolError, match="these are no residuals"):
            read_residuals(path, chunk_numel=300)
