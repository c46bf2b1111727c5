"""Versions of the contracts in this build, and their negotiation."""

import functools
from importlib import metadata

CONTROL_PROTOCOL_MIN = 5
CONTROL_PROTOCOL_MAX = 5
EXCHANGE_PROTOCOL_MIN = 7
EXCHANGE_PROTOCOL_MAX = 7


@functools.cache
def build() -> str:
    """Return the distribution's version, for messages to people."""
    try:
        return metadata.version("isthmus")
    except metadata.PackageNotFoundError:
        return "unknown"


def negotiate(ours: tuple[int, int], theirs: tuple[int, int]) -> int | None:
    """Return the highest version in both ranges (min, max); None: they do not overlap."""
    version = min(ours[1], theirs[1])
    return version if version >= max(ours[0], theirs[0]) else None
