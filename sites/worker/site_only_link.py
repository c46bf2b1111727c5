"""The link of a site whose gradients cross to no other: it is the only one, or `schedule: off`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from protos.errors import IsthmusError
from sites.worker.alone_link import AloneLink
from sites.worker.link import Link, Reduced


class SiteOnlyLink(AloneLink):
    """Divides a shard by the site's tokens; all else goes to the gateway. A `Link`."""

    def __init__(self, gateway: Link, world_size: int = 1) -> None:
        """Take a gateway's link; owned from now on."""
        super().__init__(world_size)
        self._gateway = gateway

    def start(
        self, on_reduced: Callable[[Reduced], None], on_failed: Callable[[IsthmusError], None]
    ) -> None:
        """Say from now on what is reduced here, and what the gateway hears of the other sites."""
        super().start(on_reduced, on_failed)
        self._gateway.start(on_reduced, on_failed)

    def send_metric(
        self, kind: str, step: int, values: Mapping[str, float], labels: Mapping[str, str]
    ) -> None:
        """Pass one metric on to the coordinator."""
        self._gateway.send_metric(kind, step, values, labels)

    def send_digest(
        self, step: int, combined: int, tensors: Sequence[int], names: Sequence[str]
    ) -> None:
        """Pass this rank's parameter hashes on to the coordinator."""
        self._gateway.send_digest(step, combined, tensors, names)

    def leave(self) -> None:
        """Say that this rank ends because it is done, then close. Idempotent."""
        super().close()
        self._gateway.leave()

    def close(self) -> None:
        """Close without a word. Idempotent."""
        super().close()
        self._gateway.close()
