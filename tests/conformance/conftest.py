"""The processes that cases share."""

from collections.abc import Iterator

import pytest

from tests.conformance.pool import Pool


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(tmp_path_factory.mktemp("pool")) as made:
        yield made
