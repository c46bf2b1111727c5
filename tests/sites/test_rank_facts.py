"""What may slow a rank, as this machine and its GPU's driver tell it."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from isthmus.protos import metrics
from isthmus.sites.worker.api.rank_facts import Gpu, RankFacts


def test_shares_are_of_the_time_since_before() -> None:
    clock = iter([0.0, 1.0, 2.0])
    facts = RankFacts(torch.device("cpu"), lambda: next(clock))
    first, labels = facts()
    assert not first  # nothing to compare with
    second, _ = facts()
    assert set(second) <= {metrics.RUN_QUEUE, metrics.THROTTLED, metrics.STEAL}
    assert second
    assert all(0.0 <= share <= 1.0 for share in second.values())
    assert labels[metrics.HOST]
    assert metrics.SLOWDOWN not in labels


class FakeDriver:
    """The calls of libnvidia-ml that are made; ctypes' references are written to."""

    def __init__(self, megahertz: int, reasons: int, *, fails: bool = False) -> None:
        self._megahertz, self._reasons, self._fails = megahertz, reasons, fails

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: int, result: Any) -> int:  # noqa: ANN401, N802
        result._obj.value = self._megahertz
        return int(self._fails)

    def nvmlDeviceGetCurrentClocksThrottleReasons(  # noqa: N802
        self,
        handle: Any,  # noqa: ANN401
        result: Any,  # noqa: ANN401
    ) -> int:
        result._obj.value = self._reasons
        return int(self._fails)


@pytest.mark.parametrize(
    ("reasons", "words"),
    [
        (0x00, ""),
        (0x01, ""),  # idle
        (0x04, "power cap"),
        (0x24, "thermal slowdown"),
        (0x48, "thermal slowdown by hardware"),
    ],
)
def test_the_gpus_clock_and_why_it_is_slow(reasons: int, words: str) -> None:
    driver: Any = FakeDriver(1200, reasons)
    gpu = Gpu(driver, ctypes.c_void_p())
    assert gpu.clock_hz() == 1.2e9
    assert gpu.slowdown() == words


def test_a_driver_that_does_not_tell() -> None:
    driver: Any = FakeDriver(1200, 0x04, fails=True)
    gpu = Gpu(driver, ctypes.c_void_p())
    assert gpu.clock_hz() is None
    assert gpu.slowdown() == ""
    assert Gpu.of(torch.device("cpu")) is None
