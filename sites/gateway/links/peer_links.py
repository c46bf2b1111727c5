"""The sending side: a `Link` to each gateway of another site, and `PeerLinks`, all of them.

A link holds what is to be sent in an outbox (`send_queue.py`). Streams carry it over connections of
their own (`streams.py`), as many as the link takes (`congestion/connections.py`), set up as the
link wants them (`congestion/kernel.py`). Beside them threads ask now and then whether the peer
lives (`peer_watch.py`), and have TCP use the pauses. The link starts these, and ends them together.

A link is made when a plan first needs it. One that is lost when no plan needs it any more is only
closed, and made again if another plan does.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping

import grpc

from protos.errors import IsthmusError, LocalProtocolError, PeerLostError, failure_of
from protos.exchange.v1.exchange_pb2 import LeaveRequest
from protos.exchange.v1.exchange_pb2_grpc import ExchangeStub
from protos.failure import Failure
from protos.frame import ChunkKey, Frame, Kind, pack
from sites.gateway.config import GatewayConfig, GatewayId, PeerLink
from sites.gateway.links.congestion.connections import ChannelGrowth
from sites.gateway.links.congestion.kernel import use_pauses
from sites.gateway.links.congestion.rate import window_bytes
from sites.gateway.links.peer_watch import PeerWatch
from sites.gateway.links.send_queue import LinkTotals, Outbox, Outgoing, outgoing
from sites.gateway.links.streams import Streams
from sites.gateway.links.transport import Peer, details

_log = logging.getLogger(__name__)

_JOIN_S = 2.0
_BDP_AHEAD = 2
_AHEAD_MIN_BYTES = 4 << 20
_COLD_MIN_BYTES = 256 << 10
"""A link that holds less is soon warm."""
_PADDING_BYTES = 256 << 10
_PADDING_BDP = 4
"""Products of rate and round trip until TCP has found a link's rate: it doubles what is on the way
in each round trip, up to twice what the link holds."""


class Link:
    """The way to one peer. `open`, then `send`; `drain` before a clean end; `close` always."""

    def __init__(
        self,
        config: GatewayConfig,
        link: PeerLink,
        peer: Peer,
        *,
        on_failure: Callable[[Failure], None],
        on_progress: Callable[[], None],
    ) -> None:
        """`on_failure` is called once, from a thread of the link's own.

        `on_progress` is called when a frame has left the queue, and must not block.
        """
        self.peer = peer
        self.rtt_s = link.rtt_s
        self.bytes_per_s = link.bytes_per_s
        self._config = config
        self._on_failure = on_failure
        self._on_progress = on_progress
        self._outbox = Outbox(window_bytes(config, link), link.rtt_s)
        self._watch = PeerWatch(config, peer, self._outbox)
        self._streams = Streams(
            self._outbox,
            self._watch,
            config=config,
            set_up=lambda: self._growth.set_up(),
            on_failure=self._stream_failed,
            on_progress=on_progress,
        )
        self._growth = ChannelGrowth(
            config.channels_per_link, link, peer, self._outbox, self._streams
        )
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    @property
    def ahead_bytes(self) -> int:
        """Bytes of frames that may be made before the link can take them.

        Chunks are admitted in order. So once so much waits for a link that has fallen behind, it
        holds up the others. On narrow links the recovery of a lost packet takes many round trips.
        """
        return max(int(_BDP_AHEAD * self.bytes_per_s * self.rtt_s), _AHEAD_MIN_BYTES)

    @property
    def unsent_bytes(self) -> int:
        """Bytes that wait for the window."""
        return self._outbox.unsent_bytes

    @property
    def num_channels(self) -> int:
        """Connections that carry frames side by side."""
        return self._streams.num_streams

    def open(self, within_s: float) -> None:
        """Greet the peer until it answers, then start the streams.

        Raises:
            ConfigMismatchError: the peer refused: another configuration or protocol.
            StaleGenerationError: the peer refused: another run or generation.
            PeerLostError: no answer in time, as `PeerWatch.greet` counts it.
        """
        self._watch.greet(within_s)
        self._outbox.warm_up(self._padding())
        self._growth.begin()
        self._start(self._watch.run, "watch")
        self._start(self._growth.run, "growth")
        self._start(functools.partial(use_pauses, self.peer, self._outbox, self.rtt_s), "pauses")

    def _padding(self) -> Iterator[Outgoing]:
        """Yield what brings connections up to the link's speed, while ranks are not ready yet."""
        held_bytes = int(self.bytes_per_s * self.rtt_s)
        if held_bytes < _COLD_MIN_BYTES:
            return
        config = self._config
        payload = bytes(min(config.chunk_bytes, _PADDING_BYTES))
        for index in range(_PADDING_BDP * held_bytes // len(payload)):
            key = ChunkKey(0, 0, index, config.site_index, Kind.PADDING)
            frame = Frame(key, 0, 0, 0, 0, 0, 0.0, payload)
            yield outgoing(key, 0, pack(frame), 0)

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
        """The peer has said something over its own link to here, or is given time anew to do so."""
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
            with self.peer.channel(self._config) as channel:
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
            name=f"{name}-{self.peer.site}-{self.peer.gateway}",
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
            self._fail(failure_of(error, self.peer.site))
        except Exception as error:  # noqa: BLE001 - a thread's root: reported, ends the gateway
            _log.exception("a thread of the link to %s ended", self.peer)
            self._fail(failure_of(error))


class PeerLinks:
    """All links of a gateway. `meet` the peers, then `add` sites.

    All methods may be called from any thread.
    """

    def __init__(
        self,
        config: GatewayConfig,
        *,
        on_change: Callable[[Mapping[GatewayId, Link]], None],
        on_failure: Callable[[Failure], None],
        on_progress: Callable[[], None],
        needs: Callable[[int], bool],
    ) -> None:
        """`on_change` gets all links, in a mapping that stays as it is, when some come or go.

        `on_failure` is told when a link is lost that a plan needs: `needs` says that, by the site's
        index. `on_progress` is told when a frame has left a queue, and must not block.
        """
        self._config = config
        self._on_change = on_change
        self._on_failure = on_failure
        self._on_progress = on_progress
        self._needs = needs
        self._peers: Mapping[GatewayId, Peer] = {}
        self._lock = threading.Lock()
        self.all: Mapping[GatewayId, Link] = {}
        """Every link that there is now; replaced as a whole."""
        self._is_closed = False

    def to(self, site: str) -> list[Link]:
        """Return the links to a site's gateways."""
        index = self._config.sites.index(site)
        return [link for (other, _), link in self.all.items() if other == index]

    def meet(self, peers: Iterable[Peer]) -> None:
        """Take the addresses of all gateways that this one may have to dial.

        Raises:
            LocalProtocolError: one is missing, or this was called before.
        """
        if self._peers:
            raise LocalProtocolError("stdin: connect came twice")
        config = self._config
        known = {(peer.site, peer.gateway): peer for peer in peers}
        met: dict[GatewayId, Peer] = {}
        for figures in config.links:
            index = config.sites.index(figures.site)
            for gateway in range(config.gateways_per_site[index]):
                if (figures.site, gateway) not in known:
                    raise LocalProtocolError(
                        f"stdin: connect: no address of site {figures.site} gateway {gateway}"
                    )
                met[index, gateway] = known[figures.site, gateway]
        self._peers = met

    def add(self, sites: Iterable[int]) -> dict[GatewayId, Link]:
        """Make and return the links to some sites that there are not yet; the caller opens them.

        Of those that there are, the peers may just be making their own again.

        Raises:
            LocalProtocolError: this site has no link to one of them.
        """
        wanted = set(sites)
        unknown = wanted - {site for site, _ in self._peers}
        if unknown:
            names = ", ".join(self._config.sites[site] for site in sorted(unknown))
            raise LocalProtocolError(f"site {self._config.site} has no links with {names}")
        figures = {each.site: each for each in self._config.links}
        with self._lock:
            if self._is_closed:
                raise LocalProtocolError("this gateway is stopping")
            for sender, link in self.all.items():
                if sender[0] in wanted:
                    link.reached()  # it may have dropped its own while no plan needed it
            added = {
                sender: Link(
                    self._config,
                    figures[peer.site],
                    peer,
                    on_failure=functools.partial(self._failed, sender),
                    on_progress=self._on_progress,
                )
                for sender, peer in self._peers.items()
                if sender[0] in wanted and sender not in self.all
            }
            self.all = {**self.all, **added}
            self._on_change(self.all)
        return added

    def open(self, links: Iterable[Link], within_s: float) -> list[Failure]:
        """Open new links side by side; return what went wrong, in the order of time."""
        failures: list[Failure] = []

        def open_one(link: Link) -> None:
            try:
                link.open(within_s)
            except IsthmusError as error:
                failures.append(failure_of(error, link.peer.site))
            except Exception as error:  # noqa: BLE001 - a thread's root; it would pass for open
                _log.exception("the link to %s was not opened", link.peer)
                failures.append(failure_of(error))

        side_by_side([functools.partial(open_one, link) for link in links])
        return failures

    def drop(self, senders: Iterable[GatewayId]) -> None:
        """Close links as if they had never been made."""
        with self._lock:
            dropped = self._forget(senders)
        self._end(dropped)

    def missing(self, sites: Iterable[int]) -> list[str]:
        """Return the names of those sites to which there are no links."""
        with self._lock:
            there = {site for site, _ in self.all}
        return [self._config.sites[site] for site in sites if site not in there]

    def close(self) -> None:
        """End all links. Frames that were not acknowledged are dropped."""
        with self._lock:
            self._is_closed = True
            links = self.all
        for link in links.values():
            link.close()

    def _failed(self, sender: GatewayId, failure: Failure) -> None:
        with self._lock:  # so that who has a plan kept that needs it finds it gone, if it goes
            is_needed = self._needs(sender[0])
            dropped = [] if is_needed else self._forget([sender])
        if is_needed:
            self._on_failure(failure)
            return
        _log.warning("%s, whom no plan needs any more: %s", self._peers[sender], failure.message)
        self._end(dropped)

    def _forget(self, senders: Iterable[GatewayId]) -> list[Link]:
        """Take links out and return them; the lock is held."""
        forgotten = set(senders)
        links = [link for sender, link in self.all.items() if sender in forgotten]
        self.all = {sender: link for sender, link in self.all.items() if sender not in forgotten}
        self._on_change(self.all)
        return links

    def _end(self, links: Iterable[Link]) -> None:
        for link in links:
            link.close()
        self._on_progress()  # what waited for room on one of them need not any more


def side_by_side(calls: list[Callable[[], None]]) -> None:
    """Make blocking calls that report their own errors, each on a thread; return after all."""
    threads = [
        threading.Thread(target=call, name=f"peer-{index}", daemon=True)
        for index, call in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
