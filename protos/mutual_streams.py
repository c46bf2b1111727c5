"""Mutual TLS for plain byte streams, with the same files as gRPC's connections.

A party's processes on several machines use it: a site's agent, and the supervisors of its nodes
that neither ssh nor srun reaches. Both ends show the same certificate.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Awaitable, Callable

from isthmus.protos.errors import IsthmusError
from isthmus.protos.failure import text_of
from isthmus.protos.identities import Identity
from isthmus.protos.mutual_tls import CertificateError, TlsSecurity
from isthmus.protos.security import control_security

HANDSHAKE_S = 10.0
"""Time limit of a handshake."""

log = logging.getLogger(__name__)

Handle = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def serve_own(name: str, host: str, port: int, handle: Handle) -> asyncio.Server:
    """Serve streams to other processes of the same party; the caller closes the server.

    Args:
        name: The party, as in `Identity.file_name`.
        host: Address to listen on.
        port: 0 lets the system choose one.
        handle: Called with each authenticated stream, which it then owns.

    Raises:
        CertificateError: TLS is off, or this party's own files cannot be used.
        OSError: the address cannot be bound.
    """
    security = _security(name)
    context, identity = security.server_tls(), security.read().identity

    def renew(connection: ssl.SSLObject, *_: object) -> None:
        """Have a handshake use the files as they are now."""
        try:
            connection.context = security.server_tls()
        except (IsthmusError, OSError) as error:
            log.warning("%s: keeping the previous certificate", text_of(error))

    context.sni_callback = renew

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if identity_shown(writer) == identity:
                await handle(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    return await asyncio.start_server(
        accept, host, port, ssl=context, ssl_handshake_timeout=HANDSHAKE_S
    )


async def dial_own(
    name: str, host: str, port: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return a stream to another process of the same party; the caller closes it.

    Raises:
        CertificateError: TLS is off, or this party's own files cannot be used. ssl.SSLError: the
            other end is another party. OSError: nothing listens there.
    """
    context, server_name = _security(name).client_tls(name)
    return await asyncio.open_connection(
        host,
        port,
        ssl=context,
        server_hostname=server_name,
        ssl_handshake_timeout=HANDSHAKE_S,
    )


def identity_shown(writer: asyncio.StreamWriter) -> Identity | None:
    """Return the identity in the other end's certificate; None if it is not ours."""
    certificate = writer.get_extra_info("peercert") or {}
    names = certificate.get("subjectAltName", ())
    uris = [value for kind, value in names if kind == "URI"]
    return Identity.of_uri(uris[0]) if len(uris) == 1 else None


def _security(name: str) -> TlsSecurity:
    security = control_security(name)
    if not isinstance(security, TlsSecurity):
        raise CertificateError("machines of a site speak by mutual TLS, and there is none")
    return security
