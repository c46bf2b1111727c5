import itertools
import math

import pytest

from isthmus.sites.trainer.learning import learning_rate
from isthmus.topology.spec.job import Optimizer

OPTIMIZER = Optimizer(learning_rate=1.0, min_learning_rate=0.1, warmup_steps=4)


def test_it_warms_up_peaks_and_decays_to_the_minimum() -> None:
    rates = [learning_rate(OPTIMIZER, step, 14) for step in range(14)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[3:]))
    assert rates[-1] == pytest.approx(0.1, rel=1e-12)
    # Halfway down the cosine: the mean of peak and minimum.
    assert rates[3 + 5] == pytest.approx(0.55, rel=1e-12)


@pytest.mark.parametrize("warmup_steps", [0, 1])
def test_without_a_warm_up_it_starts_at_the_peak(warmup_steps: int) -> None:
    optimizer = Optimizer(learning_rate=1.0, min_learning_rate=0.1, warmup_steps=warmup_steps)
    assert learning_rate(optimizer, 0, 10) == 1.0
    assert learning_rate(optimizer, 9, 10) == pytest.approx(0.1, rel=1e-12)


@pytest.mark.parametrize("steps", [1, 2, 4, 5])
def test_short_runs_have_finite_rates_within_bounds(steps: int) -> None:
    for step in range(steps):
        rate = learning_rate(OPTIMIZER, step, steps)
        assert math.isfinite(rate)
        assert 0 < rate <= 1.0
