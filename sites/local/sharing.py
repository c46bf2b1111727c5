"""Which ranks share a bucket. Without numpy, which agents do not need. Pure."""

from __future__ import annotations

Sharing = tuple[int | tuple[int, ...], ...]
"""The ranks that share a bucket, by site: a number (the first ranks), or ranks in ascending
order."""


def sharing_of(
    participants: tuple[tuple[int, ...], ...], ranks_per_site: tuple[int, ...]
) -> Sharing:
    """Return the ranks that share a bucket; a site without `participants` means all its ranks.

    Raises:
        ValueError: a rank does not exist.
    """
    if not participants:
        return ranks_per_site
    if len(participants) != len(ranks_per_site):
        raise ValueError(f"of {len(participants)} sites; there are {len(ranks_per_site)}")
    for ranks, most in zip(participants, ranks_per_site, strict=True):
        if list(ranks) != sorted(set(ranks)) or (ranks and ranks[-1] >= most):
            raise ValueError(f"{ranks} of {most} ranks")
    return tuple(ranks or most for ranks, most in zip(participants, ranks_per_site, strict=True))
