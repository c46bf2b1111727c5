"""Tells which sites have been heard lately, by the coordinator's own monotonic clock."""

from __future__ import annotations


class Leases:
    """The time since each site was last heard. Pure: times are arguments."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._heard_s: dict[str, float] = {}
        self._renewed: set[str] = set()
        """Whose lease began anew when this process had stood still, and who was not heard since."""
        self._ticked_s: float | None = None
        self._stood_still_s = 0.0
        self._stood_still_until_s = 0.0

    def hear(self, site: str, now_s: float) -> None:
        """Note that a site is alive; this begins or renews its lease."""
        self._heard_s[site] = now_s
        self._renewed.discard(site)

    def drop(self, site: str) -> None:
        """Forget a site whose agent has gone."""
        self._heard_s.pop(site, None)
        self._renewed.discard(site)

    def silent_s(self, site: str, now_s: float) -> float:
        """Return for how long a site has been silent; 0 where it has no lease."""
        return now_s - self._heard_s.get(site, now_s)

    def expired(self, now_s: float) -> dict[str, float]:
        """Return the sites whose lease has ended, and for how long each was silent, in seconds.

        Call it many times a lease. If it was not called for a fifth of one, this process itself
        stood still, and what the sites sent meanwhile has yet to be read: then leases begin anew.
        Each only once, until its site is heard again: a process that is stopped again and again
        still misses a dead one.
        """
        gap_s = self._gap_s(now_s)
        self._ticked_s = now_s
        if gap_s > self._lease_s / 5:
            self._stood_still_s, self._stood_still_until_s = gap_s, now_s
            anew = self._heard_s.keys() - self._renewed
            self._heard_s.update(dict.fromkeys(anew, now_s))
            self._renewed |= anew
        return {
            site: now_s - heard_s
            for site, heard_s in self._heard_s.items()
            if now_s - heard_s > self._lease_s
        }

    def stood_still_s(self, now_s: float) -> float:
        """Return for how long this process has just stood still, if that may cost it its sites.

        Agents that heard no answer meanwhile may have closed their connections, and that is heard a
        moment later. 0 if nothing of the kind was within the last lease.
        """
        stood_still_s = self._gap_s(now_s)
        if now_s - self._stood_still_until_s <= self._lease_s:
            stood_still_s = max(stood_still_s, self._stood_still_s)
        return stood_still_s if stood_still_s > self._lease_s / 2 else 0.0

    def _gap_s(self, now_s: float) -> float:
        return 0.0 if self._ticked_s is None else now_s - self._ticked_s
