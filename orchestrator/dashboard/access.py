"""Who may read and act: checks of each request before the application sees it, and headers.

- Only GET and HEAD. Nothing can be changed, unless the operator has allowed actions.
- The Host header must name this server. Else a page from elsewhere could have its own name resolve
  to this address, and read what is here (DNS rebinding).
- Where others can reach the address, or when asked for, a token: in the address that is printed,
  then in a cookie, or as `Authorization: Bearer`.
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
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

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
ACTION_PREFIX = "/actions/"
ACTION_HEADER = "x-isthmus-action"
"""Header with what pages were given for actions."""
_MOVED = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>isthmus</title>'
    '<link rel="icon" href="data:,"><meta http-equiv="refresh" content="0;url=/"></head>'
    '<body><p><a href="/">To the dashboard</a></p></body></html>'
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
        """The cookie's name; browsers do not keep those of a machine's ports apart."""
        return f"isthmus_dashboard_{self.port}"

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
        return hmac.new(self.token.encode(), b"actions", hashlib.sha256).hexdigest()

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
                    headers[name] = value
            await send(message)

        answer = self._refusal(scope) or self._application
        await answer(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        if not self._access.knows_host(headers.get("host", "")):
            return PlainTextResponse("This server has another name: --name allows one.\n", 421)
        if scope["method"] not in {"GET", "HEAD"}:
            return self._refused_action(scope, headers)
        if not self._access.token:
            return None
        query = parse_qs(scope["query_string"].decode("latin-1"))
        if self._access.is_token(query.get("token", [None])[0]):
            answer = HTMLResponse(_MOVED)
            answer.set_cookie(
                self._access.cookie, self._access.token, httponly=True, samesite="strict"
            )
            return answer
        if self._access.is_token(_bearer(headers)) or self._access.is_token(
            self._of_cookie(headers)
        ):
            return None
        return PlainTextResponse(_NO_TOKEN, 401)

    def _refused_action(self, scope: Scope, headers: Mapping[str, str]) -> Response | None:
        """Refuse what would change something, unless whoever asks may."""
        is_action = scope["method"] == "POST" and scope["path"].startswith(ACTION_PREFIX)
        if not self._access.allows_actions or not is_action:
            return PlainTextResponse("Nothing can be changed here.\n", 405, {"Allow": "GET, HEAD"})
        if self._access.is_token(_bearer(headers)):
            return None  # no browser sends this by itself
        if not self._access.is_token(self._of_cookie(headers)):
            return PlainTextResponse(_NO_TOKEN, 401)
        if not self._access.is_own_page(headers):
            return PlainTextResponse("Only a page of this dashboard can ask for that.\n", 403)
        return None

    def _of_cookie(self, headers: Mapping[str, str]) -> str | None:
        try:
            morsel = SimpleCookie(headers.get("cookie", "")).get(self._access.cookie)
        except CookieError:
            return None
        return None if morsel is None else morsel.value


def _bearer(headers: Mapping[str, str]) -> str | None:
    kind, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else None
