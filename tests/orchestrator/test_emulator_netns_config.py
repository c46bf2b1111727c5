"""The packet emulator's lines: what is refused, and where the message says it is."""

import json
import subprocess
import sys
from typing import Any

import pytest

from orchestrator.emulator.emulator_config import MAX_SITES, NetnsConfig, parse_changes
from orchestrator.emulator.link_shape import LinkShape
from orchestrator.emulator.site_namespaces import NetnsError, netns_problem, step
from topology.errors import ConfigError

LINK = {"source": "eu", "target": "us", "bytes_per_s": 1e6, "delay_s": 0.01}


def line(**fields: Any) -> bytes:  # noqa: ANN401 - whatever a line may hold
    return json.dumps({"sites": ["eu", "us"], "links": [LINK], **fields}).encode()


def test_a_configuration_survives_its_line() -> None:
    config = NetnsConfig.from_line(
        line(links=[{**LINK, "loss": 0.01, "queue_bytes": 50_000, "jitter_s": 0.001}], seed=3)
    )
    assert config.links[0] == LinkShape(
        source="eu",
        target="us",
        bytes_per_s=1e6,
        delay_s=0.01,
        jitter_s=0.001,
        loss=0.01,
        queue_bytes=50_000,
    )
    assert NetnsConfig.from_line(json.dumps(config.to_json()).encode()) == config


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (b"{", "want one line of JSON"),
        (b"[" * 100_000, "want one line of JSON"),
        (b"[]", "want one JSON object"),
        (line(site=1), "unknown key 'site'; the keys are sites, links, seed"),
        (line(sites="eu"), "sites: want a list, got 'eu'"),
        (line(sites=[]), f"sites: want 1 to {MAX_SITES}, got 0"),
        (line(sites=[str(each) for each in range(MAX_SITES + 1)]), f"want 1 to {MAX_SITES}"),
        (line(sites=["eu", "us", "eu"]), "sites.2: eu stands there twice"),
        (line(sites=["eu", 7]), "sites.1: want a text, got 7"),
        (line(sites=["eu"]), "links.0: us is not one of the sites"),
        (line(links=[LINK, LINK]), "links.1: eu to us is there twice"),
        (line(links=[{**LINK, "loss": 2}]), "links.0.loss: want 0 to 1"),
        (line(links=[{**LINK, "rate": 2}]), "links.0: unknown key 'rate'"),
        (line(seed=True), "seed: want a whole number"),
    ],
)
def test_a_wrong_configuration_is_refused_by_its_place(given: bytes, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        NetnsConfig.from_line(given)
    assert message in raised.value.problems[0].message


LINKS = [LinkShape(source="eu", target="us", bytes_per_s=1e6, delay_s=0.01)]


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ({"op": "stop"}, 'want {"op": "apply"'),
        ({"op": "apply", "changes": 1}, 'want {"op": "apply"'),
        ({"op": "apply", "changes": [{"kind": "cut"}]}, "changes.0: source is missing"),
        (
            {"op": "apply", "changes": [{"kind": "cut", "source": "us", "target": "eu"}]},
            "changes.0: there is no link from us to eu",
        ),
        (
            {"op": "apply", "changes": [{"kind": "reset", "source": "eu", "target": "us"}]},
            "changes.0: reset is the relay's alone; want one of shape, cut, heal",
        ),
    ],
)
def test_a_wrong_change_is_refused_by_its_place(message: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_changes(json.dumps(message).encode(), LINKS)
    assert complaint in raised.value.problems[0].message


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("stdin", "message"),
    [
        ("", "want one line of JSON"),
        ("{}\n", "sites: want a list, got None"),
        ("x" * (1 << 23) + "\n", "longer than"),
    ],
)
def test_a_wrong_first_line_is_answered_in_one_line(stdin: str, message: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator.emulator.netns"],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    [complaint] = done.stderr.splitlines()
    assert complaint.startswith("netns: configuration: ")
    assert message in complaint


@pytest.mark.parametrize(
    ("code", "cure"),
    [
        (1, "it takes root"),
        (13, "it takes root"),
        (28, "used up"),
        (2, "does not have it"),
        (5, ""),
    ],
)
def test_a_refused_step_is_named_with_its_cure(code: int, cure: str) -> None:
    with pytest.raises(NetnsError, match=f"^TUN device: the reason.*{cure}"), step("TUN device"):
        raise OSError(code, "the reason")


def test_a_problem_is_the_emulators_own_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert netns_problem() == "ended with status 1"
