"""Tells for how long a peer has been silent: by this, agents and gateways give each other up.

A process may have stood still: by SIGSTOP, on a machine that was suspended, or because its
hypervisor stopped it. Then it has heard nothing. What was said meanwhile has yet to be read, and
those who stood still with it have yet to go on. So silence begins anew then. But only once until
something is heard again: a process that is stopped again and again still misses somebody who is
gone.
"""

from __future__ import annotations

_SHARE = 1 / 5
"""The share of a lease by which a look may be late on a busy machine without a standstill.

The coordinator's leases have the same.
"""


class Silence:
    """The silence of one peer. Pure: times are arguments, of one monotonic clock.

    Any thread may `hear`.
    """

    def __init__(self, now_s: float) -> None:
        self.since_s = now_s
        """When something was heard last, or the silence began anew."""
        self._is_anew = False

    def hear(self, said_s: float) -> None:
        """Note that the peer lived then."""
        self.since_s = max(self.since_s, said_s)
        self._is_anew = False

    def begin_anew(self, now_s: float) -> None:
        """This process has stood still until now."""
        if not self._is_anew:
            self.since_s, self._is_anew = now_s, True

    def lasts_s(self, now_s: float) -> float:
        """Return for how long nothing has been heard."""
        return now_s - self.since_s


class Standstills:
    """Notices that its process stood still.

    Pure; of one thread or task, which says how long each of its waits may be.
    """

    def __init__(self, now_s: float, lease_s: float) -> None:
        """Begin.

        Args:
            now_s: now.
            lease_s: after how long a silent peer is given up.
        """
        self._looked_s = now_s
        self._least_s = _SHARE * lease_s

    def look(self, now_s: float, longest_s: float) -> float:
        """Return for how long it stood still since the look before, at least; 0 if it did not.

        Args:
            now_s: now.
            longest_s: by when the caller would have looked again at the latest.
        """
        stood_s, self._looked_s = now_s - self._looked_s - longest_s, now_s
        return stood_s if stood_s > self._least_s else 0.0
