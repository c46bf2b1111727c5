"""How a call between gateways ends: gRPC's statuses."""

from __future__ import annotations

from enum import IntEnum

from isthmus.protos.error_statuses import STATUS
from isthmus.protos.errors import IsthmusError


class Status(IntEnum):
    """gRPC's statuses, by their numbers in trailers."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


def status_of(error: IsthmusError) -> Status:
    """Return the status of a call that ends with an error."""
    status = STATUS.get(type(error))
    return Status.INTERNAL if status is None else Status[status.name]


class CallError(Exception):
    """A call was refused, or its connection broke."""

    def __init__(self, status: Status, why: str) -> None:
        super().__init__(why)
        self.status = status
        self.why = why
        """The reason in one line."""
