"""After which steps a checkpoint is written: because it is time, or because somebody has asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from isthmus.sites.checkpoint.interval import Interval
from isthmus.sites.checkpoint.request_watch import RequestWatch
from isthmus.topology.spec.job import Checkpoint


class Schedule:
    """Tells each rank of each site the same. For the training thread."""

    def __init__(
        self,
        settings: Checkpoint,
        stores: Sequence[str],
        agree: Callable[[float], float],
        start_step: int,
    ) -> None:
        """Begin after `start_step`, and look for requests in `stores`.

        `agree` returns the mean of a number over all ranks.
        """
        self._settings = settings
        self._agree = agree
        self._interval = Interval(settings, start_step, agree)
        self._requests = RequestWatch(stores)
        self._restarts = False

    def is_due(self, step: int, sync_every: int) -> bool:
        """Whether a checkpoint of `step` is to be written. Ask once after each step, in order.

        Only after each `sync_every`-th step all sites hold the same.
        """
        if step % sync_every:
            return False
        wanted = self._requests.step
        is_wanted = wanted is not None and step - sync_every < wanted <= step
        is_due = self._interval.is_due(step) or is_wanted
        if self._restarts:
            self._restarts = False
            self._interval = Interval(self._settings, step, self._agree)
        return is_due

    def restart(self) -> None:
        """Count anew from the next step that is asked about, as a run does that begins with it."""
        self._restarts = True

    def close(self) -> None:
        """Look for requests no more."""
        self._requests.close()
