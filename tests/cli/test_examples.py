"""The examples are valid, and their script runs by itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Isthmus

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "two_sites"


def test_its_files_are_valid(isthmus: Isthmus) -> None:
    result = isthmus("validate", *FOLDER.glob("*.yaml"))
    assert result.code == 0, result.err


@pytest.mark.exhaustive
@pytest.mark.slow
def test_its_script_learns_without_isthmus() -> None:
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    losses = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines()]
    assert losses[-1] < losses[0]
