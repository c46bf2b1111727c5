"""The failures that a coordinator finds by itself, in words. Pure."""

from __future__ import annotations

from orchestrator.core import events
from orchestrator.core.digests import Difference
from protos.failure import Failure


def emulator_ended(event: events.EmulatorEnded, at_s: float) -> Failure:
    """Return the failure of a run whose WAN is gone."""
    return Failure(
        code="LAUNCH_FAILED",
        message=f"the WAN emulator is gone: {event.message}",
        log_path=event.log_path,
        at_s=at_s,
    )


def namespaces_refused(event: events.NamespacesRefused, at_s: float) -> Failure:
    """Return the failure of a run that must have packets emulated where that cannot be."""
    message = f"emulator: netns was asked for, and cannot be here: {event.why}"
    return Failure(code="LAUNCH_FAILED", message=message, at_s=at_s)


def agent_ended(event: events.AgentEnded, at_s: float) -> Failure:
    """Return the failure of an agent that never joined."""
    return Failure(
        code="LAUNCH_FAILED",
        message=event.message,
        site=event.site,
        log_path=event.log_path,
        at_s=at_s,
    )


def site_lost(event: events.SiteLost, at_s: float) -> Failure:
    """Return the failure of a site that is not heard any more: as old as the silence."""
    return Failure(
        code="SITE_LOST", message=event.message, site=event.site, at_s=at_s - event.silent_s
    )


def ended_unasked(site: str, at_s: float) -> Failure:
    """Return the failure of a site that ended neither well nor as told, and said no more."""
    message = "its agent ended the site's processes without being asked to"
    return Failure(code="SITE_LOST", message=message, site=site, at_s=at_s)


def parameters_differ(difference: Difference, at_s: float) -> Failure:
    """Return the failure that a difference is; it names a place only where there is one."""
    is_one_site = difference.is_majority and len(difference.sites) == 1
    is_one_rank = is_one_site and len(difference.replicas) == 1
    return Failure(
        code="PARAMETERS_DIFFER",
        message=str(difference),
        site=difference.sites[0] if is_one_site else "",
        rank=difference.replicas[0][1] if is_one_rank else -1,
        at_s=at_s,
    )
