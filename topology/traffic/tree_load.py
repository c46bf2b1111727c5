"""What is reduced over a plan: how many chunks of which size, and how many of them side by side.

Pure.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from topology.traffic.slow_start import is_rested_slow, unused_s
from topology.world import Link

Hop = tuple[int, int]
"""A directed link, by the indices of its sites."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is reduced."""

    num_chunks: int
    num_abreast: int
    """Chunks that are on a link side by side, at most."""
    chunk_bytes: tuple[float, ...]
    """On the wire, of each tree's chunks; of a gather's, one."""
    first_window_bytes: float | None
    """Of all connections of a link together; None: there is no slow start."""
    abreast_of_links: Mapping[Hop, float] | None = None
    """Chunks that are side by side on each directed link, on the average; None: `num_abreast` on
    all."""

    def abreast_on(self, hop: Hop) -> float:
        """Return how many chunks are side by side on a directed link, if there are that many."""
        return self.num_abreast if self.abreast_of_links is None else self.abreast_of_links[hop]

    @property
    def most_abreast(self) -> int:
        """How many chunks are side by side where they are most, if there are that many."""
        most = max((self.abreast_of_links or {}).values(), default=0.0)
        return min(self.num_chunks, max(self.num_abreast, math.ceil(most)))

    def window_of(self, link: Link) -> float:
        """Return the first window of a link's connections; infinite if they do not start slowly."""
        if self.first_window_bytes is None or not is_rested_slow(link.congestion):
            return math.inf
        return self.first_window_bytes

    def of_gateways(self, count: int) -> Load:
        """Return what it is when so many gateways of each site send it side by side."""
        window_bytes, abreast = self.first_window_bytes, self.abreast_of_links
        return dataclasses.replace(
            self,
            num_abreast=min(count * self.num_abreast, self.num_chunks),
            first_window_bytes=None if window_bytes is None else count * window_bytes,
            abreast_of_links=abreast and {hop: count * each for hop, each in abreast.items()},
        )

    def sending_s(self, link: Link, num_bytes: float) -> float:
        """Return how long the first `num_bytes` take to leave, windows waited for included."""
        waited_s = unused_s(num_bytes, link.bytes_per_s, link.rtt_s, self.window_of(link))
        return num_bytes / link.bytes_per_s + waited_s
