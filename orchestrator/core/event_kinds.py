"""The kinds of events that the journal has, each with what people read of it and where.

A kind cannot be added without words: they are its definition.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from isthmus.orchestrator.core.run_events import SiteState


class Seen(NamedTuple):
    """Where an event is seen beside the list of events."""

    site: SiteState | None = None
    """What its site is shown as afterwards; None: as before."""
    is_note: bool = False
    """Its `note` stands beside the run's state."""
    is_mark: bool = False
    """It is drawn on the charts of the run."""
    cause: str = ""
    """How it explains that a run stood still, unless a kind before it does; empty: it does not."""
    exported: str = ""
    """As which of EVENTS (topology/spec/exporters.py) it is exported; empty: it is not."""


NOTE = Seen(is_note=True)


class EventKind(StrEnum):
    """What a line of the journal is about, by the name that is written there.

    In its text `{run}` and `{site}` are the event's, and `{name}` is what is at `name` in its
    detail. An event with a `note` of its own shows that instead, unless `{note}` is in the text.
    """

    text: str
    seen: Seen

    def __new__(cls, name: str, text: str, seen: Seen = Seen()) -> EventKind:  # noqa: B008, D102
        kind = str.__new__(cls, name)
        kind._value_, kind.text, kind.seen = name, text, seen
        return kind

    # fmt: off
    COORDINATOR_STARTED = "coordinator.started", "the coordinator started"
    CALLER_REFUSED = "caller.refused", "a caller was refused: {why}"
    JOIN_OFFERED = "join.offered", "a join token was issued for site {site}"
    JOIN_USED = "join.used", "site {site} redeemed its join token, which is void now"

    # what becomes of the run
    RUN_SUBMITTED = "run.submitted", "the run was submitted"
    RUN_DEQUEUED = "run.dequeued", "the run's sites are free: it starts"
    RUN_PREPARING = "run.preparing", "every site has an agent: gateways are starting"
    RUN_ACTIVE = "run.active", "all sites are up: training starts"
    RUN_RESUMED = "run.resumed", "the coordinator was restarted and has taken over the run"
    RUN_FIRST_STEP = (
        "run.first_step",
        "every site has taken a step: from now on `failure` in the topology says what the run "
        "survives",
    )
    RUN_STATE_OFFERED = (
        "run.state_offered",
        "the script calls site.checkpoint: a site that returns can take over the others' state",
    )
    RUN_STATE_MISSING = (
        "run.state_missing", "sites stay out: the script has no state for them to start from", NOTE
    )

    # what becomes of sites; losses first, for they explain a stall before anything else does
    SITE_LOST = (
        "site.lost", "site {site} was lost: {message}",
        Seen(SiteState.LOST, is_note=True, is_mark=True, cause="{site} was lost", exported="lost"),
    )
    SITE_GONE = (
        "site.gone", "the agent of site {site} is gone: {message}", Seen(cause="{site} was lost")
    )
    SITE_DROPPED = (
        "site.dropped", "site {site} was dropped: the run continues without it",
        Seen(SiteState.DROPPED, is_note=True, is_mark=True,
             cause="{site} was dropped", exported="lost"),
    )
    RANK_STALLED = (
        "rank.stalled",
        "rank {rank} of site {site} makes no progress while others wait: its site is stopped",
        Seen(is_note=True, cause="a rank of {site} hung", exported="failure"),
    )
    RUN_REPLANNED = (
        "run.replanned", "the run has another plan from round {from_round} on: {plan}",
        Seen(is_note=True, is_mark=True, cause="the plan changed"),
    )
    RUN_REGIME = (
        "run.regime", "the run has the regime {regime} from round {from_round} on: {why}",
        Seen(is_note=True, is_mark=True, cause="the regime changed"),
    )
    SITE_RETURNED = (
        "site.returned", "site {site} is training with the others again",
        Seen(SiteState.RUNNING, is_note=True, is_mark=True,
             cause="{site} returned", exported="returned"),
    )
    RUN_WENT_ON = (
        "run.went_on", "the run continues after an outage of {for_s} s",
        Seen(is_note=True, cause="an outage"),
    )
    SESSION_BROKEN = (
        "session.broken",
        "the connection to the agent of site {site} broke: {message}; the site keeps training "
        "while its lease lasts",
    )
    SESSION_RESUMED = (
        "session.resumed",
        "the agent of site {site} is connected again after {silent_s} s: nothing was lost",
    )
    AGENT_RETURNED = "agent.returned", "the agent of site {site} is back, on {host}"
    SITE_JOINED = (
        "site.joined", "the agent of site {site} joined from {host}", Seen(SiteState.JOINED)
    )
    SITE_LEFT = (
        "site.left", "the agent of site {site} left before anything had started there: {message}",
        Seen(SiteState.ABSENT),
    )
    SITE_PREPARED = (
        "site.prepared", "the gateways of site {site} listen on {gateways}",
        Seen(SiteState.PREPARED),
    )
    SITE_STARTING = (
        "site.starting", "the ranks of site {site} are starting", Seen(SiteState.STARTING)
    )
    SITE_RUNNING = "site.running", "all ranks of site {site} are running", Seen(SiteState.RUNNING)
    SITE_STEPPED = "site.stepped", "site {site} has taken its first step"
    SITE_STEPPED_ALONE = (
        "site.stepped_alone", "site {site} took an optimizer step without the other sites", NOTE
    )
    SITE_DEVICE_DIFFERS = (
        "site.device_differs", "site {site} computes on another device than the topology says",
        NOTE,
    )
    NODE_KEPT_OUT = (
        "node.kept_out", "node {node} of site {site} is at fault, and its site is kept out", NOTE
    )
    SITE_TROUBLE = "site.trouble", "site {site} reported a problem", NOTE
    SITE_RESUMED = "site.resumed", "site {site} has begun round {round} of epoch {epoch}"
    SITE_DONE = "site.done", "site {site} has finished the job and waits for the others"
    SITE_ENDED = (
        "site.ended", "all processes of the run on site {site} have ended",
        Seen(SiteState.ENDED, is_note=True),
    )
    SITE_ENDED_EARLY = (
        "site.ended_early",
        "site {site} finished the job after round {round}: the others continue without it", NOTE,
    )
    SITE_SILENT = (
        "site.silent",
        "site {site} is silent: {message}; the run continues without it unless it answers "
        "first",
    )
    SITE_LET_GO = (
        "site.let_go", "site {site} had finished the job and was released: the others continue",
        Seen(SiteState.ENDED),
    )
    SITE_DROP_REQUESTED = "site.drop_requested", "site {site} is to be dropped: {message}"
    SITE_DROP_REFUSED = (
        "site.drop_refused", "site {site} is not dropped: the others cannot continue without it",
        NOTE,
    )
    SITE_ADD_REQUESTED = "site.add_requested", "site {site} is to be added: it is started next"
    SITE_RETURNING = (
        "site.returning", "site {site} is being started again",
        Seen(SiteState.RETURNING, is_note=True),
    )
    SITE_UNCONFIRMED = (
        "site.unconfirmed",
        "site {site} did not confirm that its processes have ended: some may still be running",
    )
    SITE_FAILED = "site.failed", "site {site} failed: {lost_steps} steps are done again"

    # epochs
    EPOCH_PROPOSED = "epoch.proposed", "epoch {epoch} is proposed to {members}: {why}"
    EPOCH_ENTERING = (
        "epoch.entering", "site {site} is about to take part, from epoch {epoch} on", NOTE
    )
    EPOCH_BEGUN = "epoch.begun", "epoch {epoch}: {members} take part: {why}", Seen(exported="epoch")
    EPOCH_CANCELLED = (
        "epoch.cancelled", "epoch {epoch} is called off, and training continues as before: {why}"
    )
    EPOCH_REFUSED = "epoch.refused", "site {site} stays out of epoch {epoch}: {why}"

    # what goes wrong while it trains
    FAILURE_REPORTED = "failure.reported", "{code}: {message}", Seen(exported="failure")
    RUN_FAILING = "run.failing", "the run cannot continue without {sites} and will stop"
    RUN_WAITING = "run.waiting", "the run waits for sites to reach each other", NOTE
    RUN_ROLLED_BACK = (
        "run.rolled_back",
        "site {site} was lost while the run started: all sites start over once it is back",
        Seen(SiteState.ABSENT, is_note=True, exported="lost"),
    )
    DATA_SAME = "data.same", "sites seem to train on the same data", NOTE
    BUFFERS_DIFFER = "buffers.differ", "buffers differ between sites after step {step}", NOTE
    GRADIENT_NON_FINITE = (
        "gradient.non_finite", "the gradient of {tensor} was not finite in step {step}", NOTE
    )
    CHECKPOINT_WRITTEN = (
        "checkpoint.written", "checkpoint of step {step} is written",
        Seen(is_note=True, exported="checkpoint"),
    )
    CHECKPOINT_FAILED = (
        "checkpoint.failed", "checkpoint of step {step} failed at site {site}: {reason}",
        Seen(is_note=True, exported="failure"),
    )
    STORE_FAILED = (
        "store.failed", "site {site} could not write the checkpoint of step {step} to {reason}",
        Seen(is_note=True, exported="failure"),
    )
    CHECKPOINT_STAYS = (
        "checkpoint.stays", "checkpoint of step {step} cannot be removed at site {site}: {reason}",
        NOTE,
    )
    STATE_FAILED = (
        "state.failed",
        "site {site} could not write its state for a site that comes back: {reason}",
        Seen(is_note=True, exported="failure"),
    )

    # plans and links
    PLAN_KEPT = "plan.kept", "the plan stays as it is: {why}"
    PLAN_RELAUNCH = "plan.relaunch", "a relaunch with a new plan would take {step_s} s a step", NOTE
    LINK_DRIFTED = (
        "link.drifted", "link {source} → {target} has changed: the run is planned again"
    )
    LINK_FORGOTTEN = (
        "link.forgotten",
        "link {source} → {target} was measured long ago: the run is planned again",
    )
    SITES_UNEVEN = (
        "sites.uneven", "sites are faster or slower than their share of the batch: the run is planned again"
    )
    SHARES_FIXED = (
        "shares.fixed", "sites keep their parts of the batch: the script divides its data", NOTE
    )
    WAN_EMULATED = "wan.emulated", "the WAN is emulated: {emulator}"
    WAN_FALLBACK = (
        "wan.fallback", "the WAN is emulated by the relay, for packets cannot be emulated here",
        NOTE,
    )
    WAN_FAULT = "wan.fault", "the emulated WAN changes: {what}"

    # what the coordinator notices
    CERTIFICATE_VALID = "certificate.valid", "certificate {certificate} is valid", NOTE
    CERTIFICATE_ENDING = "certificate.ending", "certificate {certificate} ends soon", NOTE
    CERTIFICATE_LAST_DAY = (
        "certificate.last_day", "certificate {certificate} ends within a day", NOTE
    )
    CERTIFICATE_EXPIRED = "certificate.expired", "certificate {certificate} has expired", NOTE
    CERTIFICATES_REVOKED = "certificates.revoked", "a new list of revoked certificates is in force"
    CERTIFICATES_LIST_REFUSED = "certificates.list_refused", "{why}", NOTE
    CLOCK_STEPPED = "clock.stepped", "the coordinator's clock was set", NOTE
    FOLDER_RESTORED = (
        "folder.restored", "files of the run's folder were removed, and are written again", NOTE
    )
    EXPORTER_TROUBLE = "exporter.trouble", "an exporter has a problem", NOTE

    # how it ends
    RUN_CANCEL_REQUESTED = "run.cancel_requested", "cancellation requested: {message}"
    RUN_STOPPING = "run.stopping", "all sites are stopped: {reason}", NOTE
    RUN_ENDED = (
        "run.ended", "run {run} {state}: {reason}; {note}",
        Seen(is_note=True, exported="end"),
    )
    RUN_SIMULATED = "run.simulated", "the run was simulated", NOTE
    RUN_RECOVERED = "run.recovered", "the run continues after a simulated failure"
    # fmt: on


STORAGE_FAILURES = frozenset(
    {
        EventKind.CHECKPOINT_FAILED,
        EventKind.STORE_FAILED,
        EventKind.CHECKPOINT_STAYS,
        EventKind.STATE_FAILED,
    }
)
"""A site could not write, or remove, something in storage."""


_BY_NAME: Mapping[str, EventKind] = {kind.value: kind for kind in EventKind}
_NOWHERE = Seen()


def kind_named(name: str) -> EventKind:
    """Return the kind that is written so.

    Raises:
        KeyError: there is none in this build.
    """
    return _BY_NAME[name]


def seen_of(kind: str) -> Seen:
    """Return where a kind of event is seen; one that this build does not know is not."""
    known = _BY_NAME.get(kind)
    return _NOWHERE if known is None else known.seen


def text_of(kind: str, site: str, detail: Mapping[str, Any], run_id: str = "") -> str:
    """Return an event in a line; what is not in its detail is left out of the words."""
    about, note = _BY_NAME.get(kind), detail.get("note")
    text = "" if about is None else about.text
    if note and "{note}" not in text:
        return str(note)
    known = {"run": run_id, "site": site} | {name: _in_words(each) for name, each in detail.items()}
    found = re.sub(r"[:;,\s]+([:;]|$)", r"\1", " ".join(text.format_map(_Known(known)).split()))
    return found.lstrip(": ") or f"{kind} {site}".rstrip()


class _Known(dict[str, str]):
    def __missing__(self, _: str) -> str:
        return ""


def _in_words(value: object) -> str:
    match value:
        case None:
            return ""
        case float():
            return f"{value:.3g}"
        case list() | tuple():
            return ", ".join(map(str, value))
    return str(value)
