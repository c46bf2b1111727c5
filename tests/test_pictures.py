"""The pictures of dashboard and report in docs/ show what these say today."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tools.pictures import DIGEST, FOLDER, dashboard_words, digest, report_words


@pytest.mark.parametrize(
    ("name", "made"), [("dashboard", dashboard_words), ("report", report_words)]
)
def test_a_picture_shows_the_words_of_today(
    tmp_path: Path, name: str, made: Callable[[Path], str]
) -> None:
    picture = (FOLDER / f"{name}.png").read_bytes()
    assert len(picture) < 100_000
    kept = re.search(rb"tEXt" + DIGEST.encode() + rb"\0([0-9a-f]{16})", picture)
    assert kept is not None
    told = "the picture has aged: take it anew by `python -m tests.tools.pictures`"
    assert kept[1].decode() == digest(made(tmp_path)), told
