"""Secures all channels and ports of the control and exchange planes.

Without TLS addresses are loopback, and a caller shows a *secret* that only processes of the same
user can read: other users of the machine are kept out. The secret is in one file per user, made on
first use. The exchange plane's secret is derived from it, so servers of that plane do not learn the
other secret.

With TLS both ends show certificates (`mutual_tls.py`). Environment variables, inherited by child
processes, select TLS.
"""

from __future__ import annotations

import functools
import hmac
import ipaddress
import logging
import os
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import grpc
import grpc.aio

from isthmus.protos.errors import IsthmusError, PermissionDeniedError, UnauthenticatedError
from isthmus.protos.failure import text_of
from isthmus.protos.identities import CALLERS, GATEWAY, OPERATOR
from isthmus.protos.limits import CONNECTION_LIMITS
from isthmus.protos.mutual_tls import (
    Caller,
    CertificateError,
    OnRefused,
    TlsFiles,
    TlsSecurity,
    caller_of,
)
from isthmus.protos.private_files import UnsafeFileError, make_secret, read_secret
from isthmus.protos.user_state import user_state_folder

TOKEN_FILE: Final = "ISTHMUS_TOKEN_FILE"  # noqa: S105 - the variable's name
"""Environment variable with the secret's file, if not in the user's state folder."""
TLS_VARIABLES: Final = {"ca": "ISTHMUS_CA", "cert": "ISTHMUS_CERT", "key": "ISTHMUS_KEY"}
HEADER: Final = "authorization"

_CAUSES: Final = (
    (
        re.compile(r"Hostname (Verification|mismatch)"),
        "the certificate shown there is of another party than the one that ought to answer",
    ),
    (
        re.compile(
            r"(?i)alert (unknown ca|(bad )?certificate|decrypt error)|to connect .*socket closed"
        ),
        "the certificate of this end is not believed there: it is of another authority, has "
        "expired, or one of both clocks is wrong (or no TLS is spoken there)",
    ),
    (
        re.compile(r"(?i)handshake failed|certificate.verify.failed"),
        "the certificate shown there is not believed here: it is of another authority, has "
        "expired, or one of both clocks is wrong (or no TLS is spoken there)",
    ),
)
"""Texts of gRPC and Python for failed handshakes, with their meaning."""

_CLOSED = re.compile("to connect .*Socket closed")
_PERHAPS_TLS: Final = (
    "it closes the connection at once: perhaps it speaks TLS, and this process knows no "
    f"certificates: name them in {', '.join(f'${each}' for each in TLS_VARIABLES.values())}"
)

log = logging.getLogger(__name__)

Options = Sequence[tuple[str, int | str]]
_Channel = TypeVar("_Channel", grpc.Channel, grpc.aio.Channel)
if TYPE_CHECKING:
    from isthmus.protos.mutual_tls import Handler
_METHOD_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class InsecureAddressError(IsthmusError):
    """An address that other hosts can reach, without TLS."""

    code = "INSECURE_ADDRESS"


def token_path() -> Path:
    """Return the path of this user's secret.

    Raises:
        FileNotFoundError: ISTHMUS_TOKEN_FILE is not set, and this user has no home folder.
    """
    given = os.environ.get(TOKEN_FILE)
    return Path(given) if given else user_state_folder() / "token"


@dataclass(frozen=True, slots=True)
class LoopbackSecurity:
    """Security without TLS: loopback addresses only, and callers show a secret."""

    secret: str

    def channel(self, address: str, options: Options, to: str) -> grpc.Channel:
        """Return a fresh connection; the caller closes it."""
        return self._presenting(grpc.insecure_channel(address, options=options))

    def aio_channel(self, address: str, options: Options, to: str) -> grpc.aio.Channel:
        """Return a fresh connection for the running event loop; the caller closes it."""
        return self._presenting(grpc.aio.insecure_channel(address, options=options))

    def server(
        self, options: Options, num_rpcs: int, on_refused: OnRefused = log.warning
    ) -> grpc.aio.Server:
        """Return a server that admits callers with the secret; it does not listen yet."""
        return grpc.aio.server(
            interceptors=[_Doorkeeper(self.secret, on_refused)],
            options=[*options, *CONNECTION_LIMITS],
            maximum_concurrent_rpcs=num_rpcs,
        )

    def shown(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata with the secret for a call."""
        return ((HEADER, f"Bearer {self.secret}"),)

    def client_tls(self, to: str) -> None:
        """Return None: connections are not encrypted."""

    def server_tls(self) -> None:
        """Return None: connections are not encrypted."""

    def admit(self, method: str, context: Caller) -> None:
        """Check that a call may be made.

        Raises:
            UnauthenticatedError: the call has not shown the secret.
            PermissionDeniedError: no role may call the method.
        """
        if not _shows(self.secret, dict(context.invocation_metadata() or ())):
            raise UnauthenticatedError(_show_it())
        if method not in CALLERS:
            log.warning("%s", _without_role(method))
            raise PermissionDeniedError(_without_role(method))

    def take_revoked(self, text: str) -> bool:
        """Return False: nobody shows a certificate that could be revoked."""
        return False

    def why_revoked(self, caller: Caller) -> str:
        """Return an empty text: as for `take_revoked`."""
        return ""

    async def watch(self) -> None:
        """Return at once: a secret does not expire."""

    def left_s(self) -> None:
        """Return None: there is no certificate that ends."""

    def version(self) -> object:
        """Return a constant: connections need not be renewed."""
        return None

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """Bind `host:port` and return the port; 0 lets the system choose one.

        Raises:
            RuntimeError: the address cannot be bound.
        """
        return server.add_insecure_port(address)

    def _presenting(self, channel: _Channel) -> _Channel:
        """Make every call on a channel show the secret.

        gRPC's interceptors would do it too, but they wrap calls in other classes, which cost more
        and end differently.
        """
        for kind in _METHOD_KINDS:
            setattr(channel, kind, _presenting(getattr(channel, kind), self.shown()))
        return channel


Security = LoopbackSecurity | TlsSecurity


def control_security(name: str = OPERATOR) -> Security:
    """Return the security of connections to the coordinator.

    Args:
        name: The party of this end, as in `Identity.file_name`.

    Raises:
        UnsafeFileError: others may read the secret, or it cannot be written.
    """
    files = tls_files()
    return _tls_security(files, name) if files else LoopbackSecurity(_user_secret())


def exchange_security(site: str) -> Security:
    """Return the security of connections between gateways; Hello checks run and generation.

    Args:
        site: Site of the gateway at this end.

    Raises:
        UnsafeFileError: as for `control_security`.
    """
    if files := tls_files():
        return _tls_security(files, f"{site}.{GATEWAY}")
    derived = hmac.new(_user_secret().encode(), b"isthmus exchange", "sha256")
    return LoopbackSecurity(derived.hexdigest())


@functools.cache
def _tls_security(files: TlsFiles, name: str) -> TlsSecurity:
    """Return the one TlsSecurity of a party in this process: all have one list of the revoked."""
    return TlsSecurity(files, name)


def tls_files() -> TlsFiles | None:
    """Return the paths of certificates; None: TLS is off.

    Raises:
        CertificateError: only some of the variables are set.
    """
    paths = {key: os.environ.get(variable, "") for key, variable in TLS_VARIABLES.items()}
    if not any(paths.values()):
        return None
    missing = [TLS_VARIABLES[key] for key, value in paths.items() if not value]
    if missing:
        raise CertificateError(f"{', '.join(missing)}: not set, and the others are")
    return TlsFiles(**paths)


def use_tls(files: TlsFiles) -> None:
    """Make this process and its children use TLS; variables already set win."""
    for key, variable in TLS_VARIABLES.items():
        os.environ.setdefault(variable, os.path.abspath(getattr(files, key)))  # noqa: PTH100


def explained(details: str) -> str:
    """Return why a connection failed, in plain words if certificates are the cause."""
    if tls_files() is None:
        return _PERHAPS_TLS if _CLOSED.search(details) else details
    for sign, cause in _CAUSES:
        if sign.search(details):
            return f"{cause}; `isthmus doctor TOPOLOGY` on both machines says what is wrong"
    return details


def require_protected(host: str) -> None:
    """Refuse an address that other hosts can reach, unless TLS is on.

    Raises:
        InsecureAddressError: the address is, or may be, not loopback.
    """
    if tls_files() is None and not is_loopback(host):
        raise InsecureAddressError(
            f"{host!r} is not a loopback address, and this process speaks without TLS"
        )


def is_loopback(host: str) -> bool:
    """Whether a host is this machine itself, without asking a resolver."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def require_own_site(context: Caller, site: str) -> None:
    """Refuse a caller that acts for another site.

    Raises:
        PermissionDeniedError: the certificate is another site's. Without TLS no caller is refused.
    """
    caller = caller_of(context)
    if caller is not None and caller.site != site:
        raise PermissionDeniedError(f"{caller} ({caller.uri}) speaks for site {site[:80]!r}")


def _user_secret() -> str:
    try:
        path = token_path()
    except FileNotFoundError as error:
        raise UnsafeFileError(f"the secret of this user: {error.strerror}") from error
    try:
        make_secret(path, secrets.token_hex(32).encode()) if not path.exists() else None
        secret = read_secret(path).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UnsafeFileError(
            f"{path}: {text_of(error)}; ${TOKEN_FILE} names another place"
        ) from error
    if len(secret) < 32:
        raise UnsafeFileError(f"{path}: too short for a secret: remove it, and it is made anew")
    return secret


def _presenting(make: Callable[..., Any], shown: tuple[tuple[str, str], ...]) -> Callable[..., Any]:
    """Wrap a channel's factory of callables, so that each call carries `shown`."""

    def made(*arguments: Any, **options: Any) -> _Presenting:  # noqa: ANN401 - gRPC's own
        return _Presenting(make(*arguments, **options), shown)

    return made


class _Presenting:
    """A method of a channel whose calls carry `shown` in their metadata."""

    def __init__(self, method: Any, shown: tuple[tuple[str, str], ...]) -> None:  # noqa: ANN401
        self._method = method
        self._shown = shown

    def __call__(self, *request: Any, metadata: Any = (), **rest: Any) -> Any:  # noqa: ANN401
        return self._method(*request, metadata=(*(metadata or ()), *self._shown), **rest)

    def future(self, *request: Any, metadata: Any = (), **rest: Any) -> Any:  # noqa: ANN401
        """Begin a call, and return a future of its answer."""
        return self._method.future(*request, metadata=(*(metadata or ()), *self._shown), **rest)


class _Doorkeeper(grpc.aio.ServerInterceptor):
    """Refuses calls without the secret, before any of their messages is read.

    A method without a role is refused as with TLS, so that tests notice it.
    """

    def __init__(self, secret: str, on_refused: OnRefused) -> None:
        self._secret = secret
        self._on_refused = on_refused

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Return the method's handler, or one that refuses."""
        method = handler_call_details.method
        if not _shows(self._secret, dict(handler_call_details.invocation_metadata or ())):
            self._on_refused(_unshown(method))
            return _refusing(grpc.StatusCode.UNAUTHENTICATED, _show_it())
        handler = await continuation(handler_call_details)
        if handler is not None and method not in CALLERS:
            self._on_refused(_without_role(method))
            return _refusing(grpc.StatusCode.PERMISSION_DENIED, _without_role(method))
        return handler


def _shows(secret: str, metadata: Mapping[str, str | bytes]) -> bool:
    shown = metadata.get(HEADER, "")
    shown_bytes = shown if isinstance(shown, bytes) else shown.encode()
    return hmac.compare_digest(shown_bytes, f"Bearer {secret}".encode())


def _unshown(method: str) -> str:
    return f"{method.rpartition('/')[2][:80]!r} was asked for without this user's secret"


def _without_role(method: str) -> str:
    return f"{method.rpartition('/')[2]} is for nobody: `CALLERS` has no role for it"


def _show_it() -> str:
    return (
        f"the secret in {token_path()} was not shown: be the user who started this process, or "
        f"name a copy of that file in ${TOKEN_FILE}"
    )


def _refusing(status: grpc.StatusCode, why: str) -> Handler:
    """Return a handler that refuses calls of any kind."""

    async def refuse(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(status, why)

    # On the wire all methods are streams: this kind refuses before it reads a message.
    return grpc.stream_stream_rpc_method_handler(refuse)
