"""Fixtures of the data plane's tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from isthmus.sites.worker.api.site import Site
    from tests.fakes.lone_exchanges import RecordingLink

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


@pytest.fixture(autouse=True)
def no_watchers_of_others() -> Iterator[None]:
    """Forget what was attached in this process, and has not left."""
    yield
    if passes := sys.modules.get("isthmus.sites.worker.checks.backward_passes"):
        passes._watchers.clear()


@pytest.fixture
def link() -> RecordingLink:
    """What stands for the gateway of `site`."""
    from tests.fakes.lone_exchanges import RecordingLink

    return RecordingLink()


@pytest.fixture
def site(process_group: None, link: RecordingLink) -> Iterator[Site]:
    """A site of one rank, alone; it leaves at the end."""
    from tests.fakes.lone_sites import lone_site

    made = lone_site(link)
    yield made
    made.leave()
