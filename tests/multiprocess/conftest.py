"""Fixtures for tests that start a whole run."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.multiprocess.harness import INSECURE, Bench, bench


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    """A bench whose processes are gone after the test, whatever happened.

    Its parameter is the security of its topologies: `UNDER_BOTH_SECURITIES`.
    """
    with bench(tmp_path, getattr(request, "param", INSECURE)) as made:
        yield made
