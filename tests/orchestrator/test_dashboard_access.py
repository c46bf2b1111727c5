"""Who may read the dashboard, what a browser may do with it, and that names of runs stay text."""

from __future__ import annotations

import html
import http.client
import re
from http.cookies import SimpleCookie
from pathlib import Path
from urllib.parse import urljoin

import pytest

from tests.fakes.dashboards import Served, growing_run, serving, session_of

pytestmark = pytest.mark.slow

TOKEN = "a-token-of-this-test"
EVIL = "</title><script>alert('run')</script><img src=x onerror=alert(1)>"


@pytest.mark.parametrize("host", ["127.0.0.1:9", "localhost", "localhost:8265", "[::1]:8265"])
def test_loopback_answers_to_its_own_names(tmp_path: Path, host: str) -> None:
    with serving(tmp_path) as served:
        assert served.get("/api/runs", host=host).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8265", "127.0.0.1.evil.example", "10.0.0.5", ""]
)
def test_and_to_no_other(tmp_path: Path, host: str) -> None:
    with serving(tmp_path) as served:
        for path in ("/", "/api/runs", "/live", "/assets/page.js"):
            assert served.get(path, host=host).status in {400, 421}, path


def test_beyond_loopback_addresses_and_given_names_are_known(tmp_path: Path) -> None:
    with serving(tmp_path, host="0.0.0.0", names=("Dash.Example",)) as served:
        assert served.get("/", host="10.0.0.5:8265").status == 200
        assert served.get("/", host="dash.example").status == 200
        assert served.get("/", host="evil.example").status == 421


def test_the_token_opens_and_nothing_else_does(tmp_path: Path) -> None:
    with serving(tmp_path, token=TOKEN) as served:
        for path in ("/", "/api/runs", "/live", "/assets/page.js", "/?token=wrong", "/?token="):
            assert served.get(path).status == 401, path
        root, value = session_of(served, f"/?token={TOKEN}")
        assert served.get(f"{root}api/runs", cookie=value).status == 200
        assert served.get(f"{root}api/runs", cookie=value[:-1]).status == 401
        assert served.get(f"{root}api/runs", cookie=f"isthmus_dashboard_1={TOKEN}").status == 401
        assert served.get("/api/runs", authorization=f"Bearer {TOKEN}").status == 200
        assert served.get("/api/runs", authorization="Bearer caf\u00e9").status == 401


def test_what_other_ports_of_the_host_get_of_a_browser_opens_nothing(tmp_path: Path) -> None:
    """A browser sends a cookie to each port of its host, below the cookie's path."""
    with serving(tmp_path, token=TOKEN) as served:
        answer = served.get(f"/?token={TOKEN}")
        cookie = SimpleCookie(answer.headers["set-cookie"])
        (session,) = cookie.values()
        assert session["httponly"]
        assert session["samesite"].lower() == "strict"
        assert TOKEN not in answer.headers["set-cookie"]
        assert len(session["path"]) > 40
        # Who got it by chance knows neither the token nor the path.
        sent = f"{session.key}={session.value}"
        for path in ("/", "/api/runs", "/live", f"/?token={session.value}"):
            assert served.get(path, cookie=sent).status == 401, path
        assert served.get("/api/runs", authorization=f"Bearer {session.value}").status == 401
        # And who knows the path alone, as from a history, has no session.
        assert served.get(f"{session['path']}/api/runs").status == 401
        assert served.get(f"{session['path']}x/api/runs", cookie=sent).status == 401


@pytest.mark.parametrize(
    "foreign",
    [
        "prefs=k v",
        "a",
        "=",
        "a=b;;c",
        'q="unclosed',
        "isthmus_dashboard_{port}=forged",
        "\xff=\xe9",
    ],
)
def test_other_servers_cookies_lock_nobody_out(tmp_path: Path, foreign: str) -> None:
    with serving(tmp_path, token=TOKEN) as served:
        root, value = session_of(served, f"/?token={TOKEN}")
        other = foreign.format(port=served.port)
        for sent in (f"{other}; {value}", f"{value}; {other}", f"{other};{value}; {other}"):
            assert served.get(f"{root}api/runs", cookie=sent).status == 200, sent


def test_a_page_leads_on_below_the_session_s_path(tmp_path: Path) -> None:
    """The links of a page as a browser resolves them, and what the script asks for."""
    with growing_run(tmp_path) as run, serving(tmp_path, token=TOKEN) as served:
        run.take_steps(2)
        address, value = session_of(served, f"/runs/g1?token={TOKEN}")
        assert address.endswith("/runs/g1")
        root = address.removesuffix("runs/g1")
        for at in (address, root, f"{root}runs/absent"):
            page = served.get(at, cookie=value).text
            links = re.findall(r'(?:href|src|data-live|action)="([^"#:]+)"', page)
            assert links
            for link in links:
                to = urljoin(at, html.unescape(link))
                assert served.get(to, cookie=value).status == 200, (at, link)


def test_without_a_token_the_page_says_who_can_read_it(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        assert "every user of this machine can read it" in served.get("/").text
    with serving(tmp_path, token=TOKEN) as served:
        root, value = session_of(served, f"/?token={TOKEN}")
        assert "every user" not in served.get(root, cookie=value).text


def test_nothing_can_be_changed(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            assert served.get("/api/runs", method=method).status == 405, method
        head = served.get("/api/runs", method="HEAD")
        assert (head.status, head.body) == (200, b"")


def test_every_answer_has_the_headers_that_bind_a_browser(tmp_path: Path) -> None:
    with serving(tmp_path, token=TOKEN) as served:
        bearer = f"Bearer {TOKEN}"
        answers = [
            served.get("/", authorization=bearer),
            served.get("/api/runs", authorization=bearer),
            served.get("/assets/dashboard.js", authorization=bearer),
            served.get("/runs/absent", authorization=bearer),
            served.get("/"),
            served.get("/", host="evil.example"),
        ]
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-frame-options"] == "DENY"
        assert "server" not in answer.headers


def test_what_comes_of_a_run_stays_text(tmp_path: Path) -> None:
    with growing_run(tmp_path, name=EVIL, sites=("<b>a", "b\"onload='x", "c")) as run:
        run.event("site.lost", "<b>a", message="<script>x</script>", note="<script>x</script>")
        run.take_steps(3)
        with serving(tmp_path) as served:
            served.get("/runs/g1")
            for path in ("/", "/runs/g1", "/runs/<script>", "/runs/g1?window=<script>"):
                page = served.get(path.replace("<", "%3C").replace(">", "%3E")).text
                assert "<script>" not in page, path
                assert "<img" not in page, path
                assert "<b>" not in page, path
            assert "&lt;script&gt;alert" in served.get("/").text
            live = served.get("/live/g1")
            assert live.headers["content-type"] == "application/json"
            assert "<script>" not in "".join(live.json["parts"].values())
            assert served.get("/api/runs/g1").json["name"] == EVIL


def test_a_websocket_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        assert upgrade(served) in {200, 400, 403, 404, 426}


def upgrade(served: Served) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=10)
    try:
        headers = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
        connection.request("GET", "/", headers={**headers, "Sec-WebSocket-Key": "x"})
        return connection.getresponse().status
    finally:
        connection.close()
