"""Which sites have been heard lately, by the coordinator's own monotonic clock."""

from __future__ import annotations


class Leases:
    """Pure: times are arguments."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._heard_s: dict[str, float] = {}
        self._ticked_s: float | None = None

    def hear(self, site: str, now_s: float) -> None:
        """Note that a site is alive; this begins or renews its lease."""
        self._heard_s[site] = now_s

    def drop(self, site: str) -> None:
        """Forget a site whose agent has gone."""
        self._heard_s.pop(site, None)

    def expired(self, now_s: float) -> dict[str, float]:
        """Return the sites whose lease has ended, and for how long each was silent, in seconds.

        Call it many times a lease. If it was not called for a fifth of one, this process itself
        stood still, and what the sites sent meanwhile has yet to be read: then all leases begin anew.
        """
        stood_still = self._ticked_s is not None and now_s - self._ticked_s > self._lease_s / 5
        self._ticked_s = now_s
        if stood_still:
            self._heard_s = dict.fromkeys(self._heard_s, now_s)
        return {
            site: now_s - heard_s
            for site, heard_s in self._heard_s.items()
            if now_s - heard_s > self._lease_s
        }
