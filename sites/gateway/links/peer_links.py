"""The sending side: a `Link` to each gateway of another site, and `PeerLinks`, all of them.

A link queues frames in an outbox (`send_queue.py`). Streams carry them, each on its own connection
(`streams.py`); `congestion/connections.py` decides how many, and `congestion/kernel.py` configures
them. `peer_watch.py` watches whether the peer lives. All of it runs as tasks of the event loop.
Where this gateway accepts no connections, the link also offers some for the peer's calls
(`reversed_calls.py`).

A link is made when a plan first needs it. A link that is lost while no plan needs it is only
closed, and made again when a plan does.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from isthmus.protos.errors import IsthmusError, LocalProtocolError, PeerLostError, failure_of
from isthmus.protos.exchange.v1.exchange_pb2 import LeaveRequest, LeaveResponse
from isthmus.protos.failure import Failure
from isthmus.protos.frame import ChunkKey, Frame, Kind, pack
from isthmus.sites.gateway.config import GatewayConfig, GatewayId, PeerLink
from isthmus.sites.gateway.links.calls import Target, ask, deadline
from isthmus.sites.gateway.links.congestion.connections import ChannelGrowth
from isthmus.sites.gateway.links.congestion.kernel import use_pauses
from isthmus.sites.gateway.links.congestion.rate import window_bytes
from isthmus.sites.gateway.links.peer_server import ExchangeServer
from isthmus.sites.gateway.links.peer_watch import Judge, PeerWatch
from isthmus.sites.gateway.links.reversed_calls import Offers, Servant
from isthmus.sites.gateway.links.send_queue import LinkTotals, Outbox, Outgoing, outgoing
from isthmus.sites.gateway.links.status import CallError
from isthmus.sites.gateway.links.streams import Streams
from isthmus.sites.gateway.links.transport import (
    HELLO_METHOD,
    LEAVE_METHOD,
    Peer,
    details,
    say_hello,
)
from isthmus.sites.gateway.links.wire_loop import WireLoop

_log = logging.getLogger(__name__)

_END_S = 2.0
_BDP_AHEAD = 2
_AHEAD_MIN_BYTES = 4 << 20
_COLD_MIN_BYTES = 256 << 10
"""A link with a smaller BDP is warm soon enough without padding."""
_PADDING_BYTES = 256 << 10
_PADDING_BDP = 4
"""Padding in BDPs until TCP has found a link's rate: bytes in flight double in each round trip, up
to two BDPs."""


class Link:
    """The outgoing link to one peer. `open`, `send`, `drain` before a clean end, `close`.

    Coroutines run on the event loop; other methods may be called from any thread.
    """

    def __init__(
        self,
        config: GatewayConfig,
        link: PeerLink,
        peer: Target,
        wire: WireLoop,
        *,
        on_failure: Callable[[Failure], None],
        on_progress: Callable[[], None],
        on_suspect: Judge = lambda *_: None,
        on_reached: Callable[[], None] = lambda: None,
        servant: Servant | None = None,
    ) -> None:
        """`on_failure` is called once, on the event loop.

        `on_progress` is called when a frame has left the queue. Neither may block. `on_suspect` and
        `on_reached` are `PeerWatch`'s. With a `servant` the peer is dialled for both directions,
        and the servant answers its calls.
        """
        self.peer = peer
        self.rtt_s = link.rtt_s
        self.bytes_per_s = link.bytes_per_s
        self.ahead_bytes = max(int(_BDP_AHEAD * link.bytes_per_s * link.rtt_s), _AHEAD_MIN_BYTES)
        """Bytes of frames that may be encoded before the link can take them.

        Chunks are admitted in order. So a link that is behind by this much holds up the others. On
        narrow links the recovery of a lost packet takes many round trips.
        """
        self._config = config
        self._wire = wire
        self._on_failure = on_failure
        self._on_progress = on_progress
        self._outbox = Outbox(window_bytes(config, link), link.rtt_s)
        self._watch = PeerWatch(
            config, peer, self._outbox, on_suspect=on_suspect, on_reached=on_reached
        )
        self._look: asyncio.Task[None] | None = None
        """The latest check whether the peer is gone."""
        self._streams = Streams(
            self._outbox,
            self._watch,
            config=config,
            soon=wire.call,
            set_up=lambda connection: self._growth.set_up(connection),
            on_failure=self._broke,
            on_broken=self._look_soon,
            on_progress=on_progress,
        )
        ends = (config.site_index, config.index_of(link.site))
        self._growth = ChannelGrowth(
            config.channels_per_link,
            link,
            peer,
            self._outbox,
            self._streams,
            # Elements are divided among a site's gateways; this many send over the link.
            num_senders=max(config.gateways_per_site[site] for site in ends),
        )
        self._offers: Offers | None = None
        if servant is not None:
            assert isinstance(peer, Peer), "one of both can be dialled"
            self._offers = Offers(config, peer, servant, lambda: self._watch.session)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def unsent_bytes(self) -> int:
        """Bytes that wait for the window."""
        return self._outbox.unsent_bytes

    @property
    def num_channels(self) -> int:
        """Connections that carry frames in parallel."""
        return self._streams.num_streams

    async def open(self, within_s: float | None = None) -> None:
        """Greet the peer until it answers, then start the streams.

        Without `within_s` the greeting is repeated until the link is closed.

        Raises:
            ConfigMismatchError: the peer refused: another configuration or protocol.
            StaleGenerationError: the peer refused: another run or generation.
            PeerLostError: no answer in time, as `PeerWatch.greet` counts it.
        """
        greeting = asyncio.create_task(self._watch.greet(within_s), name=self._named("greet"))
        self._tasks.add(greeting)
        greeting.add_done_callback(self._tasks.discard)
        await asyncio.wait([greeting])
        if greeting.cancelled() or self.is_closed:
            raise PeerLostError("the gateway was stopped", self.peer.site)
        greeting.result()
        self._outbox.warm_up(self._padding())
        self._wire.carry(self, self.rtt_s)
        self._growth.begin()
        self._start(self._watch.run(), "watch")
        self._start(self._growth.run(), "growth")
        pauses = use_pauses(lambda: self._streams.connections, self._outbox, self.rtt_s)
        self._start(pauses, "pauses")
        if self._offers is not None:
            self._start(self._offers.keep(), "offers")

    def _padding(self) -> Iterator[Outgoing]:
        """Yield padding that warms up connections while ranks are not ready yet."""
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
        """Queue a frame and return its size in bytes; 0 if the peer has left, and is suspected."""
        num_bytes = self._outbox.push(frame, raw_bytes)
        if not num_bytes and not self._outbox.closed.is_set():
            self.ended(f"{self.peer} left before the run's end")
        return num_bytes

    def drop_before(self, epoch: int) -> None:
        """Drop queued frames of older epochs."""
        self._outbox.drop_before(epoch)

    def ended(self, why: str) -> None:
        """The peer has said that it ends."""
        self._watch.suspect(why, is_gone=True, for_good=True)

    @property
    def is_closed(self) -> bool:
        """Whether this side has ended the link."""
        return self._outbox.closed.is_set()

    def reached(self) -> None:
        """Note that the peer reached this gateway over its own link, or restart its deadline."""
        self._watch.reached()

    def peer_left(self) -> None:
        """The peer has finished: it needs no more frames, and may end."""
        self._outbox.leave()
        self._on_progress()

    def drain(self, deadline_s: float) -> bool:
        """Wait until everything is acknowledged; return whether it was by then (monotonic)."""
        return self._outbox.wait_empty(deadline_s)

    async def leave(self, failure: Failure | None, timeout_s: float) -> None:
        """Tell the peer that this gateway ends, without a guarantee that it arrives."""
        if self._outbox.has_left:
            return
        request = LeaveRequest(rank=-1)
        if failure is not None:
            request.code, request.message = failure.code, failure.message
            request.site, request.rank = failure.site or self._config.site, failure.rank
        config, dial = self._config, self.peer.dial
        try:
            async with deadline(timeout_s):
                session = self._watch.session
                if not session:  # it ends before it was ever connected
                    async with dial(config, "", HELLO_METHOD) as call:
                        session = (await say_hello(call, config)).session
                request.session = session
                async with dial(config, session, LEAVE_METHOD) as call:
                    await ask(call, request, LeaveResponse, is_last=True)
        except CallError as error:
            _log.info("could not tell %s that this gateway ends: %s", self.peer, details(error))

    def totals(self) -> LinkTotals:
        """Return the link's totals so far."""
        return self._outbox.totals()

    def close(self) -> Future[None]:
        """End the link, and return when that is done. Frames not acknowledged are dropped."""
        self._outbox.close()
        return self._wire.run(self._end())

    async def _end(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._streams.end()
        self._wire.carry(self, None)
        await self._watch.hang_up()

    def _fail(self, failure: Failure) -> None:
        if self._outbox.is_over:
            return
        self._outbox.leave()
        self._on_failure(failure)

    def _look_soon(self) -> None:
        """Check whether the peer is gone, unless a check is under way."""
        if self._look is None or self._look.done():
            self._look = self._start(self._watch.look_now(), "look")

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=self._named(name))
        self._tasks.add(task)
        task.add_done_callback(self._task_over)
        return task

    def _named(self, name: str) -> str:
        return f"{name}-{self.peer.site}-{self.peer.gateway}"

    def _task_over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broke(error)

    def _broke(self, error: BaseException) -> None:
        """Report what ended a task or a stream for good."""
        if isinstance(error, IsthmusError):
            self._fail(failure_of(error, self.peer.site))
            return
        _log.error("a task of the link to %s ended", self.peer, exc_info=error)
        self._fail(failure_of(error))


@dataclass(frozen=True, slots=True)
class Opinion:
    """A gateway's suspicion about a site that it does not reach."""

    is_gone: bool
    """The site said that it ends, or refuses connections. False: it is silent."""
    why: str


class PeerLinks:
    """All links of a gateway. `meet` the peers, then `add` sites.

    Coroutines run on the event loop; other methods may be called from any thread.
    """

    def __init__(
        self,
        config: GatewayConfig,
        *,
        on_change: Callable[[Mapping[GatewayId, Link]], None],
        on_failure: Callable[[Failure], None],
        on_progress: Callable[[], None],
        needs: Callable[[int], bool],
        on_opinion: Callable[[int, Opinion | None], None] = lambda *_: None,
        server: ExchangeServer | None = None,
    ) -> None:
        """`on_change` gets all links, as an immutable mapping, when some come or go.

        `on_failure` is called when a link is lost that a plan needs, by `needs(site index)`.
        `on_progress` is called when a frame has left a queue, and must not block. `on_opinion` gets
        a site's index and a suspicion, or None when all its linked gateways are reached again. The
        `server` is needed if one of two sites cannot be dialled.
        """
        self._config = config
        self._on_change = on_change
        self._on_failure = on_failure
        self._on_progress = on_progress
        self._needs = needs
        self._on_opinion = on_opinion
        self._server = server
        self._suspected: set[GatewayId] = set()
        self._opinion = threading.Lock()
        """Guards `_suspected`. Its holders never wait: a suspicion may come from a sender, which
        may hold a lock that `needs` wants."""
        self._peers: Mapping[GatewayId, Target] = {}
        self._wire: WireLoop | None = None
        self._ends: list[Future[None]] = []
        """Ends of links, which may not have come yet."""
        self._lock = threading.Lock()
        self.all: Mapping[GatewayId, Link] = {}
        """All current links by peer; the mapping is replaced, never changed."""
        self._past: dict[GatewayId, LinkTotals] = {}
        """What earlier links to each peer have carried."""
        self._is_closed = False

    @property
    def peers(self) -> Mapping[GatewayId, Target]:
        """All known peers."""
        return self._peers

    def peer(self, at: GatewayId) -> Target:
        """Return the current address of a gateway."""
        return self._peers[at]

    def totals(self, site: str) -> list[LinkTotals]:
        """Return what was sent to each of a site's gateways, over all links that were ever made."""
        index = self._config.sites.index(site)
        with self._lock:
            found = {peer: past for peer, past in self._past.items() if peer[0] == index}
            for peer, link in self.all.items():
                if peer[0] == index:
                    found[peer] = link.totals().after(found.get(peer, LinkTotals()))
        return list(found.values())

    def meet(self, peers: Iterable[Peer], sites: Collection[str] | None = None) -> None:
        """Set the addresses of all gateways that this one may have to dial.

        Later calls replace earlier addresses, and drop links to processes that were replaced.

        Args:
            peers: addresses of the gateways.
            sites: the sites that `peers` covers; None: all that this site has links to.

        Raises:
            LocalProtocolError: a gateway is missing from `peers`.
        """
        config = self._config
        known = {(peer.site, peer.gateway): peer for peer in peers}
        met: dict[GatewayId, Target] = {}
        for figures in config.links:
            if sites is not None and figures.site not in sites:
                continue
            index = config.sites.index(figures.site)
            for gateway in range(config.gateways_per_site[index]):
                if (figures.site, gateway) not in known:
                    raise LocalProtocolError(
                        f"stdin: connect: no address of site {figures.site} gateway {gateway}"
                    )
                met[index, gateway] = known[figures.site, gateway]
                if figures.dials_in:
                    assert self._server is not None
                    met[index, gateway] = self._server.inbound_proxy((index, gateway))
        moved = [each for each, peer in met.items() if self._peers.get(each, peer) != peer]
        self._peers = {**self._peers, **met}
        self.drop(moved)

    def add(self, sites: Iterable[int]) -> dict[GatewayId, Link]:
        """Make and return the missing links to some sites; the caller opens them.

        On existing links the peer may just be remaking its own, so its deadline restarts.

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
            wire = self._wire = self._wire or WireLoop.acquire()
            for sender, link in self.all.items():
                if sender[0] in wanted:
                    link.reached()  # the peer may have dropped its link while no plan needed it
            added = {
                sender: Link(
                    self._config,
                    figures[peer.site],
                    peer,
                    wire,
                    on_failure=functools.partial(self._failed, sender),
                    on_progress=self._on_progress,
                    on_suspect=functools.partial(self._suspect, sender),
                    on_reached=functools.partial(self._reached, sender),
                    servant=None if self._config.listens else self._server,
                )
                for sender, peer in self._peers.items()
                if sender[0] in wanted and sender not in self.all
            }
            self.all = {**self.all, **added}
            self._on_change(self.all)
        return added

    async def open(self, links: Iterable[Link], within_s: float | None = None) -> list[Failure]:
        """Open new links in parallel; return the failures in order of time.

        Without `within_s` a link is tried until it is open, or dropped.
        """
        failures: list[Failure] = []

        async def open_one(link: Link) -> None:
            try:
                await link.open(within_s)
            except IsthmusError as error:
                if not link.is_closed:
                    failures.append(failure_of(error, link.peer.site))
            except Exception as error:  # noqa: BLE001 - a task's root; it would pass for open
                _log.exception("the link to %s was not opened", link.peer)
                failures.append(failure_of(error))

        await asyncio.gather(*map(open_one, links))
        return failures

    def drop(self, senders: Iterable[GatewayId]) -> None:
        """Close and forget links."""
        with self._lock:
            dropped = self._forget(senders)
        self._end(dropped)

    def drop_sites(self, is_over: Callable[[int], bool]) -> None:
        """Close the links to some sites."""
        with self._lock:
            dropped = self._forget([sender for sender in self.all if is_over(sender[0])])
        self._end(dropped)

    def drop_before(self, epoch: int) -> None:
        """Drop queued frames of older epochs."""
        for link in self.all.values():
            link.drop_before(epoch)

    def ended(self, sender: GatewayId, why: str) -> None:
        """A peer has said that it ends, and its run has not."""
        link = self.all.get(sender)
        if link is not None:
            link.ended(why)
        else:
            self._suspect(sender, True, why)

    def _suspect(self, sender: GatewayId, is_gone: bool, why: str) -> None:
        with self._opinion:
            self._suspected.add(sender)
        self._on_opinion(sender[0], Opinion(is_gone, why))

    def _reached(self, sender: GatewayId) -> None:
        with self._opinion:
            self._suspected.discard(sender)
            is_left = any(site == sender[0] for site, _ in self._suspected)
        if not is_left:
            self._on_opinion(sender[0], None)

    def leave(self, failure: Failure | None, timeout_s: float) -> None:
        """Tell all peers that this gateway ends, and wait. Not on the event loop."""
        if self._wire is None:
            return
        leaving = [self._wire.run(link.leave(failure, timeout_s)) for link in self.all.values()]
        wait(leaving, timeout_s + _END_S)

    def close(self) -> None:
        """End all links, and wait. Frames that were not acknowledged are dropped.

        Not on the event loop.
        """
        with self._lock:
            self._is_closed = True
            wire, self._wire = self._wire, None
        if wire is None:
            return
        wait([*self._ends, *(link.close() for link in self.all.values())], _END_S)
        WireLoop.release()

    def _failed(self, sender: GatewayId, failure: Failure) -> None:
        with self._lock:  # so that a plan kept meanwhile sees the link gone
            is_needed = self._needs(sender[0])
            dropped = [] if is_needed else self._forget([sender])
        if is_needed:
            self._on_failure(failure)
            return
        _log.warning("%s, which no plan needs any more: %s", self._peers[sender], failure.message)
        self._end(dropped)

    def _forget(self, senders: Iterable[GatewayId]) -> list[Link]:
        """Remove links and return them; the lock is held."""
        forgotten = set(senders)
        with self._opinion:
            self._suspected -= forgotten
        links = {sender: link for sender, link in self.all.items() if sender in forgotten}
        for sender, link in links.items():
            totals = link.totals().after(self._past.get(sender, LinkTotals()))
            self._past[sender] = dataclasses.replace(totals, idle_rtt_s=None)
        self.all = {sender: link for sender, link in self.all.items() if sender not in forgotten}
        self._on_change(self.all)
        return list(links.values())

    def _end(self, links: Iterable[Link]) -> None:
        ends = [link.close() for link in links]
        with self._lock:
            self._ends = [*ends, *(each for each in self._ends if not each.done())]
        self._on_progress()  # chunks that waited for room on these links may go on
