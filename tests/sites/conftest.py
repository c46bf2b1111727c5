"""Fixtures of the data plane's tests."""

from collections.abc import Iterator

import pytest

LONG_S = 30.0


@pytest.fixture
def process_group() -> Iterator[None]:
    """This process as the only rank."""
    import torch  # takes seconds, and most tests here go without
    import torch.distributed as dist

    from isthmus.sites.worker.exchange.collectives import ensure_process_group

    ensure_process_group(torch.device("cpu"), LONG_S)
    yield
    dist.destroy_process_group()
