"""Sites with different layouts train one model: as one process does, and bit-identical."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from tests.fakes.gateways import FakeGateways
from tests.fakes.ranks import results, run_ranks
from tests.sites import layout_programs as programs

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

LAYOUTS = ["fsdp3", "tp", "hsdp", "ep"]
DEFAULT = {("fsdp3", "tp")}
PAIRS = [
    pytest.param(pair, marks=[] if pair in DEFAULT else [pytest.mark.exhaustive], id="-".join(pair))
    for pair in itertools.combinations_with_replacement(LAYOUTS, 2)
]


def run(folder: Path, layouts: tuple[str, ...], num_steps: int) -> FakeGateways:
    """Train with these layouts; every rank ends well."""
    plan = {"layouts": layouts, "num_steps": num_steps}
    (folder / "layouts.json").write_text(json.dumps(plan))
    ranks = [programs.RANKS[each] for each in layouts]
    job = ["exchange.bucket=64KiB"]
    with FakeGateways(folder, ranks, verify_every=1) as gateways:
        paths = [gateways.path(site) for site in range(len(ranks))]
        codes = run_ranks(folder, paths, ranks, programs.train, job)
    assert set(codes.values()) == {0}
    assert gateways.problems == []
    return gateways


@pytest.mark.parametrize("layouts", PAIRS)
def test_two_layouts_train_as_one_process(tmp_path: Path, layouts: tuple[str, str]) -> None:
    num_steps = 6 if layouts in DEFAULT else 30
    gateways = run(tmp_path, layouts, num_steps)
    wanted = programs.reference([*layouts], num_steps)
    first = 0
    saved = results(tmp_path)
    for site, layout in enumerate(layouts):
        for place in range(programs.DATA_RANKS[layout]):
            ranks = [
                each["losses"]
                for name, each in saved.items()
                if name.startswith(f"site{site}-") and each["place"] == place
            ]
            found = [*map(sum, zip(*ranks, strict=True))]
            copies = 2 if layout == "tp" else 1
            losses = [each[first + place] * copies for each in wanted]
            assert found == pytest.approx(losses, rel=1e-5), (layout, place)
        first += programs.DATA_RANKS[layout]
    by_step: dict[int, list[int]] = {}
    for _, _, digest in gateways.digests:
        by_step.setdefault(digest["step"], []).append(digest["combined"])
    assert sorted(by_step) == [*range(num_steps + 1)]
    for step, each in by_step.items():
        assert len(each) == sum(programs.RANKS[layout] for layout in layouts)
        assert len(set(each)) == 1, f"digests of step {step} differ"
