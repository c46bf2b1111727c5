"""Who may read and act: checks of each request before the application sees it, and headers.

- Only GET and HEAD. Nothing can be changed, unless the operator has allowed actions.
- The Host header must name this server. Else a page from elsewhere could have its own name resolve
  to this address, and read what is here (DNS rebinding).
- A token, unless the operator does without: in the address that is printed, or as `Authorization:
  Bearer`. A browser gets a session for it: a cookie, at a path that nobody guesses. Browsers send a
  host's cookies to all of its ports, and so to other users' servers; not those of such a path.
- An action is a POST to one of its addresses, always with the token. A browser, which sends its
  cookie whoever has it ask, must also say that a page of ours asks (Origin), and show what only
  such a page has (ACTION_HEADER). So nobody else's page can have it act (CSRF).
- No script, style or picture but our own (Content-Security-Policy), and no copy in any cache.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from urllib.parse import parse_qs, quote

from starlette.datastructures import MutableHeaders
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}
TOKEN_BYTES = 24
TOKEN_VARIABLE = "ISTHMUS_DASHBOARD_TOKEN"  # noqa: S105 - the variable's name
"""Environment variable by which `launch` hands the token over: others see command lines."""
ACTION_PREFIX = "/actions/"
ACTION_HEADER = "x-isthmus-action"
"""Header with what pages were given for actions."""
_MOVED = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>isthmus</title>'
    '<link rel="icon" href="data:,"><meta http-equiv="refresh" content="0;url={0}"></head>'
    '<body><p><a href="{0}">To the dashboard</a></p></body></html>'
)
"""A page of our own, not a redirect: a browser withholds a SameSite=Strict cookie from one that
another site's link has led to."""


_NO_TOKEN = "Open the address that `isthmus dashboard` printed.\n"  # noqa: S105 - it says so


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine's users reaches an address or name."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class Access:
    """What a server lets in."""

    host: str
    """The address or name that it listens at."""
    port: int
    token: str
    """Empty: none is asked for."""
    names: tuple[str, ...] = ()
    """More names by which browsers may reach it."""
    allows_actions: bool = False
    """There is a token, then."""

    def __post_init__(self) -> None:
        assert self.token or not self.allows_actions, "who may act has a token"

    @property
    def cookie(self) -> str:
        """The session's cookie, as NAME=VALUE; browsers do not keep a machine's ports apart."""
        return f"isthmus_dashboard_{self.port}={self._derived(b'session')}"

    @property
    def root(self) -> str:
        """The path below which a browser's session is."""
        return f"/{self._derived(b'path')}" if self.token else ""

    def _derived(self, purpose: bytes) -> str:
        """Return what the token is good for, without the token."""
        return hmac.new(self.token.encode(), purpose, hashlib.sha256).hexdigest()

    def knows_host(self, header: str) -> bool:
        """Whether a Host header names this server. Its port may be another: a tunnel's."""
        name = _host_of(header)
        if name in {"localhost", self.host.lower(), *(each.lower() for each in self.names)}:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return not is_loopback(self.host) and name == socket.gethostname().lower()
        # Nobody's name resolves to an address that is spelt out.
        return address.is_loopback or not is_loopback(self.host)

    @property
    def action_token(self) -> str:
        """What a page shows beside the cookie, to act; empty: nothing can be done."""
        if not self.allows_actions:
            return ""
        return self._derived(b"actions")

    def is_own_page(self, headers: Mapping[str, str]) -> bool:
        """Whether a page of this server asks, and has what such a page was given."""
        scheme, _, origin = headers.get("origin", "").partition("://")
        return (
            scheme in {"http", "https"}
            and origin == headers.get("host", "")
            and headers.get("sec-fetch-site", "same-origin") == "same-origin"
            and hmac.compare_digest(
                headers.get(ACTION_HEADER, "").encode(), self.action_token.encode()
            )
        )

    def is_token(self, given: str | None) -> bool:
        """Compare in constant time."""
        return given is not None and hmac.compare_digest(given.encode(), self.token.encode())


def new_token() -> str:
    """Return a token that nobody guesses."""
    return secrets.token_urlsafe(TOKEN_BYTES)


def _host_of(header: str) -> str:
    """Return the name in a Host header, without port and brackets."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].lower()


class Guard:
    """The ASGI application that stands before the one that answers."""

    def __init__(self, application: ASGIApp, access: Access) -> None:
        self._application, self._access = application, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or pass it on; add the headers to its answer."""
        if scope["type"] == "lifespan":
            await self._application(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # no WebSocket is ever accepted

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        root, path = self._access.root, scope["path"]
        is_session = bool(root) and path.startswith(f"{root}/")
        if is_session:
            scope = {**scope, "path": path.removeprefix(root)}
        answer = self._refusal(scope, is_session=is_session) or self._application
        await answer(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope, *, is_session: bool) -> Response | None:
        access = self._access
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        if not access.knows_host(headers.get("host", "")):
            return PlainTextResponse("This server has another name: --name allows one.\n", 421)
        has_session = is_session and self._has_cookie(scope)
        if scope["method"] not in {"GET", "HEAD"}:
            return self._refused_action(scope, headers, has_session=has_session)
        if not access.token or has_session or access.is_token(_bearer(headers)):
            return None
        query = parse_qs(scope["query_string"].decode("latin-1"))
        if access.is_token(query.get("token", [None])[0]):
            answer = HTMLResponse(_MOVED.format(escape(access.root + quote(scope["path"]))))
            name, _, value = access.cookie.partition("=")
            answer.set_cookie(name, value, path=access.root, httponly=True, samesite="strict")
            return answer
        return PlainTextResponse(_NO_TOKEN, 401)

    def _refused_action(
        self, scope: Scope, headers: Mapping[str, str], *, has_session: bool
    ) -> Response | None:
        """Refuse what would change something, unless whoever asks may."""
        is_action = scope["method"] == "POST" and scope["path"].startswith(ACTION_PREFIX)
        if not self._access.allows_actions or not is_action:
            return PlainTextResponse("Nothing can be changed here.\n", 405, {"Allow": "GET, HEAD"})
        if self._access.is_token(_bearer(headers)):
            return None  # no browser sends this by itself
        if not has_session:
            return PlainTextResponse(_NO_TOKEN, 401)
        if not self._access.is_own_page(headers):
            return PlainTextResponse("Only a page of this dashboard can ask for that.\n", 403)
        return None

    def _has_cookie(self, scope: Scope) -> bool:
        """Whether the session's cookie is among those sent, whatever other servers have set."""
        expected = self._access.cookie.encode()
        sent = (value for name, value in scope["headers"] if name == b"cookie")
        return any(
            hmac.compare_digest(each.strip(), expected)
            for value in sent
            for each in value.split(b";")
        )


def _bearer(headers: Mapping[str, str]) -> str | None:
    kind, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else None
