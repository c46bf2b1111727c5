"""What happens to a run, and what the coordinator does about it: frozen facts, no behaviour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from isthmus.orchestrator.core.stall_watch import AbsentRank
from isthmus.protos.failure import Failure
from isthmus.topology.spec.epoch import Epoch, Finished, Handover
from isthmus.topology.spec.run_spec import CodedPlan

if TYPE_CHECKING:
    from isthmus.orchestrator.core.event_kinds import EventKind


class RunState(StrEnum):
    """How far a run has got: RUN_STATE_ of protos/control/v1/control.proto."""

    QUEUED = "QUEUED"
    FORMING = "FORMING"
    ACTIVE = "ACTIVE"
    STOPPING = "STOPPING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def is_terminal(self) -> bool:
        """Whether a run stays in this state."""
        return self in {RunState.SUCCEEDED, RunState.FAILED, RunState.CANCELLED}


class SiteState(StrEnum):
    """How far a site has got, in this order: SITE_STATE_ of protos/control/v1/control.proto."""

    ABSENT = "ABSENT"
    JOINED = "JOINED"
    PREPARED = "PREPARED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    ENDED = "ENDED"
    LOST = "LOST"
    RETURNING = "RETURNING"
    DROPPED = "DROPPED"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a gateway of a site is reached."""

    site: str
    gateway: int
    """Its number at the site, from 0."""
    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteNamespace:
    """What stands for a site where packets are emulated: its gateways run in it."""

    site: str
    address: str
    """The site's address, the same in every site's namespace."""
    net: str
    """File of the network namespace, there for as long as the emulator."""
    user: str
    """File of the user namespace that owns it, to be entered first; empty: none."""


# ---------------------------------------------------------------- in


@dataclass(frozen=True, slots=True)
class SiteJoined:
    """An agent of the site holds a lease."""

    site: str
    host: str
    epoch: int = 0
    """The latest that has begun there, where the run goes on at the site."""


@dataclass(frozen=True, slots=True)
class SiteLost:
    """The site's agent went away or was silent for too long."""

    site: str
    message: str
    silent_s: float = 0.0
    """How long before now it was last heard."""


@dataclass(frozen=True, slots=True)
class SessionBroken:
    """The connection of the site's agent broke. Its lease goes on."""

    site: str
    message: str


@dataclass(frozen=True, slots=True)
class SessionResumed:
    """The site's agent is back within its lease, and nothing was lost."""

    site: str
    silent_s: float
    """How long it had not been heard."""


@dataclass(frozen=True, slots=True)
class SiteReturned:
    """An agent has come back whose lease had ended, or to a coordinator that was started again."""

    site: str
    host: str
    epoch: int = 0
    """The latest that has begun there."""
    has_run: bool = True
    """The run goes on there."""


@dataclass(frozen=True, slots=True)
class AgentCame:
    """An agent has joined that this coordinator has not known, or not lately."""

    site: str
    host: str
    epoch: int = 0
    """The latest that has begun there."""
    had_session: bool = False
    """It was in a session before, with this coordinator or an earlier one."""
    has_run: bool = False
    """A run goes on there."""
    but: str = ""
    """What may excuse an agent that is given up."""


@dataclass(frozen=True, slots=True)
class AgentMissed:
    """The lease is over of an agent that was awaited when this coordinator began."""

    site: str
    silent_s: float
    but: str = ""
    """What may excuse an agent that is given up."""


@dataclass(frozen=True, slots=True)
class AgentEnded:
    """An agent that the coordinator itself had started ended without ever having joined."""

    site: str
    message: str
    log_path: str


@dataclass(frozen=True, slots=True)
class SitePrepared:
    """The site's gateways listen."""

    site: str
    endpoints: tuple[Endpoint, ...]


@dataclass(frozen=True, slots=True)
class NamespacesOpened:
    """The WAN is emulated packet by packet; each site has a namespace."""

    namespaces: Mapping[str, SiteNamespace]
    """The namespaces, by site."""


@dataclass(frozen=True, slots=True)
class NamespacesRefused:
    """The WAN cannot be emulated packet by packet here."""

    why: str


@dataclass(frozen=True, slots=True)
class RelayOpened:
    """A relay leads to gateways: the WAN is emulated in user space."""

    ways: Mapping[Endpoint, Mapping[str, Endpoint]]
    """For each of the gateways: where it is dialled instead, by the dialling site."""


@dataclass(frozen=True, slots=True)
class EmulatorEnded:
    """The emulated WAN could not be started, or ended by itself."""

    message: str
    log_path: str = ""


@dataclass(frozen=True, slots=True)
class SiteRunning:
    """All ranks of the site have joined their gateways."""

    site: str


@dataclass(frozen=True, slots=True)
class SiteDone:
    """All ranks of the site are done with the job."""

    site: str
    round: int = -1
    """The last that they have begun; -1: not known."""


@dataclass(frozen=True, slots=True)
class SiteEnded:
    """No process of the run is left at the site."""

    site: str
    succeeded: bool
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True)
class DigestReported:
    """One rank's hashes of all parameters after a step."""

    site: str
    rank: int
    step: int
    combined: int
    tensors: tuple[int, ...]
    names: tuple[str, ...]
    round: int = -1
    """The last in which the step's gradients crossed; -1: they have not, or it is not known."""


@dataclass(frozen=True, slots=True)
class StepEnded:
    """A rank has taken an optimizer step whose gradients crossed last in a round."""

    site: str
    rank: int
    step: int
    round: int


@dataclass(frozen=True, slots=True)
class GradientReported:
    """The hash of a site's own gradient of a step, before it was averaged over sites."""

    site: str
    step: int
    gradient_hash: int
    input_hash: int = 0
    """Hash of the inputs that its first rank called the model with."""


@dataclass(frozen=True, slots=True)
class BuffersReported:
    """Hashes of a site's buffers after a step, by name."""

    site: str
    step: int
    hashes: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SiteSampled:
    """A site's script divides data over the ranks of the site, as if there were no other."""

    site: str
    data: str
    """What it divides: the dataset's length and the seed."""


@dataclass(frozen=True, slots=True)
class SamplerMade:
    """A rank has made its sampler."""

    site: str
    rank: int
    data: str
    """The dataset's length, and more that all ranks have to have alike."""


@dataclass(frozen=True, slots=True)
class NonFiniteReported:
    """A gradient of a step held a NaN or an infinity, and the run goes on with it."""

    site: str
    rank: int
    """-1: it was the average over sites."""
    step: int
    tensor: str
    message: str


@dataclass(frozen=True, slots=True)
class SiteFetching:
    """A site gets on with what it fetches before its gateways start."""

    site: str


@dataclass(frozen=True, slots=True)
class SiteNoted:
    """Something that people should know of a site while the run goes on."""

    kind: EventKind
    """The kind of event that the journal gets."""
    site: str
    note: str


@dataclass(frozen=True, slots=True)
class StepTaken:
    """The ranks of a site have taken a step of the run."""

    site: str


@dataclass(frozen=True, slots=True)
class StateOffered:
    """The site's script can give the run's state, and take it over: it calls `site.checkpoint`."""

    site: str


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    """A checkpoint is complete, told by the site that publishes it."""

    site: str
    step: int


@dataclass(frozen=True, slots=True)
class StorageFailed:
    """A site could not write, or remove, something in storage. Training goes on."""

    kind: EventKind
    """The kind of event that the journal gets: one of STORAGE_FAILURES."""
    site: str
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class StallReported:
    """Ranks of the site have not moved for failure.stall_within."""

    site: str
    absent: tuple[AbsentRank, ...]
    """The ranks that have handed nothing over."""
    is_waiting: bool
    """Other ranks of the site have handed something over, and wait."""
    is_behind: bool = False
    """The site catches up, and results wait for its ranks."""


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """Somebody wants the run to end."""

    message: str


@dataclass(frozen=True, slots=True)
class DropRequested:
    """Somebody wants a site to take part no more."""

    site: str
    message: str


@dataclass(frozen=True, slots=True)
class AddRequested:
    """Somebody wants a site that takes no part to be started again."""

    site: str


@dataclass(frozen=True, slots=True)
class Suspected:
    """A site cannot reach another."""

    by: str
    site: str
    is_gone: bool
    """Whether the other refuses or said that it ends; else it has been silent for `detect_s`."""
    why: str


@dataclass(frozen=True, slots=True)
class Reached:
    """A site reaches another again."""

    by: str
    site: str


@dataclass(frozen=True, slots=True)
class RoundBegun:
    """How far a site has got, said again and again: the latest round that a rank there has begun.

    0 where none has.
    """

    site: str
    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SitePaused:
    """A site begins no new round, and reports how far it has got: the answer to SendPause."""

    site: str
    epoch: int
    round: int
    """The latest that it has begun; -1: none."""
    finished: tuple[Finished, ...] = ()
    """Finished chunks of rounds that others may not have finished."""
    chain: int = 0
    """What the digests of all rounds up to `chain_round` add up to."""
    chain_round: int = -1
    """The latest that it has completed; -1: none."""
    why: str = ""
    """Why it cannot take part; empty: it can."""
    must_keep_codecs: bool = False
    """Why it cannot: its ranks encode, and a chunk would have another codec."""


@dataclass(frozen=True, slots=True)
class EpochEntered:
    """The ranks of a member have begun the first round of an epoch in which a site rejoins.

    A site that catches up says so once its ranks have begun a round together with the others.
    """

    by: str
    epoch: int
    round: int
    behind: int = 0
    """How many rounds the site that catches up may still lack; 0 for a member."""


@dataclass(frozen=True, slots=True)
class TreesWanted:
    """Other trees, parts of the batch, or another regime are wanted; TreesEnded answers."""

    members: tuple[str, ...]
    """The sites that the trees were made for."""
    reduction: CodedPlan
    why: str
    parts: tuple[int, ...] = ()
    """What each site of the run is to get of the batch; empty: what it gets by now."""
    regime: str | None = None
    """The kind of regime that the run is to have; None: what it has by now."""


# ------------------------------------------------- in, as the epochs decide (epochs.py)


@dataclass(frozen=True, slots=True)
class GoOnWithout:
    """The run goes on without the site: whatever is left there has to go."""

    site: str
    why: str


@dataclass(frozen=True, slots=True)
class DropRefused:
    """A site that was to be dropped stays, for the others cannot do without it."""

    site: str
    why: str


@dataclass(frozen=True, slots=True)
class SiteEndedEarly:
    """A site's ranks are done with the job, and another site has begun a later round."""

    site: str
    round: int
    """Its last."""
    by: str
    by_round: int
    num_left: int
    """How many sites would go on without those that are done."""


@dataclass(frozen=True, slots=True)
class SiteRejoined:
    """A site that was lost takes part again."""

    site: str
    round: int


@dataclass(frozen=True, slots=True)
class CannotGoOn:
    """What is left of the run cannot go on."""

    code: str
    why: str


@dataclass(frozen=True, slots=True)
class CertificateSeen:
    """Somebody has said when a certificate of the deployment ends."""

    site: str | None
    """None: the coordinator's own."""
    name: str
    """As its file is called: `coordinator`, `eu.agent`."""
    ends_wall_s: float
    left_s: float
    """Below 0 once it has expired."""


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed."""


RankReport = (
    DigestReported
    | StepEnded
    | GradientReported
    | SamplerMade
    | BuffersReported
    | SiteSampled
    | NonFiniteReported
    | StallReported
    | StepTaken
    | StateOffered
    | CheckpointWritten
    | StorageFailed
    | SiteNoted
)
"""What ranks report while they train: it changes nothing in who takes part (rank_reports.py)."""
EpochReport = Suspected | Reached | RoundBegun | SitePaused | EpochEntered | TreesWanted
"""What only the epochs hear (epochs.py)."""
Outcome = GoOnWithout | DropRefused | SiteEndedEarly | SiteRejoined | CannotGoOn
Event = (
    SiteJoined
    | SiteLost
    | SessionBroken
    | SessionResumed
    | SiteReturned
    | AgentCame
    | AgentMissed
    | AgentEnded
    | SiteFetching
    | SitePrepared
    | NamespacesOpened
    | NamespacesRefused
    | RelayOpened
    | EmulatorEnded
    | SiteRunning
    | SiteDone
    | SiteEnded
    | RankReport
    | CancelRequested
    | DropRequested
    | AddRequested
    | EpochReport
    | Outcome
    | CertificateSeen
    | Ticked
)

# ---------------------------------------------------------------- out


@dataclass(frozen=True, slots=True)
class SendPrepare:
    """Tell the site's agent to start its gateways."""

    site: str
    namespace: SiteNamespace | None = None
    """Where to start them; None: where the agent runs."""
    returns: bool = False
    """The run goes on, and the site comes back to it."""


@dataclass(frozen=True, slots=True)
class OpenNamespaces:
    """Emulate the WAN packet by packet; NamespacesOpened, -Refused or EmulatorEnded answers."""


@dataclass(frozen=True, slots=True)
class OpenRelay:
    """Have a relay lead to these gateways: RelayOpened answers.

    Or EmulatorEnded, at first. Where the run goes on, GoOnWithout says that it does not lead there.
    """

    endpoints: tuple[Endpoint, ...]


@dataclass(frozen=True, slots=True)
class SendStart:
    """Tell the site's agent to connect to these gateways and to start its ranks."""

    site: str
    endpoints: tuple[Endpoint, ...]


@dataclass(frozen=True, slots=True)
class SendRelease:
    """Tell the site's agent that no site needs its gateways any more."""

    site: str


@dataclass(frozen=True, slots=True)
class SendStop:
    """Tell the site's agent to end the run's processes."""

    site: str
    reason: str
    grace_s: float


@dataclass(frozen=True, slots=True)
class SendPause:
    """Have a site begin no new round, and report how far its gateways have got."""

    site: str
    epoch: int
    lost: tuple[str, ...]
    is_redo: bool
    """Whether chunks of older epochs stop crossing; else the rounds that have begun go on."""
    reduction: CodedPlan | None = None
    """The trees that are wanted: the site says whether it can have them. None: any."""


@dataclass(frozen=True, slots=True)
class SendResume:
    """Tell a site's agent the new epoch."""

    site: str
    epoch: Epoch
    handovers: tuple[Handover, ...]
    rejoins: tuple[str, ...] = ()
    """Members that come back. Others begin the epoch with the round that their ranks mark."""


@dataclass(frozen=True, slots=True)
class SendCancel:
    """Tell a site's agent that the change does not come."""

    site: str
    epoch: int


@dataclass(frozen=True, slots=True)
class EpochBegun:
    """The run has an epoch that whoever plans again may not have wanted."""

    epoch: Epoch
    dead_links: frozenset[tuple[str, str]]
    """Members that do not reach each other, in ascending order."""


@dataclass(frozen=True, slots=True)
class TreesEnded:
    """What came of trees that were wanted: an epoch, or why there is none."""

    epoch: Epoch | None
    site: str = ""
    """Who could not."""
    why: str = ""
    must_keep_codecs: bool = False
    """It could not because its ranks encode, and a chunk would have had another codec."""


@dataclass(frozen=True, slots=True)
class RecordEvent:
    """Write a line into the journal; orchestrator/core/journaled_run.py reads it again."""

    kind: EventKind
    site: str = ""
    detail: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FinishRun:
    """The run has ended. Sent once, as the last action."""

    state: RunState
    reason_code: str
    reason: str
    failure: Failure | None


EpochMessage = SendPause | SendResume | SendCancel
Action = (
    SendPrepare
    | OpenNamespaces
    | OpenRelay
    | SendStart
    | SendRelease
    | SendStop
    | EpochMessage
    | EpochBegun
    | TreesEnded
    | RecordEvent
    | FinishRun
)
