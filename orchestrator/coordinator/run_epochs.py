"""What a run's epochs are made of, and their messages: orchestrator/core/epochs.py decides."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from isthmus.orchestrator.coordinator.control_messages import endpoint_messages
from isthmus.orchestrator.core import run_events
from isthmus.orchestrator.core.epochs import EpochRules
from isthmus.orchestrator.core.quorum import Limits
from isthmus.orchestrator.core.reach import Pair, pair_of
from isthmus.orchestrator.core.run_events import Endpoint, EpochMessage
from isthmus.protos.control.v1 import control_pb2
from isthmus.protos.errors import RemoteProtocolError
from isthmus.topology.spec.epoch import Epoch, finished_from_bytes, handovers_to_bytes
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.run_spec import CodedPlan, RunSpec
from isthmus.topology.trees.member_plans import plan_for, plan_with_followers

MAX_WHY = 500
"""Characters of a site's reason that are kept."""


def first_epoch(spec: RunSpec) -> Epoch:
    """Return the sites and the reduction that a run begins with."""
    return Epoch(0, spec.first_sites, spec.first_reduction, 0)


def epoch_rules(spec: RunSpec) -> EpochRules:
    """Return what the epochs of a run are made of."""

    def make_plan(
        members: tuple[str, ...], dead: frozenset[Pair], follows: tuple[str, ...]
    ) -> CodedPlan:
        reduction = plan_for(spec, members, dead)
        assert reduction is not None, "the core asks only for members that are linked"
        return plan_with_followers(spec, reduction, follows, dead) if follows else reduction

    def links_of(reduction: CodedPlan) -> frozenset[Pair]:
        names, plan = spec.site_names, reduction.plan
        hops = (hop for tree in range(max(1, len(plan.trees))) for hop in plan.hops(tree))
        return frozenset(pair_of(names[one], names[other]) for one, other in hops)

    return EpochRules(
        ranks={site.name: site.num_ranks for site in spec.topology.sites},
        links=_pairs(spec),
        limits=_limits(spec),
        make_plan=make_plan,
        links_of=links_of,
    )


def epoch_message(
    action: EpochMessage,
    run_id: str,
    generation: int,
    endpoints_of: Callable[[str, str], Iterable[Endpoint]],
) -> control_pb2.CoordinatorMessage:
    """Return what an agent is told; `endpoints_of` says where an agent's site dials another."""
    match action:
        case run_events.SendPause():
            settle = control_pb2.Settle(
                run_id=run_id,
                generation=generation,
                epoch=action.epoch,
                lost=action.lost,
                stops=action.is_redo,
                reduction=action.reduction.to_bytes() if action.reduction else b"",
            )
            return control_pb2.CoordinatorMessage(settle=settle)
        case run_events.SendResume():
            moved = action.epoch.members if action.site in action.rejoins else action.rejoins
            resume = control_pb2.Resume(
                run_id=run_id,
                generation=generation,
                epoch=action.epoch.number,
                record=action.epoch.to_bytes(),
                handovers=handovers_to_bytes(action.handovers),
                enters=action.rejoins,
                endpoints=endpoint_messages(
                    each for site in moved for each in endpoints_of(site, action.site)
                ),
            )
            return control_pb2.CoordinatorMessage(resume=resume)
        case run_events.SendCancel():
            cancel = control_pb2.CancelSettle(
                run_id=run_id, generation=generation, epoch=action.epoch
            )
            return control_pb2.CoordinatorMessage(cancel_settle=cancel)


def paused_from(site: str, message: control_pb2.Settled) -> run_events.SitePaused:
    """Return a site's report, its answer to Settle.

    Raises:
        RemoteProtocolError: nobody can read what it has finished.
    """
    try:
        finished = finished_from_bytes(message.finished) if message.finished else ()
    except ConfigError as error:
        raise RemoteProtocolError(f"site {site}: {error.problems[0].message}") from error
    return run_events.SitePaused(
        site=site,
        epoch=message.epoch,
        round=message.round,
        finished=finished,
        chain=message.chain,
        chain_round=message.chain_round,
        why=_line(message.why),
        must_keep_codecs=message.codecs_fixed,
    )


def suspected_from(site: str, message: control_pb2.Suspect) -> run_events.Suspected:
    """Return whom a site does not reach."""
    return run_events.Suspected(site, message.site, message.is_gone, _line(message.why))


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
        ends_on_early_end=spec.topology.failure.ends_on_early_end,
    )


def _pairs(spec: RunSpec) -> frozenset[Pair]:
    """Return the sites that are linked in both directions."""
    topology = spec.topology
    return frozenset(
        pair_of(link.source, link.target)
        for link in topology.links
        if topology.link(link.target, link.source)
    )
