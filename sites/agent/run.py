"""One run at a site: its stages in order, and the one way in which it ends.

Whatever ends a run (all ranks are done, a failure, the coordinator's stop), the same follows: every
process is ended, the logs are shipped, then SiteEnded is sent to the coordinator.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from isthmus.protos import metrics
from isthmus.protos.checkpoint.store import stores_of
from isthmus.protos.control.v1.control_pb2 import (
    AgentMessage,
    CancelSettle,
    Digest,
    GatewayEndpoint,
    Metric,
    Prepare,
    Reached,
    Resume,
    Resumed,
    RunReport,
    Settle,
    Settled,
    SiteDone,
    SiteEnded,
    SitePrepared,
    SiteRunning,
    Stall,
)
from isthmus.protos.failure import Failure
from isthmus.sites.agent.carried import fetch
from isthmus.sites.agent.last_checkpoint import save_before_end
from isthmus.sites.agent.logs import LogShipper
from isthmus.sites.agent.rank_paces import RankPaces
from isthmus.sites.agent.session import Session
from isthmus.sites.agent.site_failures import awaits_cause, order_failures
from isthmus.sites.agent.site_gateways import EpochChange, Opinions
from isthmus.sites.agent.site_processes import Place, SiteProcesses
from isthmus.sites.agent.stalls import Stalls
from isthmus.sites.gateway import agent_port
from isthmus.sites.local import rank_messages
from isthmus.sites.node.carried import blobs_of
from isthmus.sites.node.children import kill_descendants
from isthmus.sites.node.failures import SiteError
from isthmus.sites.node.node import Listener
from isthmus.sites.node.order import SiteOrder, make_order, read_spec
from isthmus.sites.node.site_data import DataAtSite

_STEP_TIMES = 32
"""Number of recent step times kept; the shortest bounds how fast the run may go."""
_JOINED_S = 2.0
"""Time for a gateway's report that ranks joined, after they have ended."""
_CAUSE_S = 10.0
"""Time for a report of the first failure, once others report that they lost a rank."""
_FLUSH_S = 2.0
"""Time for the last log lines."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Departures:
    """Departures from a run: of the site while others continue, or of ranks that are finished."""

    is_site_out: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the site has left a run that goes on."""
    num_gateways: int = 0
    """Number of gateways that have left it."""
    left_s: dict[int, float] = field(default_factory=dict)
    """When finished ranks left, by rank."""
    last_rounds: dict[int, int] = field(default_factory=dict)
    """Latest round of the gateway when a rank left, by rank."""

    def add_gateway(self, num_gateways: int) -> None:
        """Note that one of the site's gateways has left; with the last one, the site has."""
        self.num_gateways += 1
        if self.num_gateways == num_gateways:
            self.is_site_out.set()

    def add_rank(self, rank: int, last_round: int) -> None:
        """Note that a finished rank has left."""
        self.left_s[rank] = time.monotonic()
        self.last_rounds[rank] = last_round


@dataclass(slots=True)
class _Steps:
    """The latest steps of the site, and how long they took."""

    latest: int = 0
    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=_STEP_TIMES))

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Note a step that has ended."""
        self.latest = step
        if metrics.STEP_S in values:
            self.times_s.append(values[metrics.STEP_S])


class SiteRun:
    """Owns a run's processes here.

    `execute` carries it out; `start`, `stop` and `fail` steer it.
    """

    def __init__(self, prepare: Prepare, place: Place, session: Session) -> None:
        self.run_id = prepare.run_id
        self.generation = prepare.generation
        self._prepare = prepare
        self._place = place
        self._session = session
        self._started: asyncio.Future[Sequence[GatewayEndpoint]] = asyncio.Future()
        self._ending = asyncio.Event()
        self._released = asyncio.Event()
        """Set once no other site needs this one any more."""
        self._wants_state = asyncio.Event()
        """Where the site returns, its ranks wait for the others' state."""
        self._departures = _Departures()
        self._failures: list[Failure] = []
        self._has_news = asyncio.Event()
        """Set by each failure, by each rank that has left, and by `stop`."""
        self._grace_s: float | None = None
        self._steps = _Steps()
        self._rank_paces = RankPaces()
        self._order: SiteOrder | None = None
        self._processes: SiteProcesses | None = None
        self._epochs: EpochChange | None = None
        self._opinions = Opinions(place.site)
        self._stalls: Stalls | None = None

    @property
    def coordinator_s(self) -> float:
        """How long the site goes on without a coordinator; 0 before the run's order is read."""
        if self._order is None:
            return 0.0
        return self._order.spec.timeouts.coordinator_s

    @property
    def _num_nodes(self) -> int:
        return self._order.site.nodes if self._order is not None else 1

    def is_for(self, run_id: str, generation: int) -> bool:
        """Whether a message is about this run."""
        return (run_id, generation) == (self.run_id, self.generation)

    def start(self, endpoints: Sequence[GatewayEndpoint]) -> None:
        """Connect to these gateways, then start the ranks.

        A second call only updates addresses.
        """
        if not self._started.done():
            self._started.set_result(endpoints)
        elif self._processes is not None:
            self._processes.tell_addresses(endpoints)

    def report(self) -> RunReport:
        """Return a report of the run for a coordinator that the agent joins."""
        return RunReport(
            **self._name,
            epoch=self._epochs.epoch if self._epochs is not None else 0,
            suspects=self._opinions.suspects(),
        )

    def settle(self, message: Settle) -> None:
        """Pass on that the run's epoch will change."""
        if self._epochs is not None:
            self._epochs.settle(message)

    def resume(self, message: Resume) -> None:
        """Go on in a new epoch."""
        if self._epochs is not None:
            if message.endpoints and self._processes is not None:
                self._processes.tell_addresses(message.endpoints)
            try:
                epoch = self._epochs.resume(message)
            except SiteError as error:
                self._fail_stage(error)
                return
            for site in self._opinions.begin(epoch, message.enters):
                self._put(reached=Reached(**self._name, site=site))

    def cancel_settle(self, message: CancelSettle) -> None:
        """Pass on that the announced epoch is called off."""
        if self._epochs is not None:
            self._epochs.cancel(message.epoch)

    def take_revoked(self, revoked: str) -> None:
        """Have the gateways refuse the certificates in a list, also those that start later."""
        self._prepare.revoked = revoked
        if self._processes is not None:
            self._processes.tell_gateways(agent_port.Revoke(list=revoked))

    def tell_trouble(self, what: str) -> None:
        """Have people see something that is wrong here, and ends nothing."""
        labels = {metrics.REASON: what}
        self._on_metric(rank_messages.Metric(kind=metrics.TROUBLE, labels=labels))

    def release(self) -> None:
        """Let the gateways end: all sites are done."""
        self._released.set()

    async def save(self, within_s: float) -> str:
        """Have all sites write a checkpoint, if the run keeps any, within `within_s`.

        Returns why a checkpoint is missing; empty: none is.
        """
        if self._order is None or self._steps.latest == 0 or self._grace_s is not None:
            return ""
        checkpoint = self._order.spec.job.checkpoint
        if checkpoint is None:
            return ""
        why_not = await save_before_end(
            stores_of(checkpoint.to, self.run_id),
            self._steps.latest,
            list(self._steps.times_s),
            within_s,
            self._ending,
            sync_every=self._order.spec.longest_regime.sync_every,
        )
        if why_not:
            log.warning("no checkpoint: %s", why_not)
        return why_not

    def stop(self, grace_s: float) -> None:
        """End the run. A second call changes nothing."""
        if self._grace_s is None:
            self._grace_s = grace_s
            self._has_news.set()
            self._ending.set()

    def fail(self, failure: Failure) -> None:
        """Record a failure, and end the run."""
        # Failures while processes are being ended are consequences of that.
        if self._grace_s is None and not self._departures.is_site_out.is_set():
            log.warning("%s: %s", failure.code, failure.message)
            self._failures.append(failure)
            self._has_news.set()
            self._ending.set()

    async def execute(self) -> None:
        """Carry out the run and report its end. Leaves no process behind."""
        log.info("run %s, generation %d", self.run_id, self.generation)
        shipper = LogShipper(
            self._session.ship,
            run_id=self.run_id,
            generation=self.generation,
            site=self._place.site,
            own=self._place.own_lines,
            readers=lambda: self._processes.nodes if self._processes else (),
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                shipping = tasks.create_task(shipper.run(), name="logs")
                stages = tasks.create_task(self._stages(tasks), name="stages")
                await self._wait_for_end(stages)
                succeeded = stages.done() and not self._failures and self._grace_s is None
                failures = order_failures(self._failures, self._place.site, self._departures.left_s)
                await self._end_processes(stages)
                shipping.cancel()
        finally:
            await kill_descendants(self._processes.children if self._processes else [])
        first = [f"rank{each.rank}" for each in failures[:1]]
        await shipper.finish(time.monotonic() + _FLUSH_S, first)
        self._tell_ended(succeeded, failures)

    async def _stages(self, tasks: asyncio.TaskGroup) -> None:
        """Run all stages from the order to the end of the ranks; return early if one fails."""
        try:
            order = self._order = await self._read_order()
            processes = SiteProcesses(
                order,
                self._prepare,
                self._place,
                Listener(lambda *said: self._on_said(tasks, *said), self.fail),
                tasks,
            )
            self._stalls = Stalls(processes.look, self._put_stall)
            self._processes = processes
            self._epochs = EpochChange(
                order.site.num_gateways, processes.tell_gateways, self._put_epoch
            )
            addresses = await processes.start_gateways()
            if self._prepare.revoked:  # it may have come meanwhile
                self.take_revoked(self._prepare.revoked)
            endpoints = [GatewayEndpoint(**asdict(address)) for address in addresses]
            self._put(prepared=SitePrepared(**self._name, endpoints=endpoints))
            peers = await self._started  # the coordinator stops a run whose start takes too long
            await processes.connect(peers)
            if order.spec.job.probe is not None:
                self._put(running=SiteRunning(**self._name))
                await processes.wait_probed()
            else:
                await self._train(processes, tasks)
            if not self._failures:
                if not self._departures.is_site_out.is_set():
                    last_round = await self._last_round()
                    self._put(done=SiteDone(**self._name, round=last_round))
                    await self._released.wait()
                await processes.leave()
        except OSError as error:  # no space, processes or memory: the machine's fault, not a bug
            place = error.filename or f"site {self._place.site}"
            message = f"{place}: the run's processes cannot be started: {error.strerror or error}"
            self._fail_stage(SiteError("LAUNCH_FAILED", message))
        except SiteError as error:
            self._fail_stage(error)

    async def _read_order(self) -> SiteOrder:
        """Read the order, and have here what the job is carried with and the data that it wants."""
        place = self._place
        spec = await asyncio.to_thread(read_spec, self._prepare, place.site)
        if spec.is_carried_to(place.site):
            await fetch(blobs_of(place.state), spec, self._session.get_blobs, self._on_metric)
        order = await asyncio.to_thread(make_order, self._prepare, spec, place.site, place.state)
        loop = asyncio.get_running_loop()

        def told(metric: rank_messages.Metric) -> None:
            loop.call_soon_threadsafe(self._on_metric, metric)

        data = DataAtSite(order, place.state, told)
        try:
            await asyncio.to_thread(data.provide)
        finally:
            data.stop()
        return order

    async def _train(self, processes: SiteProcesses, tasks: asyncio.TaskGroup) -> None:
        joined = tasks.create_task(self._tell_joined(processes), name="joined")
        left = tasks.create_task(self._departures.is_site_out.wait(), name="left")
        ranks = asyncio.create_task(processes.run_ranks(), name="ranks")
        try:
            await asyncio.wait([left, ranks], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in (joined, left, ranks):
                each.cancel()
            await asyncio.wait([ranks])
        if self._departures.is_site_out.is_set():
            log.info("the site was dropped from run %s after its last round", self.run_id)
            return
        ranks.result()
        if not self._failures:
            await self._require_joined(processes)

    async def _require_joined(self, processes: SiteProcesses) -> None:
        """Check that ranks that ended well had joined.

        Raises:
            SiteError: some ranks had not joined.
        """
        assert self._order is not None, "it was read before any rank was started"
        try:
            async with asyncio.timeout(_JOINED_S):
                await processes.wait_joined()
        except TimeoutError:
            script = self._order.spec.job.entrypoint or "the trainer"
            raise SiteError(
                "NEVER_JOINED",
                f"{script} ended at site {self._place.site} without having joined the run: it "
                "wants `site = isthmus.join()`, and `site.attach(model, optimizer)` before its "
                "first step",
            ) from None

    async def _last_round(self) -> int | None:
        """Return the last round of the ranks, which have all ended well; None: no round.

        A gateway's report that they have left may come a little after their ends.
        """
        assert self._order is not None, "it was read before any rank was started"
        if self._order.spec.job.probe is not None:
            return None
        with suppress(TimeoutError):
            async with asyncio.timeout(_JOINED_S):
                while len(self._departures.last_rounds) < self._order.site.num_ranks:
                    self._has_news.clear()
                    await self._has_news.wait()
                last_round = max(self._departures.last_rounds.values())
                return last_round if last_round >= 0 else None
        return None

    async def _wait_for_end(self, stages: asyncio.Task[None]) -> None:
        """Wait until the run is over, one way or another."""
        ending = asyncio.ensure_future(self._ending.wait())
        await asyncio.wait([stages, ending], return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        if self._failures and self._order is not None:
            # A cause may be reported a little later than its consequences.
            await asyncio.sleep(min(self._order.spec.timeouts.lease_s / 30, 0.5))
            with suppress(TimeoutError):
                async with asyncio.timeout(_CAUSE_S):
                    # Once all ranks have ended, their launcher has reported how.
                    while awaits_cause(self._failures, self._departures.left_s) and not (
                        stages.done() or self._grace_s is not None
                    ):
                        self._has_news.clear()
                        news = asyncio.ensure_future(self._has_news.wait())
                        await asyncio.wait([stages, news], return_when=asyncio.FIRST_COMPLETED)
                        news.cancel()

    async def _end_processes(self, stages: asyncio.Task[None]) -> None:
        grace_s = self._grace_s
        if grace_s is None:
            # After a failure nothing needs saving, and the other sites' reports wait for this one.
            grace_s = self._order.spec.timeouts.stop_grace_s / 2 if self._order else 0.0
            self._grace_s = grace_s
        stages.cancel()
        await asyncio.wait([stages])  # a stage may be starting a process
        if self._processes is not None and not await self._processes.end(grace_s):
            log.error("a process of the run cannot be killed: see ps")

    async def _tell_joined(self, processes: SiteProcesses) -> None:
        """Tell that the ranks are there: where they return, once they wait for the state.

        Others go on meanwhile, so what is done before would have to be made up for.
        """
        await processes.wait_joined()
        assert self._order is not None, "it was read before any rank was started"
        if self._order.returns:
            await self._wants_state.wait()
        self._put(running=SiteRunning(**self._name))

    def _tell_ended(self, succeeded: bool, failures: Sequence[Failure]) -> None:
        log.info("run %s has ended here", self.run_id)
        now_s = time.monotonic()
        self._put(
            ended=SiteEnded(
                **self._name,
                succeeded=succeeded,
                failures=[failure.to_message(now_s) for failure in failures],
            )
        )

    def _fail_stage(self, error: SiteError) -> None:
        self.fail(replace(error.failure, at_s=time.monotonic(), site=self._place.site))

    def _on_said(self, tasks: asyncio.TaskGroup, gateway: int, message: agent_port.Report) -> None:
        """Handle a gateway's message, or a node's own.

        Raises:
            ValueError: the message is not valid.
        """
        match message:
            case rank_messages.Metric():
                self._on_metric(message)
            case rank_messages.Digest():
                self._session.outbox.put_digest(Digest(**self._name, **asdict(message)))
            case agent_port.Settled() | agent_port.Resumed():
                assert self._epochs is not None, "it is there before any gateway"
                self._epochs.answered(message)
            case agent_port.Left():
                assert self._order is not None, "it was read before any gateway was started"
                self._departures.add_gateway(self._order.site.num_gateways)
            case agent_port.RankLeft():
                self._departures.add_rank(message.rank, message.round)
                self._has_news.set()
                if self._stalls is not None:
                    self._stalls.note_left(message.rank, message.round)
            case agent_port.Suspect() | agent_port.Reached():
                self._on_opinion(gateway, message)
            case agent_port.Stalled():
                assert self._stalls is not None, "it is there before any gateway"
                tasks.create_task(self._stalls.take(gateway, message), name="stalls")

    def _on_metric(self, message: rank_messages.Metric) -> None:
        if message.kind == metrics.RANK:
            compared = self._rank_paces.take(message)
            if compared is None:
                return
            message = compared
        if message.kind == metrics.STATE:
            self._wants_state.set()
        if message.kind == metrics.STEP:
            self._steps.add(message.step, message.values)
        metric = Metric(**asdict(message))
        self._session.outbox.put_metric(self.run_id, self.generation, metric)

    def _on_opinion(self, gateway: int, message: agent_port.Suspect | agent_port.Reached) -> None:
        """Pass on a gateway's suspicion of another site; the coordinator decides what follows."""
        opinion = self._opinions.take(gateway, message)
        if isinstance(opinion, Reached):
            self._put(reached=Reached(**self._name, site=opinion.site))
        elif opinion is not None:
            opinion.run_id, opinion.generation = self.run_id, self.generation
            self._put(suspect=opinion)

    def _put_epoch(self, message: Settled | Resumed) -> None:
        message.run_id, message.generation = self.run_id, self.generation
        if isinstance(message, Settled):
            self._put(settled=message)
        else:
            self._put(resumed=message)

    def _put_stall(self, stall: Stall) -> None:
        stall.run_id, stall.generation = self.run_id, self.generation
        self._put(stall=stall)

    @property
    def _name(self) -> Mapping[str, Any]:
        return {"run_id": self.run_id, "generation": self.generation}

    def _put(self, **kind: Any) -> None:  # noqa: ANN401 - one field of AgentMessage
        self._session.outbox.put(AgentMessage(**kind))
