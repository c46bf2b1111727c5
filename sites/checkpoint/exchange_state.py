"""The state that the exchange between sites keeps between rounds, at one rank.

It consists of the codecs' residuals (of the gateway and of the rank's own encoder), and the
partition of gradients into buckets.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.sites.local.rank_messages import KeepResiduals, RestoreResiduals
from isthmus.sites.worker.exchange.gateway_link import Link
from isthmus.sites.worker.exchange.shard_encoder import ShardEncoder
from isthmus.sites.worker.layouts.replica_hook import ReplicaHook

if TYPE_CHECKING:
    from isthmus.sites.worker.layouts.layout_agreement import LayoutAgreement


class ExchangeState:
    """Saves and restores one rank's state of the exchange, between two rounds."""

    def __init__(
        self,
        link: Link | None,
        encoder: ShardEncoder | None,
        hook: ReplicaHook | None,
        agreement: LayoutAgreement | None = None,
    ) -> None:
        """Hold the parts of the exchange.

        Args:
            link: link to a gateway that may have residuals; None: no gateway.
            encoder: encoder of this rank; None: no encoder.
            hook: DDP's hook; None: not DDP.
            agreement: of sites of which some may shard; None: there is none.
        """
        self._link = link
        self._encoder = encoder
        self._hook = hook
        self._agreement = agreement

    def save(self, residuals: Path) -> dict[str, Any]:
        """Return the rank's own part, and have the gateway write its part to `residuals`."""
        if self._link is not None:
            self._link.send(KeepResiduals(path=str(residuals)))
        return {
            "buckets": self.buckets,
            "cut": self.cut,
            "encoder": {} if self._encoder is None else self._encoder.residuals(),
        }

    @property
    def buckets(self) -> list[list[str]]:
        """Return the latest round's buckets as parameter names; empty: the buckets are fixed."""
        return [] if self._hook is None else self._hook.buckets

    @property
    def cut(self) -> int:
        """Return a checksum of a sharded model's buckets, and of the ranks that share each."""
        return 0 if self._agreement is None else self._agreement.cut

    @property
    def has_residuals(self) -> bool:
        """Whether the gateway writes a file of residuals."""
        return self._link is not None

    def resume_buckets(self, saved: dict[str, Any]) -> None:
        """Restore the buckets of the saved round; any rank's part will do."""
        if self._hook is not None:
            self._hook.resume(saved["buckets"])

    def resume(self, saved: dict[str, Any], residuals: Path | None) -> None:
        """Restore this rank's residuals, if sites have the same ranks as before.

        Residuals are dropped if the buckets differ: a residual belongs to its bucket.
        """
        if saved["cut"] != self.cut:
            return
        if self._encoder is not None:
            self._encoder.restore(saved["encoder"])
        if self._link is not None and residuals is not None:
            self._link.send(RestoreResiduals(path=str(residuals)))
