"""Carries out what orchestrator/core/membership.py decides about one active run's epochs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from orchestrator.coordinator.control_messages import endpoint_messages
from orchestrator.core import membership
from orchestrator.core.membership import Limits, Membership, Pair
from orchestrator.core.run_events import Endpoint, RecordEvent
from orchestrator.core.run_view import RecordedEvent
from protos.control.v1 import control_pb2
from protos.errors import RemoteProtocolError
from topology.epoch import Epoch, finished_from_bytes, handovers_to_bytes
from topology.errors import ConfigError
from topology.member_plans import plan_for, plan_with_followers
from topology.run_spec import CodedPlan, RunSpec

MAX_WHY = 500
"""Characters of a site's reason that are kept."""

SendTo = Callable[[str, control_pb2.CoordinatorMessage], None]
Record = Callable[[str, str, dict[str, Any]], None]
"""Writes an event: kind, site, detail."""
Outcome = membership.LoseSite | membership.EndRun | membership.EndChange


class RunEpochs:
    """The epochs of one run, from when it is active."""

    def __init__(
        self,
        name: Mapping[str, Any],
        spec: RunSpec,
        *,
        send: SendTo,
        record: Record,
        on_outcome: Callable[[Outcome], None],
        on_epoch: Callable[[Epoch, frozenset[Pair]], None] = lambda *_: None,
        endpoints_of: Callable[[str], Iterable[Endpoint]] = lambda _: (),
        recorded: Sequence[RecordedEvent] = (),
    ) -> None:
        """Begin with the first epoch: all sites, and the reduction of the spec.

        Args:
            name: `run_id` and `generation`, for every message.
            spec: The run.
            send: To a site's agent.
            record: In the journal.
            on_outcome: Told which sites the run goes on without, that it cannot go on, and what
                came of a change that was wanted.
            on_epoch: Told each epoch that has begun, and which links are dead.
            endpoints_of: Where a site's gateways listen.
            recorded: What earlier coordinators wrote down of the run.
        """
        self._name = name
        self._spec = spec
        self._send, self._record, self._on_outcome = send, record, on_outcome
        self._on_epoch, self._endpoints_of = on_epoch, endpoints_of
        first = Epoch(0, spec.site_names, spec.reduction, 0)
        self._machine = Membership(
            ranks={site.name: site.num_ranks for site in spec.topology.sites},
            links=_pairs(spec),
            limits=_limits(spec),
            make_plan=self._make_plan,
            links_of=self._links_of,
            first=first,
        )
        if recorded:
            self._machine.restore(recorded)

    @property
    def epoch(self) -> Epoch:
        """The latest that has begun."""
        return self._machine.epoch

    def handle(self, event: membership.Event) -> None:
        """Let the core decide on an event, and do what it says.

        Raises:
            JournalError: it cannot be written down.
        """
        before, now_s = self.epoch, time.monotonic()
        for action in self._machine.handle(event, now_s):
            self._do(action)
        if self.epoch is not before:
            self._on_epoch(self.epoch, self._machine.dead_links(now_s))

    def _do(self, action: membership.Action) -> None:
        match action:
            case RecordEvent():
                self._record(action.kind, action.site, dict(action.detail))
            case membership.SendSettle():
                settle = control_pb2.Settle(
                    **self._name,
                    epoch=action.epoch,
                    lost=action.lost,
                    stops=action.is_redo,
                    reduction=action.reduction.to_bytes() if action.reduction else b"",
                )
                self._send(action.site, control_pb2.CoordinatorMessage(settle=settle))
            case membership.SendResume():
                is_new = action.site in action.enters
                moved = action.epoch.members if is_new else action.enters
                resume = control_pb2.Resume(
                    **self._name,
                    epoch=action.epoch.number,
                    record=action.epoch.to_bytes(),
                    handovers=handovers_to_bytes(action.handovers),
                    enters=action.enters,
                    endpoints=endpoint_messages(
                        each for site in moved for each in self._endpoints_of(site)
                    ),
                )
                self._send(action.site, control_pb2.CoordinatorMessage(resume=resume))
            case membership.SendCancel():
                cancel = control_pb2.CancelSettle(**self._name, epoch=action.epoch)
                self._send(action.site, control_pb2.CoordinatorMessage(cancel_settle=cancel))
            case membership.LoseSite() | membership.EndRun() | membership.EndChange():
                self._on_outcome(action)

    # ------------------------------------------------------------ plans

    def _make_plan(
        self, members: tuple[str, ...], dead: frozenset[Pair], follows: tuple[str, ...]
    ) -> CodedPlan:
        reduction = plan_for(self._spec, members, dead)
        assert reduction is not None, "the core asks only for members that are linked"
        return plan_with_followers(self._spec, reduction, follows, dead) if follows else reduction

    def _links_of(self, reduction: CodedPlan) -> frozenset[Pair]:
        names, plan = self._spec.site_names, reduction.plan
        hops = (hop for tree in range(max(1, len(plan.trees))) for hop in plan.hops(tree))
        return frozenset(_pair(names[one], names[other]) for one, other in hops)


def settled_from(site: str, message: control_pb2.Settled) -> membership.SiteSettled:
    """Return a site's answer to Settle.

    Raises:
        RemoteProtocolError: nobody can read what it has finished.
    """
    try:
        finished = finished_from_bytes(message.finished) if message.finished else ()
    except ConfigError as error:
        raise RemoteProtocolError(f"site {site}: {error.problems[0].message}") from error
    return membership.SiteSettled(
        site=site,
        epoch=message.epoch,
        round=message.round,
        finished=finished,
        chain=message.chain,
        chain_round=message.chain_round,
        why=_line(message.why),
        must_keep_codecs=message.codecs_fixed,
    )


def suspected_from(site: str, message: control_pb2.Suspect) -> membership.Suspected:
    """Return whom a site does not reach."""
    return membership.Suspected(site, message.site, message.is_gone, _line(message.why))


def _line(text: str) -> str:
    return " ".join(text.split())[:MAX_WHY]


def _limits(spec: RunSpec) -> Limits:
    timeouts = spec.timeouts
    return Limits(
        min_sites=spec.topology.failure.min_sites,
        detect_s=timeouts.lease_s,
        ride_out_s=timeouts.ride_out_s,
        alone_s=timeouts.coordinator_s,
        collect_s=timeouts.collect_s,
    )


def _pairs(spec: RunSpec) -> frozenset[Pair]:
    """Return the sites that are linked in both directions."""
    topology = spec.topology
    return frozenset(
        _pair(link.source, link.target)
        for link in topology.links
        if topology.link(link.target, link.source)
    )


def _pair(one: str, other: str) -> Pair:
    return (one, other) if one < other else (other, one)
