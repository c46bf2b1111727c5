"""Who may read the dashboard, what a browser may do with it, and that names of runs stay text."""

from __future__ import annotations

import http.client
from pathlib import Path

import pytest

from tests.fakes.dashboards import Served, growing_run, serving

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
        opened = served.get(f"/?token={TOKEN}")
        assert opened.status == 200
        cookie = opened.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "samesite=strict" in cookie.lower()
        assert TOKEN not in opened.text
        value = cookie.partition(";")[0]
        assert served.get("/api/runs", cookie=value).status == 200
        assert served.get("/api/runs", cookie=value[:-1]).status == 401
        assert served.get("/api/runs", cookie=f"isthmus_dashboard_1={TOKEN}").status == 401
        assert served.get("/api/runs", authorization=f"Bearer {TOKEN}").status == 200
        assert served.get("/api/runs", authorization="Bearer caf\u00e9").status == 401


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
