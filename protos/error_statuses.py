"""Maps errors to gRPC's statuses on servers, and back on clients.

Separate from the error classes, because ranks use these and gRPC would slow their start.
"""

from __future__ import annotations

import grpc

from isthmus.protos.errors import (
    ConfigMismatchError,
    CorruptDataError,
    DeadlineExceededError,
    IsthmusError,
    LocalProtocolError,
    NotFoundError,
    PeerLostError,
    PermissionDeniedError,
    RemoteProtocolError,
    StaleGenerationError,
    StateConflictError,
    UnauthenticatedError,
)

STATUS: dict[type[IsthmusError], grpc.StatusCode] = {
    LocalProtocolError: grpc.StatusCode.INTERNAL,
    RemoteProtocolError: grpc.StatusCode.INVALID_ARGUMENT,
    ConfigMismatchError: grpc.StatusCode.FAILED_PRECONDITION,
    StaleGenerationError: grpc.StatusCode.ABORTED,
    PeerLostError: grpc.StatusCode.UNAVAILABLE,
    DeadlineExceededError: grpc.StatusCode.DEADLINE_EXCEEDED,
    CorruptDataError: grpc.StatusCode.DATA_LOSS,
    StateConflictError: grpc.StatusCode.ALREADY_EXISTS,
    NotFoundError: grpc.StatusCode.NOT_FOUND,
    UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    PermissionDeniedError: grpc.StatusCode.PERMISSION_DENIED,
}
"""Status that a server answers for each error; clients map it back with `error_for`."""

_BY_STATUS = {status: kind for kind, status in STATUS.items()}


def error_for(status: grpc.StatusCode, detail: str) -> IsthmusError:
    """Return the error that a status stands for, with the server's one line."""
    kind = _BY_STATUS.get(status, LocalProtocolError)
    return kind(detail or status.name)
