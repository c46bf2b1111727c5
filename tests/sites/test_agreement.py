"""What each site tells all others, where one of them is lost meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
import torch

from isthmus.sites.worker.exchange.agreement import tell_all
from isthmus.sites.worker.exchange.bucket_pipeline import BucketPipeline
from isthmus.sites.worker.exchange.rounds import RoundTerms


class Averages:
    """Averages with a second site, which tells as many zeros as this one, and may be lost."""

    def __init__(self, lost_in: int) -> None:
        self._lost_in = lost_in
        self._round = -1

    def begin(self, tokens: float, _: RoundTerms) -> None:
        assert tokens == 1.0
        self._round += 1

    def submit(
        self, pieces: Sequence[torch.Tensor], _: int, *, exact: bool
    ) -> torch.futures.Future[torch.Tensor]:
        assert exact
        [means] = pieces
        if self._round < self._lost_in:
            means[1] = 1.0
            if self._round == 0:
                means[4:6] = means[2:4]  # the length
            means /= 2
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(means)
        return future

    def wait(self) -> None:
        pass


@pytest.mark.parametrize(("lost_in", "told"), [(0, b""), (1, b""), (2, bytes(3))])
def test_a_site_that_is_lost_has_told_nothing(lost_in: int, told: bytes) -> None:
    pipeline = cast("BucketPipeline", Averages(lost_in))
    device = torch.device("cpu")
    found = tell_all(pipeline, b"abc", site=0, num_sites=2, rank=0, device=device)
    assert found == [b"abc", told]
