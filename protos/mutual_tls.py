"""Mutual TLS: both ends show a certificate of the deployment's own authority.

A new connection uses the files' current content, so a renewed certificate takes effect without a
restart. Open connections are not changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import grpc
import grpc.aio

from isthmus.protos import kernel_tls
from isthmus.protos.errors import IsthmusError, PermissionDeniedError
from isthmus.protos.failure import text_of
from isthmus.protos.identities import CALLERS, WARN_DAYS, Identity
from isthmus.protos.limits import CONNECTION_LIMITS
from isthmus.protos.private_files import UnsafeFileError, read_secret
from isthmus.protos.revocation import RevocationError, RevocationList

if TYPE_CHECKING:
    from cryptography import x509

    Handler = grpc.RpcMethodHandler[Any, Any]
    Context = grpc.aio.ServicerContext[Any, Any]

NAME: Final = "{name}"
"""Placeholder in a path for the reading party: `coordinator`, `operator`, `eu.agent`,
`eu.gateway`."""
WATCH_S: Final = 60.0
_SAY_S: Final = 3600.0
"""Between two warnings that a certificate cannot be used."""
_DAY_S: Final = 86_400.0
_ALPN: Final = "h2"
"""Application protocol announced in TLS, which gRPC requires."""

Options = Sequence[tuple[str, int | str]]
OnRefused = Callable[[str], None]
"""Callback for each refused call, with one line."""

log = logging.getLogger(__name__)


class Caller(Protocol):
    """The caller of a call, in the form of gRPC's contexts."""

    def invocation_metadata(self) -> Any:  # noqa: ANN401 - pairs, or None
        """Return the metadata of the call."""

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """Return the caller's certificate, under `x509_pem_cert`, and its URIs, as `peer_uri`."""

    def peer(self) -> str:
        """Return the caller's address."""


class CertificateError(IsthmusError):
    """A certificate or key cannot be used: missing, expired, or another party's."""

    code = "BAD_CERTIFICATE"


class UnlikeKeyError(CertificateError):
    """A key does not belong to the certificate beside it."""


class ForeignCertificateError(CertificateError):
    """A certificate's authority is not trusted here."""


class NotYetValidError(CertificateError):
    """A certificate is not valid yet: this machine's clock is behind, or its maker's ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Paths of PEM files; NAME in a path stands for the reading party."""

    ca: str
    """Certificates of the trusted authorities."""
    cert: str
    """The party's own certificate, followed by intermediate ones, if any."""
    key: str

    def of(self, name: str) -> TlsFiles:
        """Return one party's own files."""
        ca, cert, key = (each.replace(NAME, name) for each in (self.ca, self.cert, self.key))
        return TlsFiles(ca=ca, cert=cert, key=key)

    @property
    def revocations(self) -> Path:
        """Where a coordinator looks for the list of revoked certificates: beside `ca`."""
        return Path(self.ca).with_suffix(".crl")


@dataclass(frozen=True, slots=True)
class Credentials:
    """The files' content at one moment."""

    ca: bytes
    cert: bytes
    key: bytes
    identity: Identity
    ends: datetime


class TlsSecurity:
    """One party's end of all its connections."""

    def __init__(self, files: TlsFiles, name: str) -> None:
        self._name = name
        self.files = files.of(name)
        self._warned_s = -_DAY_S
        self._kept: tuple[list[int], Credentials] | None = None
        self._ends: datetime | None = None
        """When the certificate that was read last ends; None: none was."""
        self._contexts: dict[int, tuple[list[int], ssl.SSLContext]] = {}
        """TLS context by protocol, with the version of its files; reused until these change."""
        self.revoked: RevocationList | None = None
        """The list of revoked certificates that is in force; None: none has come."""

    def channel(self, address: str, options: Options, to: str) -> grpc.Channel:
        """Return a fresh connection to the party `to`; the caller closes it.

        Raises:
            CertificateError: this party's own files cannot be used.
        """
        credentials, options = self._client(options, to)
        return grpc.secure_channel(address, credentials, options=options)

    def aio_channel(self, address: str, options: Options, to: str) -> grpc.aio.Channel:
        """Return a fresh connection to `to` for the running event loop; the caller closes it.

        Raises:
            CertificateError: this party's own files cannot be used.
        """
        credentials, options = self._client(options, to)
        return grpc.aio.secure_channel(address, credentials, options=options)

    def server(
        self, options: Options, num_rpcs: int, on_refused: OnRefused = log.warning
    ) -> grpc.aio.Server:
        """Return a server that admits callers by their role; it does not listen yet."""
        doorkeeper = _Doorkeeper(self, self.read().identity.domain, on_refused)
        return grpc.aio.server(
            interceptors=[doorkeeper],
            options=[*options, *CONNECTION_LIMITS],
            maximum_concurrent_rpcs=num_rpcs,
        )

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """Bind `host:port` and return the port; 0 lets the system choose one.

        Raises:
            CertificateError: this party's own files cannot be used.
            RuntimeError: the address cannot be bound.
        """
        read_at = self._changed_at()
        first = _configured(self.read())

        def newest() -> grpc.ServerCertificateConfiguration | None:
            nonlocal read_at
            try:
                changed_at = self._changed_at()
                if changed_at == read_at:
                    return None
                newest_config = _configured(self.read())
            except (CertificateError, UnsafeFileError) as error:
                log.warning("%s: keeping the previous certificate", error)
                return None
            read_at = changed_at
            log.info("%s: reloaded", self.files.cert)
            return newest_config

        credentials = grpc.dynamic_ssl_server_credentials(
            first,
            newest,  # type: ignore[arg-type]  # None: as before
            require_client_authentication=True,
        )
        return server.add_secure_port(address, credentials)

    def shown(self) -> tuple[tuple[str, str], ...]:
        """Return no metadata: the certificate identifies the caller."""
        return ()

    def client_tls(self, to: str) -> tuple[ssl.SSLContext, str]:
        """Return the TLS context for a connection to `to`, and the name that `to` must show.

        Raises:
            CertificateError: this party's own files cannot be used.
            OSError: the files do not belong together, possibly because they are being renewed.
        """
        server = Identity.of_name(self._current().identity.domain, to)
        assert server is not None, to
        return self._context(ssl.PROTOCOL_TLS_CLIENT), server.dns_name

    def server_tls(self) -> ssl.SSLContext:
        """Return the TLS context for accepted connections; callers must show a certificate.

        Raises:
            CertificateError: this party's own files cannot be used.
            OSError: as for `client_tls`.
        """
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def admit(self, method: str, context: Caller) -> None:
        """Check that the caller's role may make the call.

        Raises:
            PermissionDeniedError: the role may not, or the certificate was revoked.
        """
        why = _refusal(self._current().identity.domain, method, context)
        if why := why or self.why_revoked(context):
            raise PermissionDeniedError(why)

    def take_revoked(self, text: str) -> bool:
        """Put a list of revoked certificates in force; return whether it is a new one.

        Raises:
            RevocationError: it cannot be used, or is no newer than the one in force, which stays.
            CertificateError: the authorities' file cannot be read.
        """
        if self.revoked is not None and self.revoked.text == text:
            return False
        found = RevocationList.read(text, self._authorities())
        if self.revoked is not None and found.number <= self.revoked.number:
            raise RevocationError(
                f"its number is {found.number}, and that of the list in force {self.revoked.number}"
            )
        self.revoked = found
        return True

    def why_revoked(self, caller: Caller) -> str:
        """Return why the certificate at a connection's other end counts no more; empty: it does."""
        if self.revoked is None:
            return ""
        shown = certificate_of(caller)
        if not shown or not self.revoked.has(shown):
            return ""
        return f"the certificate of {caller_of(caller) or 'nobody'} was revoked"

    def _context(self, protocol: int) -> ssl.SSLContext:
        """Return the TLS context, cached because it takes milliseconds to make."""
        changed_at = self._changed_at()
        kept_at, kept = self._contexts.get(protocol, (None, None))
        if kept is not None and kept_at == changed_at:
            return kept
        self._current()
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols([_ALPN])
        kernel_tls.ask_for(context)
        context.verify_mode = ssl.CERT_REQUIRED
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0  # sessions are not resumed
        context.load_verify_locations(self.files.ca)
        key = os.path.realpath(self.files.key)
        # Without a password OpenSSL asks for one at the terminal, and waits.
        context.load_cert_chain(self.files.cert, key, password="")
        self._contexts[protocol] = changed_at, context
        return context

    def _current(self) -> Credentials:
        """Return the files' content, reloaded only if they have changed."""
        changed_at = self._changed_at()
        if self._kept is None or self._kept[0] != changed_at:
            self._kept = changed_at, self.read()
        return self._kept[1]

    def version(self) -> object:
        """Return a value that changes when the files do; connections should then be renewed.

        Raises:
            CertificateError: a file is missing.
        """
        return self._changed_at()

    async def watch(self) -> None:
        """Check the party's certificate periodically, and warn before it expires. Never returns.

        A connection that stays open for months reads no files.
        """
        said_s = -_SAY_S
        while True:
            try:
                await asyncio.to_thread(self.read)
                said_s = -_SAY_S
            except (CertificateError, UnsafeFileError) as error:
                if time.monotonic() - said_s >= _SAY_S:
                    said_s = time.monotonic()
                    log.warning("%s", error)
            await asyncio.sleep(WATCH_S)

    def left_s(self) -> float | None:
        """Return seconds until the certificate ends, below 0 once it has; None: there is none.

        Of files that cannot be read now, what was read of them last.
        """
        with contextlib.suppress(CertificateError, UnsafeFileError):
            self._current()
        return None if self._ends is None else (self._ends - datetime.now(UTC)).total_seconds()

    def read(self) -> Credentials:
        """Read the files as they are now.

        Raises:
            CertificateError: the files cannot be used.
            UnsafeFileError: other users may read the key.
        """
        try:
            return self._read()
        except UnlikeKeyError:  # the files were replaced while being read
            return self._read()

    def _read(self) -> Credentials:
        """Read the files once; raises as `read`."""
        from cryptography import x509  # imported late: not needed without TLS
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        files = self.files
        try:
            ca, cert = Path(files.ca).read_bytes(), Path(files.cert).read_bytes()
            # cert-manager's and Kubernetes' files are links, which are replaced at once.
            key = read_secret(Path(os.path.realpath(files.key)))
            chain = x509.load_pem_x509_certificates(cert)
            own = chain[0]
            authorities = x509.load_pem_x509_certificates(ca)
        except OSError as error:
            raise CertificateError(f"{error.filename}: {error.strerror}") from error
        except (ValueError, IndexError) as error:
            raise CertificateError(
                f"{files.cert}: no certificate in PEM: {text_of(error)}"
            ) from error
        identity = identity_of(own)
        if identity is None or identity.file_name != self._name:
            told = identity or "nobody of this deployment (no SPIFFE URI)"
            raise CertificateError(f"{files.cert}: names {told}, and {self._name} reads it")
        try:
            is_own_key = load_pem_private_key(key, None).public_key() == own.public_key()
        except (TypeError, ValueError) as error:  # TypeError: the key has a password
            raise CertificateError(f"{files.key}: no key in PEM without a password") from error
        if not is_own_key:
            raise UnlikeKeyError(f"{files.key}: is not the key of {files.cert}")
        if not _is_signed(chain, authorities):
            raise ForeignCertificateError(
                f"{files.cert}: is of another authority than {files.ca}, which is believed here"
            )
        self._ends = own.not_valid_after_utc
        self._check_time(own)
        return Credentials(ca, cert, key, identity, own.not_valid_after_utc)

    def _check_time(self, own: x509.Certificate) -> None:
        now, begins, ends = datetime.now(UTC), own.not_valid_before_utc, own.not_valid_after_utc
        clock = f"by this machine's clock it is {now:%Y-%m-%d %H:%M}"
        left_s = (ends - now).total_seconds()
        if left_s <= 0:
            problem = f"{self.files.cert}: has expired ({ends:%Y-%m-%d %H:%M} UTC; {clock})"
            raise CertificateError(problem)
        if now < begins:
            problem = f"{self.files.cert}: counts from {begins:%Y-%m-%d %H:%M} UTC on, and {clock}"
            raise NotYetValidError(problem)
        now_s = time.monotonic()
        if left_s < WARN_DAYS * _DAY_S and now_s - self._warned_s >= _DAY_S:
            self._warned_s = now_s
            log.warning("%s: ends in %.1f days: renew it", self.files.cert, left_s / _DAY_S)

    def _client(self, options: Options, to: str) -> tuple[grpc.ChannelCredentials, Any]:
        own = self.read()
        server = Identity.of_name(own.identity.domain, to)
        assert server is not None, to
        credentials = grpc.ssl_channel_credentials(own.ca, own.key, own.cert)
        return credentials, [*options, ("grpc.ssl_target_name_override", server.dns_name)]

    def _authorities(self) -> list[x509.Certificate]:
        from cryptography import x509

        try:
            return x509.load_pem_x509_certificates(Path(self.files.ca).read_bytes())
        except OSError as error:
            raise CertificateError(f"{error.filename}: {error.strerror}") from error
        except ValueError as error:
            why = f"{self.files.ca}: no certificate in PEM: {text_of(error)}"
            raise CertificateError(why) from error

    def _changed_at(self) -> list[int]:
        files = self.files
        try:
            return [os.stat(each).st_mtime_ns for each in (files.ca, files.cert, files.key)]  # noqa: PTH116
        except OSError as error:
            raise CertificateError(f"{error.filename}: {error.strerror}") from error


def identity_of(certificate: x509.Certificate) -> Identity | None:
    """Return the identity in a certificate; None if none is ours, or more than one."""
    from cryptography import x509

    with contextlib.suppress(x509.ExtensionNotFound):
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        if len(uris) == 1:
            return Identity.of_uri(uris[0])
    return None


def _is_signed(chain: list[x509.Certificate], authorities: list[x509.Certificate]) -> bool:
    """Whether each certificate is signed by the next one, and the last by an authority."""
    for place, each in enumerate(chain):
        issuers = chain[place + 1 : place + 2] or authorities
        if not any(is_made_by(issuer, each) for issuer in issuers):
            return False
    return True


def is_made_by(issuer: x509.Certificate, certificate: x509.Certificate) -> bool:
    """Whether a certificate has an issuer's name and signature."""
    from cryptography.exceptions import InvalidSignature

    try:
        certificate.verify_directly_issued_by(issuer)
    except (InvalidSignature, TypeError, ValueError):
        return False
    return True


def caller_of(context: Caller) -> Identity | None:
    """Return the identity of a caller; None without TLS or a valid identity."""
    uris = list(context.auth_context().get("peer_uri", ()))
    if len(uris) != 1:
        return None
    return Identity.of_uri(uris[0].decode(errors="replace"))


def certificate_of(context: Caller) -> bytes:
    """Return the certificate of a caller (PEM); empty without TLS."""
    return next(iter(context.auth_context().get("x509_pem_cert", ())), b"")


def _configured(own: Credentials) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(own.key, own.cert)], own.ca)


class _Doorkeeper(grpc.aio.ServerInterceptor):
    """Passes a call to its handler if the caller's role may make it; else refuses it."""

    def __init__(self, security: TlsSecurity, domain: str, on_refused: OnRefused) -> None:
        self._security = security
        self._domain = domain
        self._on_refused = on_refused

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Return the method's handler with a check of the caller in front."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        return None if handler is None else _guarded(handler, lambda c: self._check(method, c))

    async def _check(self, method: str, context: Context) -> None:
        why = _refusal(self._domain, method, context)
        if why := why or self._security.why_revoked(context):
            self._on_refused(f"{why}; from {context.peer()}")
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, why)


def _refusal(domain: str, method: str, context: Caller) -> str:
    """Return why a caller may not make a call; empty if it may."""
    caller = caller_of(context)
    role = CALLERS.get(method)
    if caller is not None and caller.domain == domain and caller.role == role:
        return ""
    who = "a certificate that names nobody" if caller is None else f"{caller} ({caller.uri})"
    return f"{method.rpartition('/')[2]} is not for {who}: want {role or 'nobody'}"


def _guarded(handler: Handler, check: Callable[[Context], Awaitable[None]]) -> Handler:
    """Return a handler of the same kind that checks its caller first."""
    kind = "_".join(
        "stream" if streams else "unary"
        for streams in (handler.request_streaming, handler.response_streaming)
    )
    inner = getattr(handler, kind)

    async def answer(request: Any, context: Context) -> Any:  # noqa: ANN401 - any message
        await check(context)
        return await inner(request, context)

    async def stream(request: Any, context: Context) -> AsyncIterator[Any]:  # noqa: ANN401
        await check(context)
        async with contextlib.aclosing(inner(request, context)) as answers:
            async for each in answers:
                yield each

    make: Callable[..., Handler] = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(
        stream if inspect.isasyncgenfunction(inner) else answer,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
