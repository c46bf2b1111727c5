"""The `regime` section of a job: defaults by kind, its spec, the outer optimizer's rates."""

import pytest

from isthmus.topology.documents.load import load_job
from isthmus.topology.spec.hashing import config_hash
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.regime import (
    KINDS,
    OuterOptimizer,
    Regime,
    outer_lr,
    regime_of,
)
from isthmus.topology.spec.run_spec import RunSpec
from tests.fakes.run_specs import spec_of
from tests.fakes.worlds import JOB, topology


def job(written: str = "", *overrides: str) -> Job:
    return load_job(JOB + written, "job.yaml", overrides)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("", Regime()),
        ("regime: sync\n", Regime()),
        ("regime: {kind: sync}\n", Regime()),
        ("regime: delayed\n", Regime(kind="delayed")),
        ("regime: {kind: delayed, look: false}\n", Regime(kind="delayed", look=False)),
        ("regime: local_sgd\n", Regime(kind="local_sgd", sync_every=30)),
        ("regime: diloco\n", Regime(kind="diloco", sync_every=30)),
        (
            "regime: {kind: diloco, sync_every: 10, outer: {lr: 0.4, momentum: 0, ramp_steps: 0}}\n",
            Regime(
                kind="diloco",
                sync_every=10,
                outer=OuterOptimizer(lr=0.4, momentum=0.0, ramp_steps=0),
            ),
        ),
        (
            "regime: {kind: diloco, outer: {lr: auto}}\n",
            Regime(kind="diloco", sync_every=30, outer=OuterOptimizer()),
        ),
    ],
)
def test_a_section_says_what_its_kind_leaves_open(written: str, expected: Regime) -> None:
    assert job(written).regime == expected


def test_an_override_sets_a_kind_or_one_key_of_a_section() -> None:
    assert job("", "regime.kind=delayed") == job("regime: delayed\n")
    assert job("", "regime=diloco", "name=other").regime.kind == "diloco"
    assert job("regime: diloco\n", "regime=sync") == job()
    shorter = job("regime: {kind: diloco}\n", "regime.sync_every=10", "regime.outer.lr=0.4")
    assert (shorter.regime.sync_every, shorter.regime.outer.lr) == (10, 0.4)


def test_streaming_has_the_most_fragments_that_divide_its_round() -> None:
    chosen = {period: regime_of("streaming", sync_every=period) for period in (1, 2, 7, 30, 31, 64)}
    assert {period: each.fragments for period, each in chosen.items()} == {
        1: 1, 2: 2, 7: 7, 30: 6, 31: 1, 64: 8
    }  # fmt: skip
    assert {period: each.delay for period, each in chosen.items()} == {
        1: 0, 2: 0, 7: 0, 30: 2, 31: 2, 64: 2
    }  # fmt: skip
    assert {each.alpha for each in chosen.values()} == {0.5}
    given = regime_of("streaming", sync_every=30, fragments=3, delay=0, alpha=0.0)
    assert (given.fragments, given.delay, given.alpha) == (3, 0, 0.0)


def test_a_fragment_is_sent_and_lands_before_the_next_one() -> None:
    regime = regime_of("streaming", sync_every=6, fragments=3, delay=1)
    steps = range(1, 13)
    assert [regime.fragment_sent_at(each) for each in steps] == [
        None, 0, None, 1, None, 2, None, 0, None, 1, None, 2
    ]  # fmt: skip
    assert [each for each in steps if regime.lands_at(each)] == [3, 5, 7, 9, 11]
    assert [each for each in steps if regime.meets_at(each)] == [6, 12]
    at_once = regime_of("streaming", sync_every=4, fragments=2, delay=0)
    assert [each for each in steps if at_once.lands_at(each)] == [2, 4, 6, 8, 10, 12]
    for kind in ("local_sgd", "diloco"):
        regime = regime_of(kind, sync_every=4)
        assert [each for each in steps if regime.lands_at(each)] == [4, 8, 12]
        assert [each for each in steps if regime.meets_at(each)] == [4, 8, 12]


def test_kinds_differ_in_whether_sites_take_steps_of_their_own() -> None:
    regimes = [regime_of(kind) for kind in KINDS]
    assert [each.is_sync for each in regimes] == [True, False, False, False, False]
    assert [each.is_local for each in regimes] == [False, False, True, True, True]
    assert [each.sync_every for each in regimes] == [1, 1, 30, 30, 30]


def test_a_spec_carries_a_regime() -> None:
    for kind in KINDS:
        one = spec_of(job(f"regime: {kind}\n"), topology(2))
        assert RunSpec.from_bytes(one.to_bytes()) == one


def test_a_regime_counts_in_the_hash_and_sync_is_the_default() -> None:
    plain = job()
    assert job("regime: sync\n") == plain
    assert config_hash(plain, topology(2)) != config_hash(job("regime: delayed\n"), topology(2))


@pytest.mark.parametrize(
    ("num_sites", "sync_every", "lr"),
    [
        (2, 1, 0.4), (2, 10, 0.4), (3, 10, 0.5), (8, 10, 0.6), (2, 11, 0.6), (4, 50, 0.6),
        (2, 51, 0.7), (7, 200, 0.7), (2, 201, 0.8), (8, 30, 0.7), (16, 500, 0.9),
    ],
)  # fmt: skip
def test_the_outer_learning_rate_grows_with_the_round_and_the_sites(
    num_sites: int, sync_every: int, lr: float
) -> None:
    assert outer_lr(num_sites, sync_every) == lr


def test_rounds_begin_as_plain_averaging_and_end_with_the_outer_optimizer() -> None:
    diloco = regime_of("diloco", outer=OuterOptimizer(lr=0.5, momentum=0.75, ramp_steps=300))
    assert diloco.outer_rates(0, 2) == (1.0, 0.0)
    assert diloco.outer_rates(150, 2) == (0.75, 0.375)
    assert diloco.outer_rates(300, 2) == diloco.outer_rates(9000, 2) == (0.5, 0.75)
    at_once = regime_of("diloco", outer=OuterOptimizer(ramp_steps=0))
    assert at_once.outer_rates(0, 8) == (outer_lr(8, 30), 0.9)


def test_local_sgd_is_plain_averaging() -> None:
    one = regime_of("local_sgd")
    assert {one.outer_rates(step, sites) for step in (0, 30, 300) for sites in (2, 8)} == {
        (1.0, 0.0)
    }
