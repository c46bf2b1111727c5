"""Frameworks with loops of their own: two sites train what the framework alone would."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.fakes.gateways import FakeGateways
from tests.fakes.ranks import Program, results, run_ranks
from tests.fakes.two_sites import bits
from tests.sites import framework_programs as programs
from tests.sites import titan_programs as titan

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.exhaustive]


def learnt(folder: Path, program: Program, ranks_per_site: tuple[int, ...]) -> list[torch.Tensor]:
    """Run a program in all ranks; return what each has learnt."""
    folder.mkdir()
    with FakeGateways(folder, ranks_per_site, verify_every=1) as gateways:
        paths = [gateways.path(site) for site in range(len(ranks_per_site))]
        codes = run_ranks(folder, paths, ranks_per_site, program)
    assert set(codes.values()) == {0}
    assert gateways.problems == []
    return [each["learnt"] for each in results(folder).values()]


@pytest.mark.parametrize(
    ("library", "together", "alone"),
    [
        ("transformers", programs.transformers_together, programs.transformers_alone),
        ("accelerate", programs.accelerate_together, programs.plain_alone),
        ("lightning", programs.fabric_together, programs.plain_alone),
        ("lightning", programs.lightning_together, programs.plain_alone),
        ("torch", programs.compiled_together, programs.plain_alone),
        ("torch", programs.scaled_together, programs.plain_alone),
        ("torch", programs.adversaries_together, programs.adversaries_alone),
    ],
    ids=["trainer", "accelerate", "fabric", "lightning", "compiled", "scaled", "adversaries"],
)
def test_two_sites_learn_what_one_process_does(
    tmp_path: Path, library: str, together: Program, alone: Program
) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install isthmus[transformers,lightning]")
    [expected] = learnt(tmp_path / "alone", alone, (1,))
    found = learnt(tmp_path / "together", together, programs.RANKS_PER_SITE)
    assert len(found) == programs.NUM_RANKS
    assert all(bits(each) == bits(found[0]) for each in found)
    torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-6)


def test_torchtitan_learns_the_same_at_two_sites_as_at_one(tmp_path: Path) -> None:
    if importlib.util.find_spec("torchtitan") is None:
        pytest.skip("torchtitan is not installed: pip install isthmus[torchtitan]")
    expected = learnt(tmp_path / "alone", titan.torchtitan_alone, (programs.NUM_RANKS,))
    found = learnt(tmp_path / "together", titan.torchtitan_together, programs.RANKS_PER_SITE)
    assert all(torch.equal(each, found[0]) for each in found)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
