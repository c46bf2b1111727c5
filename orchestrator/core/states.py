"""The states of a run and of its sites: the contract's enums, by their short names."""

from enum import StrEnum


class RunState(StrEnum):
    """RUN_STATE_ of protos/control/v1/control.proto."""

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
    """SITE_STATE_ of protos/control/v1/control.proto, in the order in which a site comes up."""

    ABSENT = "ABSENT"
    JOINED = "JOINED"
    PREPARED = "PREPARED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    ENDED = "ENDED"
    LOST = "LOST"
