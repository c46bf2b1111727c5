"""The sending side of one link: frames to one gateway of another site.

Several streams, each on a TCP connection of its own, take frames from one queue, so that a slow
connection holds up nothing but its own frame. A stream that breaks gives back what was not
acknowledged and is opened again on a fresh connection, for after an outage that beats waiting for
the old one's retransmission. Beside them a control channel asks now and then whether the peer
lives: that, and acknowledgements, is what silence is measured by.
"""

from __future__ import annotations

import functools
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator

import grpc

from protos.errors import IsthmusError, PeerLostError, StaleGenerationError
from protos.exchange.v1.exchange_pb2 import LeaveRequest
from protos.exchange.v1.exchange_pb2_grpc import ExchangeStub
from protos.frame import Frame, pack, unpack_ack
from sites.gateway.channels import (
    CHANNELS_MAX,
    channels_for,
    first_channels,
    is_held_back,
    loss_of,
)
from sites.gateway.config import GatewayConfig, PeerLink
from sites.gateway.connections import Segments, addresses_of, segments_to, send_buffer_bytes
from sites.gateway.failure import Failure
from sites.gateway.greeting import Peer, details, refusal_of, say_hello
from sites.gateway.send_queue import LinkTotals, SendQueue, outgoing
from sites.gateway.transport import PUSH_METHOD, SESSION_KEY, client_options, window_of

_log = logging.getLogger(__name__)

_BACKOFF_FIRST_S = 0.05
_BACKOFF_MAX_S = 1.0
_CHECK_S = 1.0
"""How often a wait looks around, in case that a notification was missed."""
_PATIENCE_MIN_S = 0.05
_LOSSES_EVERY_S = 1.0


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
        self._condition = threading.Condition()
        self._queue = SendQueue(window_of(config, link))
        self._most_channels = min(link.max_flows, CHANNELS_MAX)
        self._num_channels = 0
        self._session = ""
        self._heard_s = 0.0
        self._left = False
        self._closed = threading.Event()
        self._calls: dict[int, grpc.Call] = {}
        self._threads: list[threading.Thread] = []

    @property
    def window_bytes(self) -> int:
        """Unacknowledged bytes that may be on the way."""
        return self._queue.window.num_bytes

    @property
    def unsent_bytes(self) -> int:
        """Bytes that wait for the window."""
        return self._queue.unsent_bytes

    def open(self) -> None:
        """Say Hello until it is answered, then start the streams.

        Raises:
            ConfigMismatchError: the peer refused: another configuration or protocol.
            StaleGenerationError: the peer refused: another run or generation.
            PeerLostError: no answer within `peer_lost_s`.
        """
        self._heard_s = time.monotonic()
        backoff_s = _BACKOFF_FIRST_S
        while not self._session:
            try:
                with self._channel() as channel:
                    self._hello(channel, self._config.peer_lost_s / 3)
                    # Again, on a connection that is there: this one tells the round trip.
                    self._hello(channel, self._config.peer_lost_s / 3)
            except grpc.RpcError as error:
                self._raise_if_refused(error)
                self._raise_if_lost(error)
                if self._closed.wait(backoff_s):
                    raise PeerLostError("the gateway was stopped", self.peer.site) from error
                backoff_s = min(2 * backoff_s, _BACKOFF_MAX_S)
        self._grow(
            first_channels(
                self._config.channels_per_link,
                self._most_channels,
                self.bytes_per_s,
                self.rtt_s,
                send_buffer_bytes(),
            )
        )
        self._start(self._watch, "watch")
        self._start(self._follow_losses, "losses")

    def send(self, frame: Frame, raw_bytes: int) -> int:
        """Queue a frame and return its size in bytes.

        Raises:
            PeerLostError: the peer has left.
        """
        data = pack(frame)
        assert type(data) is bytes, "gRPC's sender hangs on anything else"
        with self._condition:
            if self._left:
                raise PeerLostError(f"{self.peer} left before the run's end", self.peer.site)
            self._queue.push(outgoing(frame.key, data, raw_bytes))
            self._condition.notify_all()
        return len(data)

    def peer_left(self) -> None:
        """The peer has finished: it needs nothing more, and may go away."""
        with self._condition:
            self._left = True
            self._queue.clear(time.monotonic())
            self._condition.notify_all()
        self._on_progress()

    def drain(self, deadline_s: float) -> bool:
        """Wait until everything is acknowledged; return whether it was by then (monotonic)."""
        with self._condition:
            while not self._queue.is_empty and not self._closed.is_set():
                remaining_s = deadline_s - time.monotonic()
                if remaining_s <= 0:
                    return False
                self._condition.wait(min(remaining_s, _CHECK_S))
            return True

    def leave(self, failure: Failure | None, timeout_s: float) -> None:
        """Tell the peer that this gateway ends; whether it hears it or not."""
        if self._left:
            return
        request = LeaveRequest(rank=-1)
        if failure is not None:
            request.code, request.message = failure.code, failure.message
            request.site, request.rank = failure.site or self._config.site, failure.rank
        try:
            with self._channel() as channel:
                if not self._session:  # it ends before it was ever connected
                    self._hello(channel, timeout_s)
                request.session = self._session
                ExchangeStub(channel).Leave(request, timeout=timeout_s)
        except grpc.RpcError as error:
            _log.info("%s did not hear that this gateway ends: %s", self.peer, details(error))

    def totals(self) -> LinkTotals:
        """Return what the link has carried so far."""
        with self._condition:
            return self._queue.totals(time.monotonic())

    def close(self) -> None:
        """End the streams and threads. Frames that were not acknowledged are dropped."""
        with self._condition:
            self._closed.set()
            self._queue.clear(time.monotonic())
            calls = list(self._calls.values())
            self._condition.notify_all()
        for call in calls:
            call.cancel()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=2 * _CHECK_S)

    # ---------------------------------------------------------------- streams

    def _run_stream(self, index: int) -> None:
        backoff_s = _BACKOFF_FIRST_S
        while not self._is_over:
            with self._channel() as channel:
                if self._push(channel, index):
                    backoff_s = _BACKOFF_FIRST_S
            # Full jitter, so that streams which broke together do not come back together.
            self._closed.wait(random.uniform(0, backoff_s))  # noqa: S311 - not a secret
            backoff_s = min(2 * backoff_s, _BACKOFF_MAX_S)

    def _push(self, channel: grpc.Channel, index: int) -> bool:
        """Run one stream until it ends; return whether any frame got through.

        Raises:
            IsthmusError: the peer will never take this stream.
        """
        push: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(PUSH_METHOD)
        broken = threading.Event()
        call = push(self._frames(index, broken), metadata=((SESSION_KEY, self._session),))
        with self._condition:
            self._calls[index] = call
            if self._is_over:
                call.cancel()
        progressed = False
        try:
            for answer in call:
                self._acknowledge(answer)
                progressed = True
        except grpc.RpcError as error:
            self._raise_if_refused(error)
            if not self._is_over:
                _log.warning("stream %d to %s broke: %s", index, self.peer, details(error))
        finally:
            broken.set()
            call.cancel()
            with self._condition:
                del self._calls[index]
                again = self._queue.requeue(index, time.monotonic())
                self._condition.notify_all()
            if again and not self._is_over:
                _log.info("%d frames to %s are sent again", again, self.peer)
        return progressed

    def _frames(self, index: int, broken: threading.Event) -> Iterator[bytes]:
        """Yield frames as the window allows; called by gRPC's own thread."""
        while True:
            with self._condition:
                item = None
                while not (self._is_over or broken.is_set()):
                    now_s = time.monotonic()
                    item = self._queue.take(index, now_s)
                    if item is not None:
                        break
                    delay_s = self._queue.window.delay_s(now_s)
                    self._condition.wait(delay_s if 0 < delay_s < _CHECK_S else _CHECK_S)
                if item is None:
                    return
            self._on_progress()
            yield item.data

    def _acknowledge(self, answer: bytes) -> None:
        key, generation = unpack_ack(answer)
        if generation != self._config.generation:
            raise StaleGenerationError(f"{self.peer} acknowledged generation {generation}")
        now_s = time.monotonic()
        with self._condition:
            self._heard_s = now_s
            self._queue.acknowledge(key, now_s)
            if self._queue.unsent_bytes or self._queue.is_empty:
                self._condition.notify_all()

    # ---------------------------------------------------------------- how many streams?

    def _grow(self, num_channels: int) -> None:
        """Start streams until there are so many."""
        for index in range(self._num_channels, num_channels):
            self._start(functools.partial(self._run_stream, index), f"stream-{index}")
        self._num_channels = num_channels
        with self._condition:
            self._queue.window.num_streams = num_channels

    def _follow_losses(self) -> None:
        """Open more connections where lost packets hold those back that there are."""
        before, totals = Segments(), self.totals()
        advised = False
        while not self._closed.wait(_LOSSES_EVERY_S) and not self._is_over:
            now = segments_to(addresses_of(self.peer.host, self.peer.port))
            loss = loss_of(before, now)
            if loss is None and now.sent >= before.sent:
                continue  # too little to tell: it adds up
            totals, since = self.totals(), totals
            before = now
            busy_s = totals.busy_s - since.busy_s
            if not loss or busy_s <= 0:
                continue
            rate = (totals.sent_bytes - since.sent_bytes) / busy_s
            if not is_held_back(loss, now.congestion_control, rate, self.bytes_per_s):
                continue
            wanted = channels_for(loss, self.bytes_per_s, self.rtt_s, self._most_channels)
            if wanted > self._num_channels:
                _log.info("%s: %d connections, for losses of %.3g", self.peer, wanted, loss)
                self._grow(wanted)
            if not advised:
                advised = True
                _log.warning(
                    "hint: %.2g %% of the packets to site %s are lost, and %s takes that for "
                    "congestion: with BBR (sysctl net.ipv4.tcp_congestion_control=bbr, at every "
                    "site) a connection would carry far more than %.3g MB/s",
                    100 * loss,
                    self.peer.site,
                    now.congestion_control,
                    rate / 1e6,
                )

    # ---------------------------------------------------------------- is the peer there?

    def _watch(self) -> None:
        """Ask from time to time whether the peer lives; report it lost after the silence allowed.

        On a channel of its own, where no chunk is in the way.
        """
        interval_s = min(self._config.keepalive_time_s, self._config.peer_lost_s / 5)
        channel = self._channel()
        try:
            while not self._closed.wait(min(interval_s, self._patience_s)) and not self._is_over:
                try:
                    self._hello(channel, min(self._config.peer_lost_s / 3, self._patience_s))
                except grpc.RpcError as error:
                    if self._is_over:
                        return
                    self._raise_if_refused(error)
                    self._raise_if_lost(error)
                    channel.close()
                    channel = self._channel()
        finally:
            channel.close()

    def _hello(self, channel: grpc.Channel, timeout_s: float) -> None:
        is_idle = self._queue.is_empty
        begun_s = time.monotonic()
        self._session = say_hello(channel, self._config, timeout_s)
        self._heard_s = time.monotonic()
        with self._condition:
            self._queue.window.note_round_trip(
                self._heard_s - begun_s, is_idle=is_idle and self._queue.is_empty
            )

    def _raise_if_refused(self, error: grpc.RpcError) -> None:
        refusal = refusal_of(error, self.peer)
        if refusal is not None and not self._is_over:
            raise refusal from error

    def _raise_if_lost(self, error: grpc.RpcError) -> None:
        silent_s = time.monotonic() - self._heard_s
        if silent_s >= self._config.peer_lost_s:
            raise PeerLostError(
                f"{self.peer} has not answered for {silent_s:.1f} s: {details(error)}",
                self.peer.site,
            ) from error

    # ---------------------------------------------------------------- small things

    @property
    def _patience_s(self) -> float:
        """How much longer the peer may be silent; never quite nothing, for it is waited for."""
        return max(self._heard_s + self._config.peer_lost_s - time.monotonic(), _PATIENCE_MIN_S)

    @property
    def _is_over(self) -> bool:
        return self._closed.is_set() or self._left

    def _fail(self, failure: Failure) -> None:
        if self._is_over:
            return
        with self._condition:
            self._left = True
            self._condition.notify_all()
        self._on_failure(failure)

    def _channel(self) -> grpc.Channel:
        return grpc.insecure_channel(
            f"{self.peer.host}:{self.peer.port}", options=client_options(self._config)
        )

    def _start(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(
            target=functools.partial(self._run, target),
            name=f"{name}-{self.peer.site}-{self.peer.node}",
            daemon=True,
        )
        self._threads.append(thread)
        thread.start()

    def _run(self, target: Callable[[], None]) -> None:
        try:
            target()
        except IsthmusError as error:
            self._fail(Failure.of(error, self.peer.site))
        except Exception as error:  # noqa: BLE001 - a thread's root: reported, ends the gateway
            _log.exception("a thread of the link to %s ended", self.peer)
            self._fail(Failure.of(error))
