"""Waits of a link, of which each may have something happen."""

from __future__ import annotations

from collections.abc import Callable

from isthmus.sites.gateway.links.send_queue import Outbox


class Looks:
    """Stands where `asyncio` does: something happens in each sleep, and the last ends the link."""

    def __init__(self, outbox: Outbox) -> None:
        self.turns: list[Callable[[], object]] = []
        self.waited_s: list[float] = []
        self._outbox = outbox

    async def sleep(self, seconds: float) -> None:
        self.waited_s.append(seconds)
        if self.turns:
            self.turns.pop(0)()
        else:
            self._outbox.close()
