"""One site of a run: how far it has got, and what it was told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.core.events import Action, Endpoint, RecordEvent
from orchestrator.core.states import SiteState
from protos.failure import Failure

_RISE = (
    SiteState.ABSENT,
    SiteState.JOINED,
    SiteState.PREPARED,
    SiteState.STARTING,
    SiteState.RUNNING,
)
_WHAT_IS_MISSING = {
    SiteState.ABSENT: "no agent has joined",
    SiteState.JOINED: "its gateways do not listen yet",
    SiteState.PREPARED: "it waits for the WAN",
    SiteState.STARTING: "its ranks have not all joined",
}
_GONE = frozenset({SiteState.ENDED, SiteState.LOST})


@dataclass(slots=True)
class RunSite:
    """What the machine of a run knows of one site."""

    name: str
    state: SiteState = SiteState.ABSENT
    endpoints: tuple[Endpoint, ...] = ()
    is_told_to_prepare: bool = False
    is_told_to_start: bool = False
    is_told_to_stop: bool = False
    is_successful: bool = False

    @property
    def may_have_processes(self) -> bool:
        """Whether something of the run may be alive there, and its agent may still say so."""
        return self.is_told_to_prepare and self.state not in _GONE

    def prepared(self, endpoints: tuple[Endpoint, ...]) -> list[Action]:
        """Its gateways listen; that counts once, after it was told to prepare."""
        if self.state is not SiteState.JOINED or not self.is_told_to_prepare:
            return []
        self.state, self.endpoints = SiteState.PREPARED, endpoints
        listed = [f"{each.host}:{each.port}" for each in endpoints]
        return [RecordEvent("site.prepared", self.name, {"gateways": listed})]


def start_timed_out(sites: Sequence[RunSite], within_s: float, now_s: float) -> Failure:
    """Return the failure of a start that took too long.

    It names the sites that are furthest behind.

    The others wait for them.
    """
    behind = min((site.state for site in sites if site.state in _RISE), key=_RISE.index)
    names = [site.name for site in sites if site.state is behind]
    told = "site" if len(names) == 1 else "sites"
    message = (
        f"not up within {within_s:g} s: {told} {', '.join(names)}: "
        f"{behind.lower()}, {_WHAT_IS_MISSING[behind]}"
    )
    site = names[0] if len(names) == 1 else ""
    return Failure(code="START_TIMED_OUT", message=message, site=site, at_s=now_s)
