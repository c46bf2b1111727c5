"""A gateway: owns its parts, routes events between them, and shuts them down in order."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import wait
from pathlib import Path
from typing import Any, Final

from isthmus.protos.errors import IsthmusError, LocalProtocolError, failure_of
from isthmus.protos.failure import Failure, one_line, text_of
from isthmus.protos.frame import Frame
from isthmus.protos.metrics import AGAIN, ENTRY, FETCH_S, LINK, PROCESS, STATE_BYTES
from isthmus.protos.security import exchange_security
from isthmus.protos.usable_cores import usable_cores
from isthmus.sites.codecs.codec import Floats
from isthmus.sites.gateway import agent_port
from isthmus.sites.gateway.agent_port import Resume, Said, Settle
from isthmus.sites.gateway.config import GatewayConfig, GatewayId
from isthmus.sites.gateway.links.peer_links import Link, Opinion, PeerLinks
from isthmus.sites.gateway.links.peer_server import ExchangeServer
from isthmus.sites.gateway.links.send_queue import link_values
from isthmus.sites.gateway.links.transport import Peer
from isthmus.sites.gateway.links.wire_loop import WireLoop
from isthmus.sites.gateway.ranks.rank_server import LocalServer
from isthmus.sites.gateway.ranks.stall_reports import StallReports
from isthmus.sites.gateway.reduction.epochs import Gift
from isthmus.sites.gateway.reduction.executor import Executor, Settled, SiteLeftError
from isthmus.sites.gateway.reduction.kept_residuals import read_residuals, write_residuals
from isthmus.sites.gateway.reduction.pool import Pool
from isthmus.sites.gateway.reduction.residuals import KeptResiduals
from isthmus.sites.gateway.transfer.donors import bytes_per_s_to, donor
from isthmus.sites.gateway.transfer.state_fetch import StateFetch
from isthmus.sites.gateway.transfer.state_server import StateServer
from isthmus.sites.local.entry_folder import entry_folder, remove_states
from isthmus.sites.local.rank_messages import (
    Digest,
    Failed,
    Members,
    Metric,
    Reduce,
    Reduced,
    RoundEnds,
    StateProgress,
)
from isthmus.topology.spec.epoch import Handover, Runs
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.reduction_plan import ReductionPlan
from isthmus.topology.spec.run_spec import CodedPlan

_log = logging.getLogger(__name__)

_METRICS_EVERY_S: Final = 0.5
_END_S: Final = 5.0
_FAREWELL_S: Final = 2.0
"""Time allowed to tell peers that this gateway ends."""
_LAST_WORDS_S: Final = 0.25
"""Wait for last messages of ranks that the agent already saw end."""
_THREADS_MAX: Final = 8
"""Most threads for arithmetic. Each frame also needs the interpreter for some tenths of a
millisecond, which threads cannot share."""
_OPEN_SHARE: Final = 1 / 3
"""Share of `peer_lost_s` within which a link for new trees must answer first. An attempt that has
begun by then may take as long again.

The coordinator waits `peer_lost_s` in all while ranks elsewhere stand still. So a link that cannot
be opened is reported, by name, before that."""

Write = Callable[[Said], None]
"""Sends one message to the agent; may be called from any thread."""


def num_pool_threads(cores: int) -> int:
    """Return the threads for arithmetic: the event loop's thread keeps another core busy."""
    return max(1, min(_THREADS_MAX, cores - 1))


class EndingGateway:
    """Base of all gateways: ends at the first failure, or when the agent says so."""

    def __init__(self, config: GatewayConfig, write: Write) -> None:
        self._config = config
        self._write = write
        self._lock = threading.Lock()
        self.failure: Failure | None = None
        """The first failure. None while the gateway has not failed."""
        self._finished = threading.Event()
        """Set once this site is done: a peer that ends afterwards is no failure."""
        self._ended = threading.Event()
        self._wire: WireLoop | None = None
        self._work: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Start the event loop."""
        self._wire = WireLoop.acquire()

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait for a failure or `stop`; return False after `timeout_s` without either."""
        return self._ended.wait(timeout_s)

    def take_revoked(self, revoked: str) -> None:
        """Refuse the certificates in a list from now on; connections that show one soon break."""
        try:
            exchange_security(self._config.site).take_revoked(revoked)
        except IsthmusError as error:
            _log.warning("a list of revoked certificates is not used: %s", error)

    def stop(self) -> None:
        """End without a failure: the agent asked for it."""
        self._ended.set()

    def fail(self, failure: Failure) -> None:
        """Record the failure, unless there was one before, and end."""
        with self._lock:
            if self.failure is not None or self._finished.is_set() or self._ended.is_set():
                _log.info("after the end: %s: %s", failure.code, failure.message)
                return
            self.failure = failure
        _log.error("%s: %s", failure.code, failure.message)
        self._ended.set()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work on the event loop, from any thread; its error ends the gateway."""
        if self._wire is None:
            work.close()
            return
        self._wire.call(functools.partial(self._create, work))

    def _create(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._work.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not isinstance(error, IsthmusError | OSError):
            _log.error("a task of the gateway ended", exc_info=error)
        self.fail(failure_of(error, self._config.site))

    def _end_work(self) -> None:
        """Cancel all that `_begin` has begun, and wait for its end. Not on the event loop."""
        if self._wire is not None:
            wait([self._wire.run(self._cancel())], _END_S)

    async def _cancel(self) -> None:
        tasks = list(self._work)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _release(self) -> None:
        """Stop the event loop. Idempotent."""
        wire, self._wire = self._wire, None
        if wire is not None:
            WireLoop.release()


class Gateway(EndingGateway):
    """Reduces the buckets of its ranks. `start`, `connect`, then `wait_ended` and `close`."""

    def __init__(self, config: GatewayConfig, write: Write) -> None:
        super().__init__(config, write)
        self._pool = Pool(num_pool_threads(usable_cores()))
        self._local = LocalServer(config, self)
        self._executor = Executor(
            config,
            self._pool,
            on_reduced=self._reduced,
            on_failure=self.fail,
            on_round_ends=lambda round_: self._local.tell_all(RoundEnds(round=round_)),
        )
        self._stalls = StallReports(config, write)
        self._server = ExchangeServer(config, self)
        rates = bytes_per_s_to(config)
        self._state = StateServer(Path(config.state_folder), self._server.site_of, rates)
        self._server.methods.update(self._state.methods)
        self._fetches = False
        """Fetches the others' training state, or has: this site rejoins."""
        self._has_state = False
        """This site rejoins, and its ranks were told that the state is there."""
        self._links = PeerLinks(
            config,
            on_change=self._executor.connect,
            on_failure=self.fail,
            on_progress=self._executor.pump,
            needs=self._executor.needs,
            on_opinion=self._tell_opinion,
            server=self._server,
        )
        self._process = secrets.token_hex(4)
        """Tells this process's totals of links from those of one before or after it."""
        self._left: SiteLeftError | None = None
        """Set once this site leaves a run that goes on: the error that its ranks get."""
        self._has_peers = False
        """The agent has told the peers' addresses."""
        self._preparing = asyncio.Lock()
        """Held while links for a new plan are opened. Otherwise a second change would rely on links
        that the first is still opening and may close again."""

    def start(self) -> None:
        """Listen for ranks and peers, and report the addresses to the agent."""
        self._pool.start()
        self._local.start()
        address = self._server.start()
        super().start()
        self._write(agent_port.Listening(host=address.host, port=address.port))

    def connect(self, peers: tuple[Peer, ...], sites: Collection[str] | None = None) -> None:
        """Begin to dial the neighbouring gateways; report to the agent when all have answered.

        A later call only updates addresses, which the next `resume` may need.

        Args:
            peers: addresses of the gateways.
            sites: the sites that `peers` covers; None: all.

        Raises:
            LocalProtocolError: a gateway is missing from `peers`.
        """
        self._links.meet(peers, sites)
        if self._has_peers:
            return
        self._has_peers = True
        config = self._config
        links = self._links.add(
            site
            for site in config.plan.neighbours(config.site_index)
            if sites is None or config.sites[site] in sites
        )
        self._begin(self._open_links(list(links.values())))

    def settle(self, command: Settle) -> None:
        """Hold new rounds, stop all chunks if asked, and report progress to the agent.

        Waits for chunks that a thread is working on. If the new plan needs links, rounds go on
        until these are open; if they cannot be opened, the reason is reported instead.
        """
        if command.reduction is None:
            self._settle(command.epoch, stops=command.stops)
        else:
            self._begin(self._settle_for(command.epoch, command.reduction))

    def _settle(self, epoch: int, *, stops: bool) -> None:
        if stops:
            self._links.drop_before(epoch)
        settled = self._executor.settle(epoch, stops=stops)
        if stops:
            self._links.drop_before(epoch)  # frames queued meanwhile
        self._tell_settled(epoch, settled)

    async def _settle_for(self, epoch: int, reduction: CodedPlan) -> None:
        """Open the links of a new plan, then pause and report; or report why that failed."""
        why = fixed = ""
        try:
            async with self._preparing:
                dataclasses.replace(self._config, plan=reduction.plan, codecs=reduction.codecs)
                fixed = self._local.encoding.problem_with(reduction.plan, reduction.codecs)
                why = fixed or await self._connect(reduction.plan)
            if not why:
                await asyncio.to_thread(self._settle, epoch, stops=False)
        except ConfigError as error:
            why = error.problems[0].message
        except IsthmusError as error:
            why = one_line(str(error))
        if why:
            settled = Settled(self._executor.round, (), {})
            self._tell_settled(epoch, settled, why, codecs_fixed=bool(fixed))

    async def _connect(self, plan: ReductionPlan) -> str:
        """Open the links that `plan` needs and that do not exist; return why it failed, or ""."""
        added = self._links.add(plan.neighbours(self._config.site_index))
        failures = await self._links.open(added.values(), _OPEN_SHARE * self._config.peer_lost_s)
        if failures:
            self._links.drop(added)
            return failures[0].message
        return ""

    def _tell_settled(
        self, epoch: int, settled: Settled, why: str = "", *, codecs_fixed: bool = False
    ) -> None:
        self._write(
            agent_port.Settled(
                epoch=epoch,
                round=settled.round,
                finished=settled.finished,
                chains=settled.chains,
                why=why,
                codecs_fixed=codecs_fixed,
            )
        )

    def cancel(self, epoch: int) -> None:
        """Go on in the current epoch: the announced change is called off."""
        self._executor.cancel(epoch)

    def resume(self, command: Resume) -> None:
        """Go on in a new epoch, and report it to the agent.

        New links are opened in the background; links that no epoch needs are closed. If this site
        is no longer a member, it leaves once the earlier rounds are complete.

        Raises:
            LocalProtocolError: the command describes no valid epoch of this run.
        """
        config, epoch = self._config, command.epoch
        plan, codecs = epoch.reduction.plan, epoch.reduction.codecs
        try:
            dataclasses.replace(config, plan=plan, codecs=codecs)
            gifts = [
                Gift(config.index_of(each.donor), config.index_of(each.receiver), *_what(each))
                for each in command.handovers
            ]
            members = {config.index_of(name) for name in epoch.members}
        except ConfigError as error:
            raise LocalProtocolError(f"resume: {error.problems[0].message}") from error
        wanted = {each.receiver for each in gifts if each.donor == config.site_index}
        if not config.listens:  # donors cannot dial
            wanted |= {each.donor for each in gifts if each.receiver == config.site_index}
        added = self._links.add({*plan.neighbours(config.site_index), *wanted})
        announced = Members(
            epoch=epoch.number,
            from_round=epoch.from_round,
            sites=epoch.members,
            enters=command.enters,
            follows=epoch.follows,
            state=str(entry_folder(Path(config.state_folder), epoch.number)),
            shares=epoch.shares,
            rung=epoch.rung,
        )
        follows = config.site in epoch.follows
        if follows and config.site in command.enters:
            if not self._fetches:
                self._fetches = True
                self._begin(self._take_state(announced))
        else:  # Ranks must know the members before any round can begin.
            self._local.tell_all(announced)
        executor = self._executor
        awaits_entry = bool(command.enters) and not follows
        ruling = epoch.number, epoch.from_round, plan, codecs
        begun: int | None
        if awaits_entry:
            begun = executor.await_entry(*ruling)
        else:
            executor.resume(*ruling, gifts)
            begun = executor.round
        self._links.drop_sites(lambda site: site not in members and not executor.needs(site))
        self._begin(self._open_more(list(added.values())))
        _log.info("epoch %d, from round %d on", epoch.number, epoch.from_round)
        if begun is not None:
            self._tell_resumed(epoch.number, begun)

    async def _take_state(self, members: Members) -> None:
        """Fetch the training state for a rejoin, then tell the ranks."""
        config = self._config
        donors = [
            donor(config, peer, functools.partial(self._links.peer, at))
            for at, peer in self._links.peers.items()
            if peer.site in members.sites and peer.site != config.site
        ]
        timeout_s = 2 * config.peer_lost_s
        fetch = StateFetch(donors, members.epoch, Path(members.state), timeout_s=timeout_s)
        begun_s = time.monotonic()
        if config.fetches_state:
            await asyncio.to_thread(
                remove_states, Path(config.state_folder), but=Path(members.state)
            )
            await fetch.run()
        else:
            await fetch.wait_for_other()
        values = {
            STATE_BYTES: float(fetch.fetched_bytes),
            FETCH_S: time.monotonic() - begun_s,
            AGAIN: float(fetch.num_again),
        }
        _log.info("fetched the training state of the other sites: %s", values)
        self._write(Metric(kind=ENTRY, values=values))
        await asyncio.to_thread(self._local.tell_all, members)
        self._stalls.note(lambda watch, now_s: watch.begin_anew(now_s))
        self._has_state = True

    def close(self) -> None:
        """Say goodbye to ranks, peers and agent, and end all work. Idempotent."""
        self._ended.set()
        self._end_work()
        farewell = self.failure
        if self._left is not None:
            self._local.fail_all(failure_of(self._left, self._config.site))
        if farewell is not None:
            self._write(Failed(failure=farewell))
        elif not self._finished.wait(_LAST_WORDS_S):
            farewell = Failure(
                code="PEER_LOST",
                message=f"site {self._config.site} was stopped",
                is_collateral=True,
            )
        if farewell is not None:
            self._local.fail_all(farewell)
        else:
            self._drain()
        self._links.leave(farewell, _FAREWELL_S)
        self._report_links()
        self._executor.close()
        self._links.close()
        self._server.close()
        self._pool.close()
        self._local.close()
        self._release()

    # ---------------------------------------------------------------- what others report

    def receive(self, sender: GatewayId, frame: Frame) -> None:
        """Accept a frame from a peer."""
        self.greeted(sender)
        self._executor.receive(sender, frame)

    def greeted(self, sender: GatewayId) -> None:
        """Note that a peer's heartbeat has reached this gateway."""
        link = self._links.all.get(sender)
        if link is not None:
            link.reached()

    def peer_left(self, sender: GatewayId) -> None:
        """Note that a peer has finished its run."""
        link = self._links.all.get(sender)
        if link is not None:
            link.peer_left()

    def peer_ended(self, sender: GatewayId, why: str) -> None:
        """Handle a peer that ends before its run has."""
        self._links.ended(sender, why)

    def joined(self, ranks: list[int]) -> None:
        """All local ranks have connected."""
        self._stalls.begin(ranks)
        self._write(agent_port.Joined(ranks=tuple(ranks)))

    def handed(self, rank: int, round_: int) -> None:
        """A rank's script has submitted a bucket."""
        self._stalls.note(lambda watch, now_s: watch.handed(rank, round_, now_s))

    def moved(self, rank: int) -> None:
        """A rank does not hang, though it has submitted nothing."""
        self._stalls.note(lambda watch, now_s: watch.moved(rank, now_s))

    def state_progress(self, rank: int, progress: StateProgress) -> None:
        """A rank reports progress or failure in writing its part of the state for others."""
        self._state.note(rank, progress)

    def rank_left(self, rank: int) -> None:
        """A rank has left."""
        self._write(agent_port.RankLeft(rank=rank, round=self._executor.round))
        self._stalls.note(lambda watch, _: watch.left(rank))

    def _reduced(self, rank: int, reduced: Reduced) -> None:
        self._stalls.note(lambda watch, now_s: watch.returned(rank, now_s))
        self._local.reduced(rank, reduced)

    def post(self, rank: int, request: Reduce, values: Floats) -> None:
        """Start the reduction of a rank's part of a bucket."""
        self._stalls.note(lambda watch, now_s: watch.posted(rank, now_s))
        try:
            if begun := self._executor.post(rank, request, values):
                self._tell_resumed(begun.epoch, request.round, begun.behind)
        except SiteLeftError as error:
            self._leave(error)

    def _leave(self, why: SiteLeftError) -> None:
        """Report that this site has left, once every local rank has all its results."""
        with self._lock:
            is_first, self._left = self._left is None, why

        async def tell() -> None:
            await asyncio.to_thread(self._executor.wait_complete)
            self._finished.set()
            self._write(agent_port.Left())

        if is_first:
            self._begin(tell())

    def _tell_resumed(self, epoch: int, round_: int, behind: int = 0) -> None:
        self._write(agent_port.Resumed(epoch=epoch, round=round_, behind=behind))

    def keep_residuals(self, rank: int, path: Path) -> None:
        """Copy the residuals of a rank's shards; write the copy in the background."""
        residual = self._executor.residuals_of(rank)
        self._begin(asyncio.to_thread(self._write_residuals, path, residual))

    def restore_residuals(self, path: Path) -> None:
        """Load residuals from a checkpoint's file."""
        self._executor.restore(read_residuals(path, self._config.chunk_numel))

    def _write_residuals(self, path: Path, residual: KeptResiduals) -> None:
        try:
            write_residuals(path, residual, self._config.chunk_numel)
        except OSError as error:  # the rank's wait times out, and it reports that
            _log.warning("residuals cannot be written: %s", text_of(error))

    def round_ends(self, message: RoundEnds) -> None:
        """Tell the other sites that a round ends, or this site's ranks that it is passed over."""
        if message.is_passed_over:
            self._local.tell_all(message)
        else:
            self._executor.end_round(message.round)

    def passed(self, message: Metric | Digest) -> None:
        """Pass a rank's message on to the agent."""
        self._write(message)

    def left(self) -> None:
        """All local ranks have left."""
        self._finished.set()

    # ---------------------------------------------------------------- links

    def _drain(self) -> None:
        """Wait until peers have acknowledged every frame that they still need."""
        deadline_s = time.monotonic() + self._config.peer_lost_s
        for link in self._links.all.values():
            if not link.drain(deadline_s):
                _log.warning("%s has not acknowledged everything", link.peer)

    async def _open_links(self, links: list[Link]) -> None:
        """Greet all peers; then report the links' traffic until the gateway ends."""
        await self._open_more(links)
        if self._ended.is_set():
            return
        self._write(agent_port.Connected())
        while not self._ended.is_set():
            await asyncio.sleep(_METRICS_EVERY_S)
            self._report_links()
            results_wait_s = self._executor.results_wait_s if self._has_state else math.inf
            self._stalls.report(_METRICS_EVERY_S, results_wait_s)

    async def _open_more(self, links: list[Link]) -> None:
        for failure in await self._links.open(links):
            self.fail(failure)

    def _tell_opinion(self, site: int, opinion: Opinion | None) -> None:
        """Report that a site is suspected (None: reachable again), unless this site is done."""
        if self._finished.is_set() or self._ended.is_set():
            return
        name = self._config.sites[site]
        if opinion is None:
            self._write(agent_port.Reached(site=name))
        else:
            self._write(agent_port.Suspect(site=name, is_gone=opinion.is_gone, why=opinion.why))

    def _report_links(self) -> None:
        """Report the totals of each outgoing link, summed over the gateways of the peer site."""
        for figures in self._config.links:
            totals = self._links.totals(figures.site)
            if not totals:
                continue
            self._write(
                Metric(
                    kind=LINK,
                    step=max(self._executor.round, 0),
                    values=link_values(totals),
                    labels={
                        "source": self._config.site,
                        "target": figures.site,
                        "gateway": str(self._config.gateway),
                        PROCESS: self._process,
                    },
                )
            )


def _what(handover: Handover) -> tuple[int, int, Runs]:
    return handover.round, handover.bucket, handover.runs
