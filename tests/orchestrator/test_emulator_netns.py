"""The packet emulator with a real kernel: integrity under loss, changes, exits."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from isthmus.orchestrator.emulator.emulator_child import EmulatorProcess, running_emulator
from isthmus.orchestrator.emulator.emulator_config import NetnsConfig
from isthmus.orchestrator.emulator.link_shape import LossDeck
from isthmus.topology.faults.script import Change
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.json_fields import to_json
from isthmus.topology.spec.world import CrossTraffic
from tests.fakes.emulator_configs import netns_config
from tests.fakes.sockets import open_socket, receive, round_trip_s
from tests.fakes.waiting import wait_for

COMMAND = [sys.executable, "-m", "isthmus.orchestrator.emulator.netns"]
DEADLINE_S = 60.0
PORT = 5000
pytestmark = [
    pytest.mark.slow,
    pytest.mark.multiprocess,
    pytest.mark.usefixtures("needs_root_netns"),
]


@pytest.fixture
def sockets() -> Iterator[list[socket.socket]]:
    opened: list[socket.socket] = []
    yield opened
    for each in opened:
        each.close()


def socket_at(
    emulator: EmulatorProcess,
    site: str,
    opened: list[socket.socket],
    kind: int = socket.SOCK_STREAM,
) -> socket.socket:
    made = open_socket(emulator.sites[site].net, kind)
    made.settimeout(DEADLINE_S)
    opened.append(made)
    return made


def connection(
    emulator: EmulatorProcess, opened: list[socket.socket]
) -> tuple[socket.socket, socket.socket]:
    listener = socket_at(emulator, "us", opened)
    listener.bind((emulator.sites["us"].address, PORT))
    listener.listen()
    near = socket_at(emulator, "eu", opened)
    near.connect((emulator.sites["us"].address, PORT))
    far, peer = listener.accept()
    opened.append(far)
    far.settimeout(DEADLINE_S)
    assert peer[0] == emulator.sites["eu"].address
    return near, far


def test_a_connection_carries_every_byte_both_ways_although_packets_are_lost(
    sockets: list[socket.socket],
) -> None:
    rng = random.Random(11)
    sent = [rng.randbytes(3 << 20), rng.randbytes(3 << 20)]
    with running_emulator(netns_config(delay_s=0.001, loss=0.01)) as emulator:
        ends = connection(emulator, sockets)
        senders = [
            threading.Thread(target=end.sendall, args=(data,))
            for end, data in zip(ends, sent, strict=True)
        ]
        received: dict[int, bytes] = {}

        def take(index: int) -> None:
            received[index] = receive(ends[1 - index], len(sent[index]))

        takers = [threading.Thread(target=take, args=(index,)) for index in range(2)]
        for thread in senders + takers:
            thread.start()
        for thread in senders + takers:
            thread.join(DEADLINE_S)
        counters = emulator.counters()
    assert {index: hashlib.sha256(data).hexdigest() for index, data in received.items()} == {
        index: hashlib.sha256(data).hexdigest() for index, data in enumerate(sent)
    }
    for passed in counters.values():
        assert passed["lost_packets"] > 10
        assert passed["sent_bytes"] > 3 << 20
        assert passed["delivered_bytes"] < passed["sent_bytes"]


def test_the_lost_packets_are_those_that_the_seed_names(sockets: list[socket.socket]) -> None:
    num_packets, loss = 2000, 0.02
    with running_emulator(netns_config(loss=loss)) as emulator:
        far = socket_at(emulator, "us", sockets, socket.SOCK_DGRAM)
        far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        far.bind((emulator.sites["us"].address, PORT))
        near = socket_at(emulator, "eu", sockets, socket.SOCK_DGRAM)
        near.connect((emulator.sites["us"].address, PORT))
        lost = LossDeck(loss, random.Random("7/eu/us/loss")).take(num_packets + 1)
        assert num_packets not in lost
        arrived = []
        for index in range(num_packets + 1):
            near.send(index.to_bytes(4, "big"))
            # A few at a time, so that no buffer of the kernel has to drop any.
            while index % 100 == 0 and index not in lost and index not in arrived:
                arrived.append(int.from_bytes(far.recv(64), "big"))
        counters = emulator.counters()["eu", "us"]
    assert arrived == [index for index in range(num_packets + 1) if index not in lost]
    assert counters["lost_packets"] == len(lost)
    assert counters["sent_bytes"] == (num_packets + 1) * 32


def test_delays_are_as_configured_and_change_while_it_runs(sockets: list[socket.socket]) -> None:
    with running_emulator(netns_config(delay_s=0.02)) as emulator:
        near, far = connection(emulator, sockets)
        assert min(round_trip_s(near, far) for _ in range(5)) >= 0.04
        emulator.apply(
            [
                Change(kind="shape", source="eu", target="us", delay_s=0.05),
                Change(kind="shape", source="us", target="eu", delay_s=0.04),
            ]
        )
        assert min(round_trip_s(near, far) for _ in range(3)) >= 0.09


def test_a_cut_blackholes_one_way_and_tcp_goes_on_after_it_is_healed(
    sockets: list[socket.socket],
) -> None:
    with running_emulator(netns_config(delay_s=0.001)) as emulator:
        near, far = connection(emulator, sockets)
        emulator.apply([Change(kind="cut", source="eu", target="us")])
        near.sendall(b"x")
        assert any(emulator.counters()["eu", "us"]["lost_packets"] for _ in range(20))
        far.sendall(b"y")
        assert receive(near, 1) == b"y"
        far.setblocking(False)
        with pytest.raises(BlockingIOError):
            far.recv(1)
        far.settimeout(DEADLINE_S)
        emulator.apply([Change(kind="heal", source="eu", target="us")])
        assert receive(far, 1) == b"x"


def test_sites_without_a_link_do_not_reach_each_other(sockets: list[socket.socket]) -> None:
    only = NetnsConfig(sites=("eu", "us"), links=netns_config().links[:1])
    with running_emulator(only) as emulator:
        near = socket_at(emulator, "us", sockets, socket.SOCK_DGRAM)
        near.sendto(b"x", (emulator.sites["eu"].address, PORT))
        counters = emulator.counters()
    assert list(counters) == [("eu", "us")]
    assert counters["eu", "us"]["sent_bytes"] == 0


def test_connections_follow_the_congestion_control_that_was_asked_for(
    sockets: list[socket.socket],
) -> None:
    # Any host allows it, and has another one by itself.
    config = dataclasses.replace(netns_config(), congestion="reno")
    with running_emulator(config) as emulator:
        for end in connection(emulator, sockets):
            name = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            assert name.rstrip(b"\0") == b"reno"


def test_a_congestion_control_that_the_kernel_does_not_have_is_named() -> None:
    config = dataclasses.replace(netns_config(), congestion="no-such")
    with pytest.raises(ConfigError, match="congestion control no-such: "), running_emulator(config):
        pass


def test_cross_traffic_is_under_way_on_every_link_and_is_counted(tmp_path: Path) -> None:
    config = dataclasses.replace(
        netns_config(bytes_per_s=1e7),
        cross_traffic=CrossTraffic(flows=2),
        cross_traffic_folder=str(tmp_path / "new"),
    )
    with running_emulator(config) as emulator:

        def received(site: str, other: str) -> int:
            file = tmp_path / "new" / f"{site}.jsonl"
            *lines, _ = file.read_text().split("\n") if file.exists() else [""]
            totals = json.loads(lines[-1])["received_bytes"] if lines else {}
            return int(totals.get(emulator.sites[other].address, 0))

        wait_for(
            lambda: min(received("eu", "us"), received("us", "eu")) >= 1 << 20,
            "a megabyte of somebody else's each way",
        )


def test_namespaces_end_with_the_emulator_even_if_it_is_killed() -> None:
    with running_emulator(netns_config()) as emulator:
        nets = [Path(site.net) for site in emulator.sites.values()]
        assert len({net.stat().st_ino for net in nets}) == 2
        os.kill(emulator.pid, signal.SIGKILL)
    assert not any(net.exists() for net in nets)


def test_it_ends_with_its_stdin() -> None:
    done = subprocess.run(
        COMMAND,
        input=json.dumps(to_json(netns_config())) + "\n",
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    ready = json.loads(done.stdout.splitlines()[0])
    assert ready["op"] == "up"
    assert [(site["site"], site["address"], site["user"]) for site in ready["sites"]] == [
        ("eu", "10.203.0.1", ""),
        ("us", "10.203.0.2", ""),
    ]


def test_a_change_that_cannot_be_made_is_refused_and_nothing_else_happens() -> None:
    with running_emulator(netns_config()) as emulator:
        with pytest.raises(ConfigError, match=r"changes\.0: there is no link from us to mars"):
            emulator.apply([Change(kind="cut", source="us", target="mars")])
        assert set(emulator.counters()) == {("eu", "us"), ("us", "eu")}


IN_TWO_NAMESPACES = """
from pathlib import Path
from isthmus.orchestrator.emulator.site_namespaces import NetnsError, enter_new_network, own_user_namespace
after_idle = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")
try:
    own_user_namespace()
    enter_new_network()
except NetnsError as error:
    raise SystemExit(f"skip: {error}")
for value in ("0", "1"):
    after_idle.write_text(value)
    enter_new_network()
    print(after_idle.read_text().strip())
"""


@pytest.mark.multiprocess
def test_whether_idle_connections_start_slowly_is_as_around_the_emulation() -> None:
    command = [sys.executable, "-c", IN_TWO_NAMESPACES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if done.stderr.startswith("skip: "):
        pytest.skip(done.stderr)
    assert (done.stdout.split(), done.stderr) == (["0", "1"], "")
