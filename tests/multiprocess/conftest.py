"""Fixtures for tests that start a whole run."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.multiprocess.harness import Bench, bench


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Bench]:
    """A bench whose processes are gone after the test, whatever happened."""
    with bench(tmp_path) as made:
        yield made
