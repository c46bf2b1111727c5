"""What becomes of the global batch with fewer ranks."""

import pytest

from isthmus.topology.spec.batch_rule import Batch, FullBatch, batch_with


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


def test_each_rank_keeps_a_sample() -> None:
    assert batch_with(FullBatch(8, 8), 3, "shrink") == Batch(3, 0.375)
