"""The agent's channel to the coordinator, reopened when the agent's certificate is renewed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from isthmus.protos.control.v1.control_pb2_grpc import CoordinatorStub
from isthmus.protos.errors import IsthmusError
from isthmus.protos.identities import COORDINATOR
from isthmus.protos.security import Options, Security

if TYPE_CHECKING:
    from isthmus.protos.control.v1.control_pb2_grpc import CoordinatorAsyncStub

log = logging.getLogger(__name__)


class CoordinatorChannel:
    """A gRPC channel to the coordinator's address. The creator closes it."""

    def __init__(self, security: Security, address: str, options: Options) -> None:
        """Open the channel.

        Raises:
            CertificateError: this agent's own files cannot be used.
        """
        self._security = security
        self._address = address
        self._options = options
        self._made_of = security.version()
        self._channel = security.aio_channel(address, options, COORDINATOR)

    @property
    def stub(self) -> CoordinatorAsyncStub:
        """The stub of the coordinator's service."""
        return CoordinatorStub(self._channel)  # type: ignore[return-value]

    async def refresh(self) -> None:
        """Reload changed certificate files; if they are not valid, keep the old ones."""
        try:
            version = self._security.version()
            if version == self._made_of:
                return
            channel = self._security.aio_channel(self._address, self._options, COORDINATOR)
        except IsthmusError as error:
            log.warning("%s: keeping the previous certificate", error)
            return
        old, self._channel, self._made_of = self._channel, channel, version
        log.info("the certificate was renewed, and is now in use")
        await old.close()

    async def close(self) -> None:
        """End all calls."""
        await self._channel.close()
