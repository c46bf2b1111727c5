"""What a run may survive, and who may come and go: functions of what is known, no state."""

from __future__ import annotations

from collections.abc import Iterable

from isthmus.orchestrator.core.members import GRADIENTS_DIFFER, Member, Stage, Wish
from isthmus.orchestrator.core.run_end import LOSES_SITE, SCRIPT_FAILED
from isthmus.protos.failure import Failure
from isthmus.topology.spec.world import Detection

FAULTS = 2
"""So often one node may be at fault before its site is started again by an operator alone: a new
start may be all that it takes once."""


def losable_failures(rules: Detection, *, drops_corrupt: bool) -> frozenset[str]:
    """Return the codes of failures that a run survives where all have taken a step.

    `drops_corrupt`: it goes on without a site that computes wrongly.
    """
    of_script = frozenset() if rules.ends_on_script_error else {SCRIPT_FAILED}
    return LOSES_SITE | of_script | ({GRADIENTS_DIFFER} if drops_corrupt else frozenset())


def waits_for_operator(site: Member) -> bool:
    """Whether a site is started again by `isthmus sites add` alone."""
    return site.is_dropped or site.is_new or site.has_ended_early or bool(faults_of_node(site))


def faults_of_node(site: Member) -> list[Failure]:
    """Return the faults of a node for which its site is kept out; none: there is no such node."""
    by_node: dict[int, list[Failure]] = {}
    for (node, _), fault in site.faults.items():
        by_node.setdefault(node, []).append(fault)
    for faults in by_node.values():
        if len(faults) >= FAULTS or any(each.code == GRADIENTS_DIFFER for each in faults):
            return faults
    return []


def may_restart(site: Member, rules: Detection, now_s: float) -> bool:
    """Return whether a site was not started again too often lately."""
    return len(site.restarts.lately(now_s)) < rules.max_restarts


def next_restart_s(site: Member, rules: Detection) -> float:
    """Return when a site may be started again."""
    return site.restarts.next_s(rules.detect_within_s)


def is_restart_due(site: Member, rules: Detection, now_s: float, *, has_agent: bool) -> bool:
    """Return whether a site is to be started now: its agent has nothing left of the run."""
    is_free = site.stage is (Stage.JOINED if site.is_new else Stage.ENDED)
    if not (site.is_outside and has_agent and is_free):
        return False
    if waits_for_operator(site) or site.wish is Wish.IN:
        return site.wish is Wish.IN
    has_paused = not site.restarts.lately(now_s) or now_s >= next_restart_s(site, rules)
    return has_paused and may_restart(site, rules, now_s)


def drop_problem(site: Member, members: Iterable[Member], rules: Detection) -> str:
    """Return why a site of a run that goes on cannot be dropped; empty: it can."""
    stay = [
        other
        for other in members
        if not (other.is_outside or other.is_dropped or other.name == site.name)
    ]
    if site.is_new and site.wish is not Wish.IN:
        return f"site {site.name} takes no part yet"
    if site.is_dropped:
        return f"site {site.name} is dropped already"
    if site.has_finished:
        return f"site {site.name} is done"
    if not site.is_outside and len(stay) < rules.min_sites:
        return (
            f"without site {site.name} {len(stay)} would be left, want at least {rules.min_sites}"
        )
    return ""


def early_end_problem(num_left: int, rules: Detection) -> str:
    """Return why a run ends with the first site that is done; empty: the others go on."""
    if rules.ends_on_early_end:
        return "failure.on_early_end is end"
    if num_left < rules.min_sites:
        return f"{num_left} sites would go on, want at least {rules.min_sites}"
    return ""
