"""Errors that cross a process boundary; error_statuses.py has their gRPC status codes.

Each class tells apart who must act. A wrong YAML file never crosses the wire:
topology/spec/errors.py.
"""

from isthmus.protos.failure import Failure, one_line, reason_of


class IsthmusError(Exception):
    """Something went wrong that a peer, an operator or a retry must handle."""

    code = "INTERNAL"
    """A key of protos/catalogue.py."""
    retryable = False


class LocalProtocolError(IsthmusError):
    """We broke the contract: our bug."""

    code = "INTERNAL"


class ScriptError(IsthmusError):
    """The script does what cannot be right with several sites; the message has the way out."""

    code = "SCRIPT_FAILED"


class RemoteProtocolError(IsthmusError):
    """The peer broke the contract: a bad or foreign message, detected and dropped."""

    code = "PROTOCOL_VIOLATION"


class ConfigMismatchError(IsthmusError):
    """Two sites were started with different configurations or incompatible builds."""

    code = "CONFIG_MISMATCH"


class StaleGenerationError(IsthmusError):
    """The caller acts for a run or generation that has ended: rejoin, then retry."""

    code = "STALE_GENERATION"
    retryable = True


class PeerLostError(IsthmusError):
    """A site or gateway cannot be reached any more. `site` names it."""

    code = "PEER_LOST"
    retryable = True

    def __init__(self, message: str, site: str = "") -> None:
        super().__init__(message)
        self.site = site


class UnauthenticatedError(IsthmusError):
    """The caller has not shown who it is: no secret, or none that this process knows."""

    code = "UNAUTHENTICATED"


class PermissionDeniedError(IsthmusError):
    """The caller is known, and may not do this."""

    code = "PERMISSION_DENIED"


class RankLostError(IsthmusError):
    """A rank went away without leaving."""

    code = "RANK_LOST"


class LayoutMismatchError(IsthmusError):
    """Two sites or ranks do not reduce the same sequence of buckets."""

    code = "LAYOUT_MISMATCH"


class NoTokensError(IsthmusError):
    """Not one site has a token behind a bucket: there is nothing to divide by."""

    code = "NO_TOKENS"


class StepWithoutRoundError(IsthmusError):
    """An optimizer stepped with gradients that have not crossed."""

    code = "STEP_WITHOUT_ROUND"


class RoundWithoutStepError(IsthmusError):
    """Something else changes the parameters than the optimizer whose steps count."""

    code = "ROUND_WITHOUT_STEP"


class NotSynchronisedError(IsthmusError):
    """An optimizer stepped with a gradient of a parameter that does not cross."""

    code = "NOT_SYNCHRONISED"


class NonFiniteError(IsthmusError):
    """A gradient holds a NaN or an infinity, and the run is configured to stop for that."""

    code = "NON_FINITE"


class DeadlineExceededError(IsthmusError):
    """Nothing happened for as long as the deadline allows."""

    code = "TIMED_OUT"


class CorruptDataError(IsthmusError):
    """Bytes are not what was sent: refetch, never average them in."""

    code = "CORRUPT_DATA"
    retryable = True


class BadCheckpointError(IsthmusError):
    """A checkpoint is half written, cut short or changed: take another one."""

    code = "BAD_CHECKPOINT"


class NoCheckpointError(IsthmusError):
    """There is no checkpoint, or no good one, to go on from."""

    code = "NO_CHECKPOINT"


class StateConflictError(IsthmusError):
    """The request does not fit the state of things: refused, nothing changed."""

    code = "REFUSED"


class NotFoundError(IsthmusError):
    """There is no such run, benchmark or state."""

    code = "RUN_NOT_FOUND"


def failure_of(error: BaseException, site: str = "") -> Failure:
    """Return the failure that an error is; one that is not ours is a bug of ours.

    Args:
        error: Any.
        site: Where it came from, if the error does not say so itself.
    """
    if not isinstance(error, IsthmusError):
        message = reason_of(error)
        return Failure(code="INTERNAL", message=message, site=site)
    if isinstance(error, PeerLostError):
        site = error.site or site
    return Failure(code=error.code, message=one_line(str(error)), site=site)
