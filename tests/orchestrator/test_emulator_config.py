"""What the relay accepts on its first line, and what it says about everything else.

The packet emulator's lines: what is refused, and where the message says it is.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, TypeVar

import pytest

from isthmus.orchestrator.core import run_events
from isthmus.orchestrator.emulator.emulator_config import (
    CROSS_TRAFFIC,
    MAX_SITES,
    NETNS_KINDS,
    NetnsConfig,
    RelayConfig,
    RelayEndpoint,
    Up,
    check_changes,
    dialled,
    netns_config,
    shapes_of,
)
from isthmus.orchestrator.emulator.link_shape import LinkShape
from isthmus.orchestrator.emulator.owner_pipes import REQUESTS
from isthmus.orchestrator.emulator.site_namespaces import NetnsError, netns_problem, step
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.json_fields import Message
from isthmus.topology.spec.json_lines import Kinds, line_of
from isthmus.topology.spec.tcp_constants import MTU_BYTES
from isthmus.topology.spec.world import (
    Accelerator,
    CrossTraffic,
    Detection,
    Emulation,
    Link,
    Queue,
    Site,
    Topology,
)
from tests.fakes import benches

M = TypeVar("M", bound=Message)

THERE = {"source": "eu", "target": "us", "bytes_per_s": 1e6, "delay_s": 0.01, "jitter_s": 0}
BACK = {"source": "us", "target": "eu", "bytes_per_s": 2e6, "delay_s": 0.02, "jitter_s": 0.001}
GATEWAY = {"source": "eu", "target": "us", "gateway": 0, "host": "127.0.0.1", "port": 9}


def line(**changed: object) -> bytes:
    fields: dict[str, Any] = {"links": [THERE, BACK], "seed": 3, "endpoints": [GATEWAY], **changed}
    return json.dumps({"op": "relay_config", **fields}).encode()


def read_line(kind: type[M], given: bytes) -> M:
    kinds: Kinds[M] = Kinds("owner to emulator", kind)
    return kinds.read(given)


def test_a_configuration_survives_the_line() -> None:
    config = read_line(RelayConfig, line())
    assert config.seed == 3
    assert config.bind_host == "127.0.0.1"
    assert [link.bytes_per_s for link in config.links] == [1e6, 2e6]
    assert config.endpoints == (
        RelayEndpoint(source="eu", target="us", gateway=0, host="127.0.0.1", port=9),
    )
    assert read_line(RelayConfig, line_of(config)) == config


def test_loss_and_queue_may_be_given() -> None:
    config = read_line(
        RelayConfig,
        line(links=[{**THERE, "loss": 0.01, "queue_bytes": 5000}, {**BACK, "queue_bytes": None}]),
    )
    assert [(each.loss, each.queue_bytes) for each in config.links] == [(0.01, 5000), (0.0, None)]


def test_where_it_listens_survives_the_line() -> None:
    up = Up(endpoints=read_line(RelayConfig, line()).endpoints)
    assert read_line(Up, line_of(up)) == up


@pytest.mark.parametrize("wrong", [b"", b"not json\n", b'{"op": "counted", "links": []}\n'])
def test_another_line_is_not_taken_for_where_it_listens(wrong: bytes) -> None:
    with pytest.raises(
        ConfigError, match=r"the line is not JSON|want an object with one of the ops up"
    ):
        read_line(Up, wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (b"", "the line is not JSON"),
        (b"\xff\xfe", "the line is not JSON"),
        (b"[" * 100_000, "the line is not JSON"),
        (b"[]", "want an object"),
        (b'{"op": "relay_config"}', "links is missing"),
        (line(speed=1), "speed: unknown"),
        (line(links={}), "links: want a list"),
        (line(links=[7]), r"links\.0: want an object, got 7"),
        (line(links=[{**THERE, "rate": 1}]), r"links\.0\.rate: unknown"),
        (line(links=[THERE, {"source": "us"}]), r"links\.1\.target is missing"),
        (line(links=[{**THERE, "bytes_per_s": "1"}]), r"links\.0\.bytes_per_s: want float"),
        (line(links=[{**THERE, "delay_s": True}]), r"links\.0\.delay_s: want float"),
        (line(links=[THERE, {**BACK, "delay_s": -1}]), r"links\.1\.delay_s: want 0 or more"),
        (line(links=[{**THERE, "loss": 7}]), r"links\.0\.loss: want 0 to 1, got 7"),
        (line(links=[{**THERE, "loss": None}]), r"links\.0\.loss: want float, got None"),
        (line(links=[{**THERE, "queue_bytes": 0.5}]), r"links\.0\.queue_bytes: want int"),
        (line(links=[THERE, BACK, THERE]), r"links\.2: eu to us stands there twice"),
        (line(links=[THERE]), r"endpoints\.0: there is no link from us to eu"),
        (line(endpoints=[{**GATEWAY, "port": 0}]), r"endpoints\.0\.port: want 1 to 65535"),
        (line(endpoints=[{**GATEWAY, "port": 9.5}]), r"endpoints\.0\.port: want int"),
        (line(endpoints=[{**GATEWAY, "host": None}]), r"endpoints\.0\.host: want str"),
        (line(endpoints=[{**GATEWAY, "gateway": -1}]), r"endpoints\.0\.gateway: want 0 or more"),
        (line(endpoints=[GATEWAY] * 4097), "endpoints: 4097, at most 4096"),
        (line(seed="x"), "seed: want int"),
    ],
)
def test_a_mistake_is_named_with_its_place(wrong: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_line(RelayConfig, wrong)


def test_a_topology_gives_half_its_rtt_each_way() -> None:
    accelerator = Accelerator(name="cpu", peak_flops_per_s={}, memory_bytes=1, mfu=0.5)
    sites = tuple(
        Site(
            name=name,
            index=index,
            nodes=1,
            accelerators_per_node=1,
            accelerator=accelerator,
        )
        for index, name in enumerate(("eu", "us"))
    )
    link = Link(
        ends=("eu", "us"),
        bytes_per_s=5e6,
        rtt_s=0.08,
        rtt_origin="rtt",
        jitter_s=0.001,
        loss=0.02,
    )
    topology = Topology(
        name="pair",
        sites=sites,
        links=(link,),
        failure=Detection(detect_within_s=15, min_sites=2, start_within_s=60),
    )
    [shape] = shapes_of(topology)
    assert (shape.source, shape.target) == ("eu", "us")
    assert (shape.bytes_per_s, shape.delay_s, shape.jitter_s) == (5e6, 0.04, 0.001)
    assert shape.loss == 0.02


def test_a_gateway_that_listens_is_dialled() -> None:
    described = benches.a_topology()
    site = described.sites[0].name
    listening = [
        run_events.Endpoint(site, 0, "127.0.0.2", 4000),
        run_events.Endpoint(site, 1, "", 0),
    ]
    made = dialled(described, listening)
    assert {(each.target, each.gateway, each.port) for each in made} == {(site, 0, 4000)}


LINK = {"source": "eu", "target": "us", "bytes_per_s": 1e6, "delay_s": 0.01}


def netns_line(**fields: Any) -> bytes:  # noqa: ANN401 - whatever a line may hold
    fields = {"sites": ["eu", "us"], "links": [LINK], **fields}
    return json.dumps({"op": "netns_config", **fields}).encode()


@pytest.mark.parametrize(
    ("queue", "queue_bytes"),
    [
        (Queue(bdp=0.5), 100_000),
        (Queue(num_bytes=70_000), 70_000),
        (Queue(bdp=1e-6), MTU_BYTES),
        (None, None),
    ],
)
def test_queues_follow_the_bandwidth_that_there_is_not_the_one_that_is_told(
    queue: Queue | None, queue_bytes: int | None
) -> None:
    told = benches.a_topology()
    told = dataclasses.replace(
        told,
        links=tuple(dataclasses.replace(each, bytes_per_s=5e6, rtt_s=0.08) for each in told.links),
        emulation=Emulation(described=2.0, queue=queue),
    )
    for shape in shapes_of(told):
        assert (shape.bytes_per_s, shape.queue_bytes) == (2.5e6, queue_bytes)


def test_a_packet_emulator_has_the_conditions_of_its_topology(tmp_path: Path) -> None:
    traffic = CrossTraffic(flows=2, congestion="cubic")
    told = dataclasses.replace(
        benches.a_topology(), emulation=Emulation(congestion="bbr", cross_traffic=traffic)
    )
    config = netns_config(told, 5, tmp_path)
    assert config == NetnsConfig(
        sites=benches.SITES,
        links=shapes_of(told),
        seed=5,
        congestion="bbr",
        cross_traffic=traffic,
        cross_traffic_folder=str(tmp_path / CROSS_TRAFFIC),
    )
    assert read_line(NetnsConfig, line_of(config)) == config


def test_a_configuration_survives_its_line() -> None:
    config = read_line(
        NetnsConfig,
        netns_line(
            links=[{**LINK, "loss": 0.01, "queue_bytes": 50_000, "jitter_s": 0.001}], seed=3
        ),
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
    assert read_line(NetnsConfig, line_of(config)) == config


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (b"{", "the line is not JSON"),
        (b"[" * 100_000, "the line is not JSON"),
        (b"[]", "want an object"),
        (netns_line(site=1), "site: unknown"),
        (netns_line(sites="eu"), "sites: want a list, got 'eu'"),
        (netns_line(sites=[]), f"sites: want 1 to {MAX_SITES}, got 0"),
        (netns_line(sites=[str(each) for each in range(MAX_SITES + 1)]), f"want 1 to {MAX_SITES}"),
        (netns_line(sites=["eu", "us", "eu"]), "sites.2: eu stands there twice"),
        (netns_line(sites=["eu", 7]), "sites.1: want str, got 7"),
        (netns_line(sites=["eu"]), "links.0: us is not one of the sites"),
        (netns_line(links=[LINK, LINK]), "links.1: eu to us stands there twice"),
        (netns_line(links=[{**LINK, "loss": 2}]), "links.0.loss: want 0 to 1"),
        (netns_line(links=[{**LINK, "rate": 2}]), "links.0.rate: unknown"),
        (netns_line(seed=True), "seed: want int"),
    ],
)
def test_a_wrong_configuration_is_refused_by_its_place(given: bytes, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_line(NetnsConfig, given)
    assert message in raised.value.problems[0].message


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ({"op": "stop", "changes": []}, "the message: want an object with one of the ops apply"),
        ({"op": "apply", "changes": 1}, "changes: want a list"),
        ({"op": "apply", "changes": [{"kind": "cut"}]}, "changes.0.source is missing"),
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
    def obey() -> None:
        changes = REQUESTS.read(json.dumps(message).encode()).changes
        check_changes(changes, {("eu", "us")}, NETNS_KINDS)

    with pytest.raises(ConfigError) as raised:
        obey()
    assert complaint in raised.value.problems[0].message


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("stdin", "message"),
    [
        ("", "the line is not JSON"),
        ('{"op": "netns_config"}\n', "netns_config.sites is missing"),
        ("x" * (1 << 23) + "\n", "longer than"),
    ],
)
def test_a_wrong_first_line_is_answered_in_one_line(stdin: str, message: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "isthmus.orchestrator.emulator.netns"],
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
