"""The streams of one link: each carries frames of the outbox over a TCP connection of its own.

So a slow connection holds up nothing but its own frame. A stream that breaks gives back what was not
acknowledged and is opened again on a fresh connection, for after an outage that beats waiting for
the old one's retransmission.
"""

from __future__ import annotations

import functools
import logging
import random
import threading
from collections.abc import Callable, Iterator

import grpc

from protos.errors import StaleGenerationError
from protos.frame import unpack_ack
from sites.gateway.greeting import BACKOFF_FIRST_S, BACKOFF_MAX_S, details
from sites.gateway.outbox import Outbox
from sites.gateway.peer_watch import PeerWatch
from sites.gateway.transport import PUSH_METHOD, SESSION_KEY

_log = logging.getLogger(__name__)

Start = Callable[[Callable[[], None], str], None]
"""Runs something on a thread of the link, by that name."""


class Streams:
    """As many streams as `grow` was asked for, until the outbox is over."""

    def __init__(
        self,
        outbox: Outbox,
        watch: PeerWatch,
        *,
        generation: int,
        start: Start,
        on_progress: Callable[[], None],
    ) -> None:
        """Start none.

        Args:
            outbox: what they carry.
            watch: knows the peer; hears of every answer.
            generation: what acknowledgements must name.
            start: as in `Link`.
            on_progress: called when a frame has left the outbox; must not block.
        """
        self.num_streams = 0
        self._outbox = outbox
        self._watch = watch
        self._generation = generation
        self._start = start
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._calls: dict[int, grpc.Call] = {}

    def grow(self, num_streams: int) -> None:
        """Start streams until there are so many. Called by one thread at a time."""
        for index in range(self.num_streams, num_streams):
            self._start(functools.partial(self._run, index), f"stream-{index}")
        self.num_streams = max(self.num_streams, num_streams)
        self._outbox.widen(self.num_streams)

    def cancel(self) -> None:
        """Break all streams; the outbox is closed, so they do not come back."""
        with self._lock:
            calls = list(self._calls.values())
        for call in calls:
            call.cancel()

    def _run(self, index: int) -> None:
        backoff_s = BACKOFF_FIRST_S
        while not self._outbox.is_over:
            with self._watch.channel() as channel:
                if self._push(channel, index):
                    backoff_s = BACKOFF_FIRST_S
            # Full jitter, so that streams which broke together do not come back together.
            self._outbox.closed.wait(random.uniform(0, backoff_s))  # noqa: S311 - not a secret
            backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)

    def _push(self, channel: grpc.Channel, index: int) -> bool:
        """Run one stream until it ends; return whether any frame got through.

        Raises:
            IsthmusError: the peer will never take this stream.
        """
        push: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(PUSH_METHOD)
        broken = threading.Event()
        call = push(self._frames(index, broken), metadata=((SESSION_KEY, self._watch.session),))
        with self._lock:
            self._calls[index] = call
        if self._outbox.is_over:
            call.cancel()
        progressed = False
        try:
            for answer in call:
                self._acknowledge(answer)
                progressed = True
        except grpc.RpcError as error:
            self._watch.raise_if_refused(error)
            if not self._outbox.is_over:
                _log.warning("stream %d to %s broke: %s", index, self._watch.peer, details(error))
        finally:
            broken.set()
            call.cancel()
            with self._lock:
                del self._calls[index]
            again = self._outbox.requeue(index)
            if again and not self._outbox.is_over:
                _log.info("%d frames to %s are sent again", again, self._watch.peer)
        return progressed

    def _frames(self, index: int, broken: threading.Event) -> Iterator[bytes]:
        """Yield frames as the window allows; called by gRPC's own thread."""
        while (item := self._outbox.take(index, broken)) is not None:
            self._on_progress()
            yield item.data

    def _acknowledge(self, answer: bytes) -> None:
        key, generation = unpack_ack(answer)
        if generation != self._generation:
            raise StaleGenerationError(f"{self._watch.peer} acknowledged generation {generation}")
        self._watch.heard()
        self._outbox.acknowledge(key)
