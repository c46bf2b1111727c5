"""What the exchange between sites carries from one round to the next, at one rank.

That is its codecs' residuals (the gateway's, and the rank's own encoder's), and how gradients were
cut into buckets.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.sites.local.rank_messages import KeepResiduals, OweResiduals
from isthmus.sites.worker.exchange.gateway_link import Link
from isthmus.sites.worker.exchange.shard_encoder import ShardEncoder
from isthmus.sites.worker.layouts.replica_hook import ReplicaHook

if TYPE_CHECKING:
    from isthmus.sites.worker.layouts.layout_agreement import LayoutAgreement


class ExchangeState:
    """Asks for one rank's state of the exchange, and gives it back. Between two rounds."""

    def __init__(
        self,
        link: Link | None,
        encoder: ShardEncoder | None,
        hook: ReplicaHook | None,
        agreement: LayoutAgreement | None = None,
    ) -> None:
        """Look after what there is.

        Args:
            link: to a gateway that may have residuals; None: there is none.
            encoder: of this rank; None: there is none.
            hook: DDP's; None: there is none.
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
        """How gradients were cut in the latest round, by names; empty: that does not change."""
        return [] if self._hook is None else self._hook.buckets

    @property
    def cut(self) -> int:
        """What tells apart how a sharded model is cut into buckets, and which ranks share each."""
        return 0 if self._agreement is None else self._agreement.cut

    @property
    def has_residuals(self) -> bool:
        """Whether a file of residuals comes."""
        return self._link is not None

    def resume_buckets(self, saved: dict[str, Any]) -> None:
        """Cut the first round as the last one was; any rank's part will do."""
        if self._hook is not None:
            self._hook.resume(saved["buckets"])

    def resume(self, saved: dict[str, Any], residuals: Path | None) -> None:
        """Go on with the residuals that this rank had, where sites have the ranks that they had.

        They are forgotten where the run was cut into other buckets: the residual belongs to one.
        """
        if saved["cut"] != self.cut:
            return
        if self._encoder is not None:
            self._encoder.restore(saved["encoder"])
        if self._link is not None and residuals is not None:
            self._link.send(OweResiduals(path=str(residuals)))
