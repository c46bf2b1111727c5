"""What happens while somebody waits for a link to end."""

from __future__ import annotations

from collections.abc import Callable

from isthmus.sites.gateway.links.send_queue import Outbox


class Looks:
    """Stands for the event that ends a link.

    Does something whenever somebody waits, and in the end ends it.
    """

    def __init__(self) -> None:
        self.turns: list[Callable[[], object]] = []
        self.waited_s: list[float] = []

    def wait(self, timeout_s: float) -> bool:
        self.waited_s.append(timeout_s)
        if not self.turns:
            return True
        self.turns.pop(0)()
        return False

    def is_set(self) -> bool:
        return False


def outbox_with(looks: Looks, *, rtt_s: float) -> Outbox:
    """Return a link's outbox whose end is waited for with `looks`."""
    outbox = Outbox(1 << 25, rtt_s)
    outbox.closed = looks  # type: ignore[assignment]
    return outbox
