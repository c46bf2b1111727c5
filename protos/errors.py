"""Errors that cross process boundaries; error_statuses.py has their gRPC status codes.

The classes differ by who must act. An invalid YAML file never crosses the wire:
topology/spec/errors.py.
"""

from isthmus.protos.failure import FILE_ERRNOS, Failure, one_line, reason_of


class IsthmusError(Exception):
    """Base of our errors: a failure that a peer, an operator or a retry must handle."""

    code = "INTERNAL"
    """A key of protos/catalogue.py."""
    retryable = False


class LocalProtocolError(IsthmusError):
    """We broke the contract: our bug."""

    code = "INTERNAL"


class ScriptError(IsthmusError):
    """The script is wrong for several sites; the message has the remedy."""

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
    """The caller is not identified: no secret, or an unknown one."""

    code = "UNAUTHENTICATED"


class PermissionDeniedError(IsthmusError):
    """The caller is not allowed to do this."""

    code = "PERMISSION_DENIED"


class RankLostError(IsthmusError):
    """A rank went away without leaving."""

    code = "RANK_LOST"


class LayoutMismatchError(IsthmusError):
    """Two sites or ranks do not reduce the same sequence of buckets."""

    code = "LAYOUT_MISMATCH"


class NoTokensError(IsthmusError):
    """No site has a token for a bucket, so the sum cannot be divided."""

    code = "NO_TOKENS"


class StepWithoutRoundError(IsthmusError):
    """An optimizer stepped with gradients that have not crossed."""

    code = "STEP_WITHOUT_ROUND"


class RoundWithoutStepError(IsthmusError):
    """Parameters change from round to round without a step of the counted optimizer."""

    code = "ROUND_WITHOUT_STEP"


class NotAttachedError(IsthmusError):
    """An optimizer stepped with a gradient of a parameter that does not cross."""

    code = "NOT_ATTACHED"


class NonFiniteError(IsthmusError):
    """A gradient holds NaN or infinity, and the run is configured to stop for that."""

    code = "NON_FINITE"


class GradientsDifferError(IsthmusError):
    """This rank has computed another gradient of a micro-batch than others: its hardware is bad."""

    code = "GRADIENTS_DIFFER"


class DeadlineExceededError(IsthmusError):
    """A deadline passed without the awaited event."""

    code = "TIMED_OUT"


class CorruptDataError(IsthmusError):
    """Received bytes differ from the sent ones: refetch, never average them in."""

    code = "CORRUPT_DATA"
    retryable = True


class BadCheckpointError(IsthmusError):
    """A checkpoint is half written, cut short or changed: take another one."""

    code = "BAD_CHECKPOINT"


class NoCheckpointError(IsthmusError):
    """There is no good checkpoint to resume from."""

    code = "NO_CHECKPOINT"


class StateConflictError(IsthmusError):
    """The request does not fit the current state: refused, nothing changed."""

    code = "REFUSED"


class NotFoundError(IsthmusError):
    """There is no such run, benchmark or state."""

    code = "RUN_NOT_FOUND"


def failure_of(error: BaseException, site: str = "") -> Failure:
    """Return the failure record of an error; a foreign exception counts as our bug.

    Not so what the file system refuses, as on a full disk.

    Args:
        error: Any exception.
        site: Site of the error, if the error does not name one.
    """
    if isinstance(error, OSError) and error.errno in FILE_ERRNOS:
        where = f"{error.filename}: " if error.filename else ""
        return Failure(code="FILE_ERROR", message=one_line(f"{where}{error.strerror}"), site=site)
    if not isinstance(error, IsthmusError):
        message = reason_of(error)
        return Failure(code="INTERNAL", message=message, site=site)
    if isinstance(error, PeerLostError):
        site = error.site or site
    return Failure(code=error.code, message=one_line(str(error)), site=site)
