"""The regime `delayed` at two sites: as one process does it, whatever the sites' layouts."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from isthmus.protos.checkpoint.store import checkpoint_name
from tests.fakes.two_sites import check_digests, run
from tests.sites import layout_programs as programs
from tests.sites import test_sharded_checkpoints as checkpoints
from tests.sites.test_worker_layouts import write_plan

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

NUM_STEPS = 6
QUICK = [("ddp", "fsdp2", True), ("ddp", "ddp", False)]
LAYOUTS = ["fsdp3", "tp", "hsdp", "ep", "pp", "ddp", "lone", "lone-tp", "lone-pp"]
CASES = [
    *QUICK,
    *(
        pytest.param(*pair, True, marks=pytest.mark.exhaustive)
        for pair in itertools.combinations(LAYOUTS, 2)
    ),
]


@pytest.mark.parametrize(("first", "second", "looks"), CASES)
def test_two_layouts_train_as_one_process_does_a_step_late(
    tmp_path: Path, first: str, second: str, *, looks: bool
) -> None:
    """Losses and norms are those of the oracle; parameters are the same at all ranks."""
    layouts = [first, second]
    write_plan(tmp_path, (first, second), NUM_STEPS)
    ranks = [programs.RANKS[each] for each in layouts]
    job = ["exchange.bucket=64KiB", "regime.kind=delayed", f"regime.look={looks}"]
    saved, gateways = run(tmp_path, programs.train, ranks, job=job)
    check_digests([each[2] for each in gateways.digests], NUM_STEPS, sum(ranks))
    wanted, norms = programs.reference_delayed(layouts, NUM_STEPS, looks=looks)
    place = 0
    for each in saved.values():
        assert each["norms"] == pytest.approx(norms, rel=1e-4)
        assert each["norms"] == saved["site0-rank0"]["norms"], "the same bits"
    for site, layout in enumerate(layouts):
        for at in range(programs.DATA_RANKS[layout]):
            of_rank = [
                each["losses"]
                for name, each in saved.items()
                if name.startswith(f"site{site}-") and each["place"] == at
            ]
            found = [*map(sum, zip(*of_rank, strict=True))]
            copies = 2 if layout.startswith(("tp", "lone-")) else 1
            assert found == pytest.approx([each[place] * copies for each in wanted], rel=1e-4)
            place += 1


@pytest.mark.parametrize(
    "layouts",
    [
        ("lone", "fsdp2"),
        pytest.param(("ddp", "fsdp2"), marks=pytest.mark.exhaustive),
        pytest.param(("pp",), marks=pytest.mark.exhaustive),
        pytest.param(("ep", "hsdp"), marks=pytest.mark.exhaustive),
        pytest.param(("tp", "lone"), marks=pytest.mark.exhaustive),
    ],
    ids="-".join,
)
def test_a_delayed_run_goes_on_with_the_same_bits(tmp_path: Path, layouts: tuple[str, ...]) -> None:
    """The gradient that was to be applied next is saved; scripts destroy their process groups."""
    more = ["regime.kind=delayed"]
    whole = checkpoints.run(tmp_path / "whole", layouts, is_noisy=True, more=more)
    resume = whole / checkpoint_name(checkpoints.SAVED)
    resumed = checkpoints.run(
        tmp_path / "resumed", layouts, resume=resume, is_noisy=True, is_destroyed=True, more=more
    )
    expected, found = checkpoints.final(whole), checkpoints.final(resumed)
    assert found.keys() == expected.keys()
    different = [name for name, each in found.items() if not torch.equal(each, expected[name])]
    assert not different


@pytest.mark.exhaustive
@pytest.mark.parametrize(("before", "after"), [("delayed", "sync"), ("sync", "delayed")])
def test_another_regime_goes_on(tmp_path: Path, before: str, after: str) -> None:
    """A gradient that is not applied is dropped; where there is none, the first step has none."""
    layouts = ("tp", "lone")
    whole = checkpoints.run(tmp_path / "whole", layouts, more=[f"regime.kind={before}"])
    resume = whole / checkpoint_name(checkpoints.SAVED)
    other = checkpoints.run(
        tmp_path / "other", layouts, resume=resume, more=[f"regime.kind={after}"]
    )
    assert checkpoints.final(other).keys() == checkpoints.final(whole).keys()
