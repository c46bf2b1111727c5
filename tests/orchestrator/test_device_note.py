"""A site whose ranks compute on another device than the topology says: noted in the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.protos import metrics
from isthmus.protos.control.v1 import control_pb2 as pb
from tests.fakes.coordinators import active, coordinating

pytestmark = pytest.mark.slow


async def test_the_run_says_so_with_site_accelerator_and_device(tmp_path: Path) -> None:
    async with coordinating(tmp_path) as bench:
        a, _ = await active(bench, "a", "b")
        labels = {metrics.FOUND: "a CPU"}
        metric = pb.Metric(kind=metrics.DEVICE_DIFFERS, rank=0, step=0, labels=labels)
        await a.say(metrics=pb.MetricBatch(metrics=[metric]))
        run = await bench.until(lambda run: bool(run.notes))
        assert run.notes[0].startswith("ranks of site a compute on a CPU")
        assert "the topology says core" in run.notes[0]
