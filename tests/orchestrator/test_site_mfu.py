"""The MFU of a site, from what it was measured at and what the topology says of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isthmus.orchestrator.evidence.report.site_mfu import Mfu, site_mfu
from isthmus.topology.spec.job import Job, Model, Trainer
from isthmus.topology.spec.world import Topology
from tests.fakes.worlds import topology

MODEL = Model(layers=2, heads=2, width=8, context=16)
FLOPS_PER_TOKEN = 6 * (2 * (12 * 8 * 8 + 4 * 8) + 2 * 8 + 256 * 8) + 12 * 2 * 8 * 16
"""By hand: 6 for each number that a token is multiplied by, and attention's scores and sums."""
PEAK_FLOPS_PER_S = 50e9


def job(entrypoint: str | None = None) -> Job:
    trainer = Trainer(model=MODEL, global_batch=8)
    return Job(name="j", topology="t.yaml", entrypoint=entrypoint, trainer=trainer)


def alone() -> Topology:
    two = topology()
    return replace(two, sites=two.sites[:1], links=())


def test_tokens_a_second_are_a_share_of_the_peak_of_all_ranks() -> None:
    rate = 0.4 * 2 * PEAK_FLOPS_PER_S / FLOPS_PER_TOKEN
    found = site_mfu(job(), topology(ranks=2), {"a": rate, "b": rate / 2})
    assert found["a"].measured == pytest.approx(0.4)
    assert found["b"].measured == pytest.approx(0.2)


def test_what_was_not_measured_has_a_planned_one_only() -> None:
    found = site_mfu(job(), topology(), {})
    assert [each.measured for each in found.values()] == [None, None]
    for each in found.values():  # the topology says that a pass reaches 0.3; the exchange adds
        assert each.planned is not None
        assert 0.0 < each.planned < 0.3


def test_a_site_alone_has_a_measured_one_only() -> None:
    rate = 0.25 * PEAK_FLOPS_PER_S / FLOPS_PER_TOKEN
    found = site_mfu(job(), alone(), {"a": rate})
    assert found["a"].measured == pytest.approx(0.25)
    assert found["a"].planned is None


def test_where_nobody_knows_what_a_script_trains_no_site_has_one() -> None:
    assert site_mfu(job(entrypoint="train.py"), topology(), {"a": 1e6}) == {}
    assert site_mfu(job(), alone(), {"elsewhere": 1e6}) == {"a": Mfu(None, None)}
