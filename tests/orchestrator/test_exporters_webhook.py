"""Events are posted as JSON to where the job says, or the coordinator's environment."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from isthmus.orchestrator.exporters.figures import ExportedEvent
from isthmus.orchestrator.exporters.tool import Update
from isthmus.orchestrator.exporters.webhook import PAUSES_S, WebhookPost
from isthmus.topology.spec.exporters import WEBHOOK_TOKEN, WEBHOOK_URL, Webhook
from tests.fakes.exported_runs import exported_run, receiving, spec_with, update_of


def told(event: str, sequence: int = 1) -> ExportedEvent:
    return ExportedEvent(
        event=event,
        kind=f"x.{event}",
        sequence=sequence,
        wall_s=1_790_000_000.25,
        site="b",
        step=7,
        text=f"{event} of b",
        detail={"loss": float("nan")},
    )


def post(settings: Webhook, *events: ExportedEvent, **environ: str) -> list[float]:
    """Post events; return for how long it waited between attempts."""
    waited: list[float] = []
    webhook = WebhookPost(settings, "r1", "job", environ, sleep=waited.append)
    webhook.open()
    webhook.send(Update(samples=(), events=events))
    webhook.close()
    return waited


def test_the_events_that_are_asked_for_are_posted_with_all_that_is_known() -> None:
    with receiving() as received:
        settings = Webhook(url=f"{received.url}/hook?a=1", on=("lost", "end"))
        post(settings, told("lost", 3), told("epoch", 4), told("end", 5))
    assert [each["event"] for each in received.objects] == ["lost", "end"]
    path, headers, _ = received.posts[0]
    assert path == "/hook?a=1"
    assert headers["Content-Type"] == "application/json"
    assert "Authorization" not in headers
    assert received.objects[0] == {
        "schema_version": 1,
        "event": "lost",
        "kind": "x.lost",
        "sequence": 3,
        "run": "r1",
        "job": "job",
        "site": "b",
        "step": 7,
        "time": "2026-09-21T14:13:20.250+00:00",
        "text": "lost of b",
        "detail": {"loss": None},
    }


def test_secrets_come_from_the_environment_and_are_not_told() -> None:
    with receiving() as received:
        webhook = WebhookPost(
            Webhook(on=("end",)),
            "r1",
            "job",
            {WEBHOOK_URL: f"{received.url}/5ecret", WEBHOOK_TOKEN: "t0ken"},
        )
        assert "5ecret" not in webhook.open()
        webhook.send(Update(samples=(), events=(told("end"),)))
        path, headers, _ = received.posts[0]
        assert path == "/5ecret"
        assert headers["Authorization"] == "Bearer t0ken"
        received.statuses = [404]
        with pytest.raises(ConnectionError, match="answers 404 Not Found") as caught:
            webhook.send(Update(samples=(), events=(told("end"),)))
        assert "5ecret" not in str(caught.value)


def test_a_server_in_trouble_is_asked_again_and_one_that_refuses_is_not() -> None:
    with receiving() as received:
        received.statuses = [503, 429]
        assert post(Webhook(url=received.url), told("end")) == list(PAUSES_S)
        assert len(received.posts) == 3
        received.statuses = [400]
        with pytest.raises(ConnectionError, match="answers 400"):
            post(Webhook(url=received.url), told("end"))
        assert len(received.posts) == 4


def test_nobody_there_is_one_error_and_later_events_are_tried() -> None:
    with receiving() as received:
        url = received.url
        received.statuses = [400]
        with pytest.raises(ConnectionError):
            post(Webhook(url=url), told("lost"), told("end"))
        assert [each["event"] for each in received.objects] == ["lost", "end"]
    with pytest.raises(ConnectionError, match=r"http://127\.0\.0\.1:\d+: .*refused"):
        post(Webhook(url=url), told("end"))


def test_a_whole_run_is_posted_as_it_ended(tmp_path: Path) -> None:
    folder = exported_run(tmp_path, state="FAILED", reason="rank 1 was killed")
    with receiving() as received:
        post(Webhook(url=received.url), *update_of(folder, spec_with()).events)
    (end,) = received.objects
    assert (end["event"], end["step"]) == ("end", 40)
    assert end["text"] == "run r1 FAILED: rank 1 was killed"
    assert end["detail"]["failure"]["code"] == "RANK_KILLED"


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_gets_no_token_and_is_not_a_delivery(status: int) -> None:
    with receiving() as elsewhere, receiving() as received:
        received.statuses, received.location = [status], f"{elsewhere.url}/5ecret"
        with pytest.raises(
            ConnectionError, match=f"answers {status} .* redirects to http"
        ) as caught:
            post(Webhook(url=received.url), told("end"), **{WEBHOOK_TOKEN: "t0ken"})
        assert elsewhere.url in str(caught.value)
        assert "5ecret" not in str(caught.value)
        assert (len(received.posts), elsewhere.posts) == (1, [])


def test_a_path_that_redirects_says_so() -> None:
    with receiving() as received:
        received.statuses, received.location = [301], "/hook/"
        with pytest.raises(ConnectionError, match=r"redirects to another path of http://127"):
            post(Webhook(url=f"{received.url}/hook"), told("end"))
        assert len(received.posts) == 1


def test_a_token_from_a_file_may_end_with_a_newline() -> None:
    with receiving() as received:
        post(Webhook(url=received.url), told("end"), **{WEBHOOK_TOKEN: "t0ken\n"})
    assert received.posts[0][1]["Authorization"] == "Bearer t0ken"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (WEBHOOK_URL, "file:///etc/passwd"),
        (WEBHOOK_URL, "http://127.0.0.1/a\r\nX: 1"),
        (WEBHOOK_TOKEN, "one\r\nX: 1"),
    ],
)
def test_what_the_environment_says_is_checked_before_it_is_used(name: str, value: str) -> None:
    environ = {WEBHOOK_URL: "http://127.0.0.1:1", name: value}
    with pytest.raises(ValueError, match=name) as caught:
        WebhookPost(Webhook(), "r1", "job", environ).open()
    assert value not in str(caught.value)


def test_an_answer_that_is_no_http_is_a_failure_like_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            for _ in PAUSES_S:
                connection, _ = server.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(b"220 mail.example\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConnectionError, match="what is no HTTP"):
            post(Webhook(url=f"http://127.0.0.1:{server.getsockname()[1]}"), told("end"))
        thread.join()
