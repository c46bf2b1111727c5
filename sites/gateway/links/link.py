"""The sending side of one link: frames to one gateway of another site.

An outbox holds what is to be sent (`outbox.py`), streams carry it over connections of their own
(`streams.py`), as many as the link takes (`channel_growth.py`), and beside them somebody asks now
and then whether the peer lives (`peer_watch.py`), and somebody has TCP use the pauses
(`pauses.py`), and spread packets over time (`pacing.py`). The link starts these, and ends them
together.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable

import grpc

from protos.errors import IsthmusError, PeerLostError
from protos.exchange.v1.exchange_pb2 import LeaveRequest
from protos.exchange.v1.exchange_pb2_grpc import ExchangeStub
from protos.frame import Frame
from sites.gateway.config import GatewayConfig, PeerLink
from sites.gateway.failure import Failure
from sites.gateway.links.channel_growth import ChannelGrowth
from sites.gateway.links.greeting import Peer, details
from sites.gateway.links.outbox import Outbox
from sites.gateway.links.pacing import Pacing, holds_little
from sites.gateway.links.pauses import Pauses
from sites.gateway.links.peer_watch import PeerWatch
from sites.gateway.links.send_queue import LinkTotals
from sites.gateway.links.streams import Streams
from sites.gateway.links.transport import window_of

_log = logging.getLogger(__name__)

_JOIN_S = 2.0
_WINDOWS_AHEAD = 2
_AHEAD_MIN_BYTES = 4 << 20


class Link:
    """Frames to one peer. `open`, then `send`; `drain` before a clean end; `close` always."""

    def __init__(
        self,
        config: GatewayConfig,
        link: PeerLink,
        peer: Peer,
        *,
        on_failure: Callable[[Failure], None],
        on_progress: Callable[[], None],
    ) -> None:
        """Connect nothing yet.

        Args:
            config: this gateway's.
            link: the configured figures of the link to the peer's site.
            peer: whom to dial.
            on_failure: called once, from a thread of the link, when the peer is lost.
            on_progress: called when a frame has left the queue; must not block.
        """
        self.peer = peer
        self.rtt_s = link.rtt_s
        self.bytes_per_s = link.bytes_per_s
        self._config = config
        self._on_failure = on_failure
        self._on_progress = on_progress
        self._outbox = Outbox(window_of(config, link))
        self._watch = PeerWatch(config, peer, self._outbox)
        self._streams = Streams(
            self._outbox,
            self._watch,
            generation=config.generation,
            on_failure=self._stream_failed,
            on_progress=on_progress,
        )
        self._growth = ChannelGrowth(
            config.channels_per_link, link, peer, self._outbox, self._streams
        )
        self._pauses = Pauses(peer, self._outbox, link.rtt_s)
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    @property
    def ahead_bytes(self) -> int:
        """How many bytes of frames are made before the link can take them.

        Chunks are admitted in order, so a link that falls behind for a moment holds up the others
        once so much waits for it: on narrow links a lost packet's recovery is many windows long.
        """
        return max(_WINDOWS_AHEAD * self._outbox.window_bytes, _AHEAD_MIN_BYTES)

    @property
    def unsent_bytes(self) -> int:
        """Bytes that wait for the window."""
        return self._outbox.unsent_bytes

    @property
    def num_channels(self) -> int:
        """Connections that carry frames side by side."""
        return self._streams.num_streams

    def open(self, within_s: float) -> None:
        """Say Hello until it is answered, then start the streams.

        Raises:
            ConfigMismatchError: the peer refused: another configuration or protocol.
            StaleGenerationError: the peer refused: another run or generation.
            PeerLostError: no answer in time: as of `PeerWatch.greet`.
        """
        self._watch.greet(within_s)
        self._growth.begin()
        self._start(self._watch.run, "watch")
        self._start(self._growth.run, "growth")
        self._start(self._pauses.run, "pauses")
        if holds_little(self.bytes_per_s, self.rtt_s):
            self._start(Pacing(self.peer, self._outbox).run, "pacing")

    def send(self, frame: Frame, raw_bytes: int) -> int:
        """Queue a frame and return its size in bytes.

        Raises:
            PeerLostError: the peer has left.
        """
        num_bytes = self._outbox.push(frame, raw_bytes)
        if not num_bytes:
            raise PeerLostError(f"{self.peer} left before the run's end", self.peer.site)
        return num_bytes

    def reached(self) -> None:
        """The peer has said something over its own link to here."""
        self._watch.reached()

    def wanted_again(self) -> None:
        """Another plan needs the link.

        The peer may have dropped its own while none did: it is given time anew.
        """
        self._watch.reached()

    def peer_left(self) -> None:
        """The peer has finished: it needs nothing more, and may go away."""
        self._outbox.leave()
        self._on_progress()

    def drain(self, deadline_s: float) -> bool:
        """Wait until everything is acknowledged; return whether it was by then (monotonic)."""
        return self._outbox.wait_empty(deadline_s)

    def leave(self, failure: Failure | None, timeout_s: float) -> None:
        """Tell the peer that this gateway ends; whether it hears it or not."""
        if self._outbox.has_left:
            return
        request = LeaveRequest(rank=-1)
        if failure is not None:
            request.code, request.message = failure.code, failure.message
            request.site, request.rank = failure.site or self._config.site, failure.rank
        try:
            with self._watch.channel() as channel:
                if not self._watch.session:  # it ends before it was ever connected
                    self._watch.hello(channel, timeout_s)
                request.session = self._watch.session
                ExchangeStub(channel).Leave(request, timeout=timeout_s)
        except grpc.RpcError as error:
            _log.info("%s did not hear that this gateway ends: %s", self.peer, details(error))

    def totals(self) -> LinkTotals:
        """Return what the link has carried so far."""
        return self._outbox.totals()

    def close(self) -> None:
        """End the streams and threads. Frames that were not acknowledged are dropped."""
        self._outbox.close()
        self._streams.close()
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)

    def _fail(self, failure: Failure) -> None:
        if self._outbox.is_over:
            return
        self._outbox.leave()
        self._on_failure(failure)

    def _stream_failed(self, error: BaseException) -> None:
        """On a thread of its own: who hears of it may close the link, and wait for its streams."""

        def fail() -> None:
            raise error

        self._start(fail, "failed")

    def _start(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(
            target=functools.partial(self._run, target),
            name=f"{name}-{self.peer.site}-{self.peer.node}",
            daemon=True,
        )
        with self._lock:
            if self._outbox.closed.is_set():  # by a gateway that failed while this link was opening
                return
            thread.start()
            self._threads.append(thread)

    def _run(self, target: Callable[[], None]) -> None:
        try:
            target()
        except IsthmusError as error:
            self._fail(Failure.of(error, self.peer.site))
        except Exception as error:  # noqa: BLE001 - a thread's root: reported, ends the gateway
            _log.exception("a thread of the link to %s ended", self.peer)
            self._fail(Failure.of(error))
