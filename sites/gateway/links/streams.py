"""The streams of a link, each of which carries frames over its own TCP connection.

So a slow connection delays only its own frame. A stream that breaks returns unacknowledged frames
to the outbox, and is opened again on a fresh connection. After an outage that is faster than
waiting for TCP's retransmission. A connection on which a frame waits and nothing moves
(`progress.py`) is closed: the peer may be gone though a proxy acknowledges bytes.

Streams are tasks of the gateway's event loop (`wire_loop.py`). A stream with nothing to send is
idle. Idle streams get frames in turn, when one is pushed or an acknowledgement makes room. As many
streams as the window holds frames come first. The others get frames only while none of those is
idle.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass

from isthmus.protos.frame import unpack_ack
from isthmus.sites.gateway.config import GatewayConfig
from isthmus.sites.gateway.links.calls import Call
from isthmus.sites.gateway.links.peer_watch import PeerWatch
from isthmus.sites.gateway.links.progress import Progress
from isthmus.sites.gateway.links.send_queue import Outbox
from isthmus.sites.gateway.links.status import CallError
from isthmus.sites.gateway.links.transport import (
    BACKOFF_FIRST_S,
    BACKOFF_MAX_S,
    PUSH_METHOD,
    details,
    patience,
)

_log = logging.getLogger(__name__)

_CHECK_S = 1.0
"""Interval at which idle streams look for frames, in case a wake-up was missed, and busy ones are
checked."""
_CHECKS = 8
"""Minimum number of checks in the time that an acknowledgement may take."""


@dataclass(slots=True)
class _Carrying:
    """A stream's connection, and its progress."""

    call: Call
    progress: Progress
    num_acks: int = 0
    silent_s: float = 0.0
    """How long a frame had waited without progress at the latest check."""


class Streams:
    """The streams of a link; `grow` adds some. They run until the outbox ends. `end` always.

    Use it on the event loop's thread.
    """

    def __init__(
        self,
        outbox: Outbox,
        watch: PeerWatch,
        *,
        config: GatewayConfig,
        soon: Callable[[Callable[[], None]], None],
        set_up: Callable[[socket.socket], None],
        on_failure: Callable[[BaseException], None],
        on_broken: Callable[[], None],
        on_progress: Callable[[], None],
    ) -> None:
        """`soon` calls a function on the event loop, from any thread.

        `set_up` is called with each new connection. `on_failure` gets the error that ended a stream
        for good. `on_broken`
        is called when a stream broke and will be reopened, `on_progress` when a frame has left the
        outbox. None of them may block.
        """
        self.num_streams = 0
        self._outbox = outbox
        self._watch = watch
        self._config = config
        self._set_up = set_up
        self._on_failure = on_failure
        self._on_broken = on_broken
        self._on_progress = on_progress
        self._patience_s = patience(config).lost_s
        self._check_s = min(_CHECK_S, self._patience_s / _CHECKS)
        self._soon = soon
        self._look_s: float | None = None
        """Interval at which a full window is looked at; None: no window was set so far."""
        self._said: set[str] = set()
        """Errors of broken streams already logged since frames last got through."""
        self._tasks: list[asyncio.Task[None]] = []
        self._carrying: dict[int, _Carrying] = {}
        self._idle: dict[int, None] = {}
        """Streams whose TCP has taken all that they were given, longest first."""
        self._is_feeding = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def connections(self) -> tuple[socket.socket, ...]:
        """The open connections. They may end at any time."""
        return tuple(each.call.socket for each in tuple(self._carrying.values()))

    def limit(self, window_bytes: int, look_s: float) -> None:
        """Limit the bytes on the way, on all connections together.

        Args:
            window_bytes: that TCP has not acknowledged.
            look_s: interval at which a full window is looked at.
        """
        self._outbox.limit(window_bytes)
        self._look_s = look_s
        for each in tuple(self._carrying.values()):
            self._limit(each.call)

    def _limit(self, call: Call) -> None:
        if self._look_s is not None:
            num_carrying = max(1, min(self.num_streams, self._outbox.num_in_flight))
            call.limit(self._outbox.on_the_way_bytes // num_carrying, self._look_s)

    def grow(self, num_streams: int) -> None:
        """Start streams up to `num_streams`."""
        if not self.num_streams:
            self._outbox.listen(self._wake)
            self._look_around()
        first, self.num_streams = self.num_streams, max(self.num_streams, num_streams)
        for index in range(first, num_streams):
            self._open(index)

    async def end(self) -> None:
        """End all streams; the outbox is closed, so they do not come back."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()

    def _open(self, index: int) -> None:
        task = asyncio.create_task(self._run(index), name=f"stream-{index}-{self._watch.peer.site}")
        task.add_done_callback(self._report)
        self._tasks.append(task)

    def _report(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(error)

    async def _run(self, index: int) -> None:
        backoff_s = BACKOFF_FIRST_S
        while not self._outbox.is_over:
            try:
                async with self._watch.peer.dial(
                    self._config, self._watch.session, PUSH_METHOD
                ) as call:
                    if await self._carry(call, index):
                        backoff_s = BACKOFF_FIRST_S
            except CallError as error:
                self._broke(index, error)
            # Full jitter, so that streams which broke together do not reconnect together.
            await asyncio.sleep(random.uniform(0, backoff_s))  # noqa: S311 - not a secret
            backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)

    def _broke(self, index: int, error: CallError) -> None:
        """Log and report a broken stream.

        Raises:
            IsthmusError: the peer will never take this stream.
        """
        self._watch.note_refusal(error)
        if not self._outbox.is_over:
            self._on_broken()
            why = details(error)
            # Log once: each stream and each attempt fails alike while the cause lasts.
            level = logging.DEBUG if why in self._said else logging.WARNING
            _log.log(level, "stream %d to %s broke: %s", index, self._watch.peer, why)
            self._said.add(why)

    async def _carry(self, call: Call, index: int) -> bool:
        """Run one stream until it ends; return whether any frame got through.

        Raises:
            IsthmusError: the peer will never take this stream.
        """
        progress = Progress(asyncio.get_running_loop().time(), self._patience_s)
        carrying = self._carrying[index] = _Carrying(call, progress)
        self._set_up(call.socket)
        self._limit(call)

        def take(answer: memoryview) -> None:
            self._acknowledge(answer)
            if carrying.num_acks == 0:
                self._said.clear()
            carrying.num_acks += 1

        try:
            self._ready(index, call)
            await call.take_each(take)
        except CallError as error:
            self._broke(index, error)
        finally:
            del self._carrying[index]
            self._idle.pop(index, None)
            left_s = self._outbox.left_s(index)
            if left_s is not None and carrying.silent_s >= self._patience_s / 2:
                self._outbox.note_stuck(left_s)  # whichever side noticed it first
            again = self._outbox.requeue(index)
            if again and not self._outbox.is_over:
                _log.info("%d frames to %s will be sent again", again, self._watch.peer)
        return carrying.num_acks > 0

    def _ready(self, index: int, call: Call) -> None:
        """Note that a stream can take a frame, unless it has broken."""
        carrying = self._carrying.get(index)
        if carrying is not None and carrying.call is call:
            self._idle[index] = None
            self._feed()

    def _feed(self) -> None:
        """Give idle streams, in turn, the frames that may leave now."""
        if self._is_feeding:  # by a stream that was given a frame, and has sent it at once
            return
        self._is_feeding = True
        try:
            # If all streams took turns, each would idle in between, and TCP restart slowly.
            most = self._outbox.num_in_flight
            while self._idle and len(self._carrying) - len(self._idle) < most:
                index = next((each for each in self._idle if each < most), next(iter(self._idle)))
                item = self._outbox.take(index)
                if item is None:
                    break
                del self._idle[index]
                self._on_progress()
                with contextlib.suppress(CallError):  # the reader of answers gets it
                    call = self._carrying[index].call
                    call.post(item.data, functools.partial(self._ready, index, call))
        except Exception as error:  # noqa: BLE001 - a callback's root: reported, ends the link
            self._on_failure(error)
        finally:
            self._is_feeding = False

    def _look_around(self) -> None:
        """Give idle streams frames that they missed, and break those without progress."""
        self._feed()
        for index, carrying in list(self._carrying.items()):
            self._check(index, carrying)
        if not self._outbox.is_over:
            self._timer = asyncio.get_running_loop().call_later(self._check_s, self._look_around)

    def _check(self, index: int, carrying: _Carrying) -> None:
        now_s = asyncio.get_running_loop().time()
        try:
            traffic = carrying.call.traffic()
        except OSError:
            return  # it has ended
        silent_s = carrying.progress.look(now_s, self._check_s, traffic, carrying.num_acks)
        left_s = self._outbox.left_s(index)
        if left_s is None:
            carrying.progress.begin_anew(now_s)
            carrying.silent_s = 0.0
            return
        carrying.silent_s = min(silent_s, now_s - left_s)
        if carrying.silent_s >= self._patience_s:
            carrying.call.break_off(
                f"a frame was not acknowledged for {now_s - left_s:.1f} s, and nothing moved for "
                f"{silent_s:.1f}"
            )

    def _acknowledge(self, answer: memoryview) -> None:
        self._watch.heard()
        self._outbox.acknowledge(*unpack_ack(answer))
        self._feed()

    def _wake(self) -> None:
        """There may be a frame for an idle stream; for any thread."""
        self._soon(self._feed)
