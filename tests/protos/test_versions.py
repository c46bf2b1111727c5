"""Two builds agree on the highest version that both speak, or on none."""

import pytest

from isthmus.protos.versions import negotiate


@pytest.mark.parametrize(
    ("ours", "theirs", "agreed"),
    [((1, 1), (1, 1), 1), ((1, 3), (2, 5), 3), ((2, 5), (1, 3), 3), ((1, 1), (2, 3), None)],
)
def test_negotiation(ours: tuple[int, int], theirs: tuple[int, int], agreed: int | None) -> None:
    assert negotiate(ours, theirs) == agreed
