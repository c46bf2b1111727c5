"""Mutual TLS for plain byte streams, with the same files as gRPC's connections.

A party's processes on several machines use it: a site's agent, and the supervisors of its nodes
that neither ssh nor srun reaches. Both ends show the same certificate.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import Awaitable, Callable

from isthmus.protos.identities import Identity
from isthmus.protos.mutual_tls import CertificateError, TlsSecurity
from isthmus.protos.security import control_security

HANDSHAKE_S = 10.0
"""Time limit of a handshake."""

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
    context, identity = _context(security, ssl.PROTOCOL_TLS_SERVER)

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
    context, identity = _context(_security(name), ssl.PROTOCOL_TLS_CLIENT)
    return await asyncio.open_connection(
        host,
        port,
        ssl=context,
        server_hostname=identity.dns_name,
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


def _context(security: TlsSecurity, protocol: int) -> tuple[ssl.SSLContext, Identity]:
    """Return the TLS context for both ends, and this party's identity."""
    own = security.read()
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=own.ca.decode("ascii"))
    files = security.files
    context.load_cert_chain(os.path.realpath(files.cert), os.path.realpath(files.key))
    return context, own.identity
