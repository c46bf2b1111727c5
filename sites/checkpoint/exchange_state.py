"""What the exchange between sites carries from one round to the next, at one rank.

That is what its codecs owe (the gateway's, and the rank's own encoder's), and how gradients were
cut into buckets.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sites.local.rank_messages import KeepResiduals, OweResiduals
from sites.worker.gateway_link import Link
from sites.worker.gradient_hooks import ReplicaHook
from sites.worker.shard_encoder import ShardEncoder


class ExchangeState:
    """Asks for it, and gives it back. Between two rounds."""

    def __init__(
        self, link: Link | None, encoder: ShardEncoder | None, hook: ReplicaHook | None
    ) -> None:
        """`link` is to a gateway that may owe; `hook` is DDP's. None: there is none."""
        self._link = link
        self._encoder = encoder
        self._hook = hook

    def save(self, residuals: Path) -> dict[str, Any]:
        """Return the rank's own part, and have the gateway write its part to `residuals`."""
        if self._link is not None:
            residuals.parent.mkdir(parents=True, exist_ok=True)
            self._link.send(KeepResiduals(path=str(residuals)))
        return {
            "buckets": self.buckets,
            "encoder": {} if self._encoder is None else self._encoder.owed(),
        }

    @property
    def buckets(self) -> list[list[str]]:
        """How gradients were cut in the latest round, by names; empty: that does not change."""
        return [] if self._hook is None else self._hook.buckets

    @property
    def has_residuals(self) -> bool:
        """Whether a file of residuals comes."""
        return self._link is not None

    def resume_buckets(self, saved: dict[str, Any]) -> None:
        """Cut the first round as the last one was; any rank's part will do."""
        if self._hook is not None:
            self._hook.resume(saved["buckets"])

    def resume(self, saved: dict[str, Any], residuals: Path | None) -> None:
        """Go on with the residuals that this rank had, where sites have the ranks that they had."""
        if self._encoder is not None:
            self._encoder.owe(saved["encoder"])
        if self._link is not None and residuals is not None:
            self._link.send(OweResiduals(path=str(residuals)))
