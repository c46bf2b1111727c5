"""What becomes of the global batch with fewer ranks."""

import pytest

from isthmus.topology.spec.batch_rule import RATES, Batch, FullBatch, batch_with


@pytest.mark.parametrize(
    ("ranks", "rule", "expected"),
    [
        (8, "shrink", Batch(48, 1.0)),
        (9, "shrink", Batch(48, 1.0)),
        (4, "shrink", Batch(24, 0.5)),
        (5, "shrink", Batch(30, 0.625)),
        (1, "shrink", Batch(6, 0.125)),
        (1, "keep", Batch(48, 1.0)),
    ],
)
def test_the_batch_stays_or_shrinks_with_the_ranks(ranks: int, rule: str, expected: Batch) -> None:
    assert batch_with(FullBatch(48, 8), ranks, rule) == expected


@pytest.mark.parametrize(
    ("rate", "scale"), [("linear", 0.25), ("sqrt", 0.5), ("none", 1.0)], ids=RATES
)
def test_the_learning_rate_follows_the_batch_as_the_job_says(rate: str, scale: float) -> None:
    full = FullBatch(48, 8)
    assert batch_with(full, 2, "shrink", rate) == Batch(12, scale)
    assert batch_with(full, 2, "keep", rate) == Batch(48, 1.0)
    assert batch_with(full, 8, "shrink", rate) == Batch(48, 1.0)


def test_each_rank_keeps_a_sample() -> None:
    assert batch_with(FullBatch(8, 8), 3, "shrink") == Batch(3, 0.375)
