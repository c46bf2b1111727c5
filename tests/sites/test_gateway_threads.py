"""How many threads for arithmetic a gateway has."""

from __future__ import annotations

import pytest

from isthmus.sites.gateway.gateway import num_pool_threads


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (3, 2), (8, 7), (9, 8), (64, 8)])
def test_one_core_is_left_for_the_sockets(cores: int, threads: int) -> None:
    assert num_pool_threads(cores) == threads
