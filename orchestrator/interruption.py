"""How a command is told to end: by Ctrl-C or SIGTERM, once; a second one ends the process at once.

Python runs a signal's handler between any two bytecodes of the main thread. What is raised there
may be lost in a destructor or a callback, or leave a lock taken for ever, and then the command
never ends. So while a command holds anything, as a connection, a table on a terminal or a process,
the handler only takes note; `check`, which every wait calls at least each LOOK_S, raises. Where
nothing is held, as in computing, the handler raises itself, and what is lost there the next wait
raises again.

Waits look rather than are woken: a signal that comes just before a wait's system call does not end
that, and its handler has to wait, too. An event loop is woken instead: `first_signal`.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import asyncio  # imported where it is used: `isthmus --help` needs none

SAME_S = 0.5
"""What comes so soon is no second wish.

`timeout` signals its process, and then the group that it is in.
"""
LOOK_S = 0.1
"""Between two looks of a wait whether a signal has come; nobody notices."""
SHOW_CURSOR = b"\x1b[?25h"

Item = TypeVar("Item")
Result = TypeVar("Result")


class Interrupted(KeyboardInterrupt):
    """The command was told to end, by the signal `signum`."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Interruption:
    """What signals have told this process.

    Used by its main thread, the only one that takes them.
    """

    def __init__(
        self,
        now_s: Callable[[], float] = time.monotonic,
        exit_now: Callable[[int], None] = os._exit,
    ) -> None:
        self._now_s = now_s
        self._exit_now = exit_now
        self._num_held = 0
        self._forget()

    def _forget(self) -> None:
        self._first_s: float | None = None
        self._pending: int | None = None
        self.raised: Interrupted | None = None
        """What the handler itself has raised: other code may have made another error of that."""

    @contextmanager
    def listening(self, *, is_program: bool) -> Iterator[None]:
        """Take over SIGINT and SIGTERM for a command, where they are not ignored.

        Args:
            is_program: The process ends after it: from then on signals end it without a word.
        """
        self._forget()
        self._num_held = 1  # the handlers themselves
        before = {}
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    before[signum] = signal.signal(signum, self._note)
        try:
            try:
                self._num_held = 0
                yield
            finally:
                self._num_held = 1
        finally:  # of its own, for the one before may be interrupted, if no other will be
            for signum, handler in before.items():
                signal.signal(signum, signal.SIG_DFL if is_program else handler)
            self._num_held = 0

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Have signals raise only where the block waits, for it holds something.

        Raises:
            Interrupted: before the block.
        """
        self._num_held += 1
        try:
            self.check()
            yield
        finally:
            self._num_held -= 1

    @contextmanager
    def releasing(self) -> Iterator[None]:
        """Have signals raise at once while the block does one thing that takes long, as a write."""
        held, self._num_held = self._num_held, 0
        try:
            self.check()
            yield
        except Interrupted:
            self._pending = None  # not lost
            raise
        finally:
            self._num_held = held

    def check(self) -> None:
        """Raise if a signal has come since the last time, for who waits or is about to.

        Raises:
            Interrupted: one has.
        """
        signum, self._pending = self._pending, None
        if signum is not None:
            raise Interrupted(signum)

    def next_of(self, items: queue.Queue[Item], within_s: float) -> Item:
        """Wait for the next of `items`.

        Raises:
            Interrupted: the command was told to end.
            queue.Empty: nothing has come after `within_s`.
        """
        deadline_s = self._now_s() + within_s
        while True:
            self.check()
            left_s = deadline_s - self._now_s()
            try:
                return items.get(timeout=max(0.0, min(LOOK_S, left_s)))
            except queue.Empty:
                if left_s <= LOOK_S:
                    raise

    def answer(self, error: KeyboardInterrupt) -> int:
        """Return the exit status of a command that `error` ends, as shells have it.

        Waits go on from here.
        """
        self._pending = None
        return 128 + (error.signum if isinstance(error, Interrupted) else signal.SIGINT)

    def _note(self, signum: int, _frame: FrameType | None) -> None:
        now_s = self._now_s()
        if self._first_s is not None:
            if now_s - self._first_s > SAME_S:
                self.leave(signum)
            return
        self._first_s, self._pending = now_s, signum
        if not self._num_held:
            self.raised = Interrupted(signum)
            raise self.raised

    def answered(self) -> None:
        """An event loop has taken a signal (`first_signal`): the next one is a second."""
        if self._first_s is None:
            self._first_s = self._now_s()

    def leave(self, signum: int) -> None:
        """End the process at once."""
        if os.isatty(2):
            os.write(2, SHOW_CURSOR)  # a live table may have hidden it
        self._exit_now(128 + signum)


INTERRUPTION = Interruption()
"""This process's: signals are told to the whole of it."""


def run_command(main: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """Run the coroutine that `main` makes, in a command; a signal cancels it.

    Raises:
        Interrupted: the command was told to end, and the coroutine has.
    """
    import asyncio

    async def until_signalled() -> Result:
        with first_signal() as signalled:
            running = asyncio.create_task(main(), name="command")
            waits: list[asyncio.Future[Any]] = [signalled, running]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
                raise Interrupted(signalled.result())
            return running.result()

    with INTERRUPTION.holding():
        return asyncio.run(until_signalled())


@contextmanager
def first_signal() -> Iterator[asyncio.Future[int]]:
    """Give what the first SIGTERM or SIGINT resolves; a second one ends the process at once.

    Raises:
        Interrupted: one came before it would have been seen here, while a command held something.
    """
    import asyncio

    loop = asyncio.get_running_loop()
    first: asyncio.Future[int] = loop.create_future()
    first_s = 0.0

    def on_signal(signum: int) -> None:
        nonlocal first_s
        if not first.done():
            first_s = loop.time()
            first.set_result(signum)
        elif loop.time() - first_s > SAME_S:
            INTERRUPTION.leave(signum)

    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    for each in before:
        loop.add_signal_handler(each, on_signal, int(each))
    try:
        INTERRUPTION.check()
        yield first
    finally:
        if first.done():
            INTERRUPTION.answered()
        for each, handler in before.items():
            loop.remove_signal_handler(each)
            signal.signal(each, handler)
