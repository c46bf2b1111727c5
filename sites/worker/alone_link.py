"""The link of a single site: there is nobody to reduce with, so only the division is left."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from protos.errors import IsthmusError
from sites.worker.link import Reduce, Reduced
from sites.worker.region import map_region
from sites.worker.transfer import padded_shape


class AloneLink:
    """Divides a shard by the site's tokens where it lies. A `Link`; metrics go nowhere."""

    def __init__(self, world_size: int = 1) -> None:
        """Hold nothing yet.

        Args:
            world_size: ranks of the site.
        """
        self._world_size = world_size
        self._regions: dict[int, npt.NDArray[np.float32]] = {}
        self._on_reduced: Callable[[Reduced], None] = lambda _: None

    def start(
        self, on_reduced: Callable[[Reduced], None], on_failed: Callable[[IsthmusError], None]
    ) -> None:
        """Remember whom to tell; nothing here can fail later."""
        del on_failed
        self._on_reduced = on_reduced

    def add_region(self, region: int, numel: int, descriptor: int) -> None:
        """Map a region."""
        self._regions[region] = map_region(descriptor, numel)

    def reduce(self, request: Reduce) -> None:
        """Divide, and say so at once."""
        _, shard_numel = padded_shape(request.numel, self._world_size)
        shard = self._regions[request.region][request.offset :][:shard_numel]
        # A weight of 0 is reported, and refused, by whoever hears of the result.
        np.divide(shard, np.float32(request.weight or 1.0), out=shard)
        self._on_reduced(
            Reduced(
                round=request.round,
                bucket=request.bucket,
                weight=request.weight,
                wait_s=0.0,
                wire_bytes=0,
            )
        )

    def send_metric(
        self, kind: str, step: int, values: Mapping[str, float], labels: Mapping[str, str]
    ) -> None:
        """No coordinator listens."""

    def send_digest(
        self, step: int, combined: int, tensors: Sequence[int], names: Sequence[str]
    ) -> None:
        """No other site could differ."""

    def leave(self) -> None:
        """Nobody to tell."""
        self.close()

    def close(self) -> None:
        """Release the regions."""
        self._regions.clear()
