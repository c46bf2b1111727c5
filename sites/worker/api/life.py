"""A rank's time in its run: whether it is the main one, and how it leaves."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence

from isthmus.sites.worker.exchange.gateway_link import Link
from isthmus.sites.worker.exchange.member_history import MemberHistory
from isthmus.sites.worker.exchange.rank_context import RankContext


class Life:
    """From `isthmus.join` to the process's end, which is in order or a crash."""

    def __init__(
        self,
        context: RankContext,
        link: Link,
        members: MemberHistory,
        *,
        has_averaged: Callable[[], bool],
        before: Sequence[Callable[[], None]],
        after: Sequence[Callable[[], None]],
    ) -> None:
        """Leave when the process exits, if the script does not before.

        Args:
            context: who this rank is.
            link: is told that the rank is done.
            members: whether the site takes part.
            has_averaged: whether the script has averaged anything over sites.
            before: called in order before the rank says that it is done, to finish its work.
            after: called in order after that, to release what it holds.
        """
        self._context = context
        self._link = link
        self._members = members
        self._has_averaged = has_averaged
        self._before = before
        self._after = after
        self._has_left = False
        self._pid = os.getpid()
        atexit.register(self._leave_at_exit)

    @property
    def is_main(self) -> bool:
        """Whether this rank does what is done once a run: `Site.is_main`."""
        context = self._context
        gone = self._link.missing_sites.gone()
        first = next((at for at in range(context.num_sites) if at not in gone), context.index)
        is_first = context.rank == 0 and context.index == first
        return is_first and not self._members.is_catching_up

    def leave(self) -> None:
        """Finish, report that this rank is done, and release everything. Idempotent."""
        if self._has_left:
            return
        self._has_left = True
        atexit.unregister(self._leave_at_exit)
        for each in self._before:
            each()
        has_averaged = self._has_averaged() or not self._context.must_average
        self._link.leave(has_averaged=has_averaged)
        for each in self._after:
            each()

    def _leave_at_exit(self) -> None:
        """Leave, unless an exception ends the process: to the others that is a crash.

        A child of `multiprocessing` keeps its exception to itself. So there whoever has not left
        before has crashed. Before Python 3.13 such a child did not even call this.
        """
        if os.getpid() != self._pid:
            return  # A fork, a data loader's worker say, ends; the rank goes on.
        is_child = multiprocessing.parent_process() is not None
        if is_child or getattr(sys, "last_value", None) is not None:
            self._link.close()
        else:
            self.leave()
