"""The gradient noise scale against gradients whose noise is known, and what it leaves out."""

from __future__ import annotations

import numpy as np
import pytest

from isthmus.orchestrator.core.noise_scale import LEAST_STEPS, NoiseScale
from isthmus.orchestrator.core.run_metrics import RunMetrics
from isthmus.protos import metrics

NUMEL = 2000


def records(
    chance: np.random.Generator, tokens: dict[str, float], noise_scale: float
) -> dict[str, dict[str, float]]:
    """Return what sites measure in a step of a gradient of norm 1 whose noise is of that scale."""
    true = np.full(NUMEL, NUMEL**-0.5)
    own = {
        site: true + chance.standard_normal(NUMEL) * (noise_scale / count / NUMEL) ** 0.5
        for site, count in tokens.items()
    }
    weights = [tokens[site] for site in own]
    mean = np.average([*own.values()], axis=0, weights=weights)
    return {
        site: {
            metrics.SITE_TOKENS: tokens[site],
            metrics.SITE_GRADIENT_NORM: float(np.linalg.norm(gradient)),
            metrics.MEAN_GRADIENT_NORM: float(np.linalg.norm(mean)),
        }
        for site, gradient in own.items()
    }


@pytest.mark.parametrize("noise_scale", [3e2, 1e4])
@pytest.mark.parametrize(
    "tokens",
    [{"a": 1000.0, "b": 1000.0}, {"a": 300.0, "b": 4000.0}, {"a": 500.0, "b": 900.0, "c": 2000.0}],
    ids=["two alike", "two unlike", "three"],
)
@pytest.mark.parametrize("seed", range(3))
def test_it_is_found_whatever_the_sites_parts_of_the_batch(
    tokens: dict[str, float], noise_scale: float, seed: int
) -> None:
    chance, found = np.random.default_rng(seed), NoiseScale()
    members = frozenset(tokens)
    for step in range(1, 301):
        for site, values in records(chance, tokens, noise_scale).items():
            found.add(site, step, values, members)
    assert found.tokens == pytest.approx(noise_scale, rel=0.1), f"{seed=}"


def test_it_follows_what_changes_and_counts_no_site_that_is_not_there() -> None:
    chance, measured = np.random.default_rng(1), RunMetrics(("a", "b", "c"))
    for step in range(1, 401):
        if step == 200:
            measured.count(frozenset({"a", "b"}))
        tokens = {"a": 500.0, "b": 500.0, "c": 1000.0}
        present = tokens if step < 200 else {"a": 500.0, "b": 500.0}
        made = records(chance, present, 1e3 if step < 200 else 4e3)
        if step >= 200:  # it catches up, and trains on nothing
            made["c"] = {**made["a"], metrics.SITE_TOKENS: 0.0}
        for site, values in made.items():
            measured.add(site, metrics.STEP, step, values, {})
        if step == 199:
            assert measured.totals()[metrics.NOISE_SCALE] == pytest.approx(1e3, rel=0.1)
    assert measured.totals()[metrics.NOISE_SCALE] == pytest.approx(4e3, rel=0.15)


def test_without_norms_with_one_site_and_at_first_there_is_none() -> None:
    chance = np.random.default_rng(2)
    for tokens in ({"a": 100.0}, {"a": 100.0, "b": 100.0}):
        found = NoiseScale()
        for step in range(1, 60 if len(tokens) == 1 else LEAST_STEPS):
            for site, values in records(chance, tokens, 1e3).items():
                found.add(site, step, values, frozenset(tokens))
        assert found.tokens is None
    measured = RunMetrics(("a", "b"))
    for step in range(1, 60):
        for site in ("a", "b"):
            measured.add(site, metrics.STEP, step, {metrics.SITE_TOKENS: 5.0}, {})
    assert metrics.NOISE_SCALE not in measured.totals()


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), 0.0, -1.0, 1e200])
def test_a_step_with_a_norm_that_is_none_does_not_count(broken: float) -> None:
    chance, found, tokens = np.random.default_rng(3), NoiseScale(), {"a": 700.0, "b": 800.0}
    for step in range(1, 301):
        for site, values in records(chance, tokens, 1e3).items():
            if site == "b" and step % 3 == 0:
                values[metrics.SITE_GRADIENT_NORM] = broken
            found.add(site, step, values, frozenset(tokens))
    assert found.tokens == pytest.approx(1e3, rel=0.15)


def test_memory_has_a_bound_where_a_site_never_tells() -> None:
    found, chance = NoiseScale(), np.random.default_rng(4)
    values = records(chance, {"a": 1.0, "b": 1.0}, 1.0)["a"]
    for step in range(1, 2000):
        found.add("a", step, values, frozenset({"a", "b"}))
    assert len(found._open) <= 256
