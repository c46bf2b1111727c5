"""How an event loop is told to end: SIGTERM or Ctrl-C once, and twice when it takes too long."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from orchestrator.interruption import INTERRUPTION, SAME_S, Interrupted

Result = TypeVar("Result")


def run_command(main: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """Run the coroutine that `main` makes, in a command; a signal cancels it.

    Raises:
        Interrupted: the command was told to end, and the coroutine has.
    """

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
