"""What a script sets for all of torch, and what it copies, changes no bit of what is learnt."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from tests.conformance.case import REGIMES, Kind, Way
from tests.conformance.pool import ORACLE, End, Pool
from tests.conformance.registry import CASES

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.no_cover]

SCRIPTS = ("default_dtype", "default_device", "calls_in_inference_mode", "copies_of_the_model")
QUICK = {("delayed", "ddp", 1), ("diloco", "lone", 1), ("diloco", "ddp", 2)}


def ends_of(
    pool: Pool, folder: Path, script: str, regime: Kind, way: Way, num_ranks: int
) -> dict[str, End]:
    """Return how all ranks end of two sites with so many ranks."""
    case = dataclasses.replace(CASES[script], ranks=(num_ranks, num_ranks))
    (folder / script).mkdir()
    ends = pool.run(case, way, folder / script, regime)
    del ends[ORACLE]  # which trains otherwise: here sites take steps of their own
    assert not any(each.error for each in ends.values()), ends
    return ends


def _parameters() -> list[object]:
    return [
        pytest.param(
            regime,
            way,
            num_ranks,
            marks=[] if (regime, way, num_ranks) in QUICK else [pytest.mark.exhaustive],
            id=f"{regime}-{way}-{num_ranks}",
        )
        for regime in REGIMES
        for way, num_ranks in (("ddp", 1), ("ddp", 2), ("lone", 1), ("fsdp2", 2))
    ]


@pytest.mark.parametrize(("regime", "way", "num_ranks"), _parameters())
def test_it_learns_the_same_bits(
    pool: Pool, tmp_path: Path, regime: Kind, way: Way, num_ranks: int
) -> None:
    plain = ends_of(pool, tmp_path, "nothing_set", regime, way, num_ranks)
    for script in SCRIPTS:
        if way not in CASES[script].ways:
            continue
        for rank, end in ends_of(pool, tmp_path, script, regime, way, num_ranks).items():
            for name, expected in plain[rank].learnt.items():
                assert torch.equal(end.learnt[name], expected), (script, rank, name)
            assert end.losses == plain[rank].losses, (script, rank)
