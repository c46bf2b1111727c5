"""What gateways bind, and what others are told to dial: addresses, interfaces, ports, IPv6."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from isthmus.orchestrator.emulator.site_namespaces import netns_problem
from isthmus.protos.security import InsecureAddressError
from isthmus.sites.interfaces import address_of
from isthmus.topology.spec.world import PortRange
from tests.fakes.certified import certify, speak_tls
from tests.fakes.gateway_sites import (
    GATHER_2,
    Member,
    gateway_config,
    gateways,
    join,
    leave,
    reduce_once,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]


def reduced_between(folder: Path, **changes: Any) -> list[tuple[str, int]]:  # noqa: ANN401 - any field
    """Reduce a bucket over two sites; return what others were told to dial."""
    configs = [gateway_config(folder, GATHER_2, site, **changes) for site in range(2)]
    with gateways(configs) as members, ExitStack() as stack:
        ranks = [join(stack, member) for member in members]
        reduce_once(ranks, 0, 5000, [1.0, 3.0], seed=1)
        leave(members, ranks)
        return [(member.peer.host, member.peer.port) for member in members]


def test_ipv6(tmp_path: Path) -> None:
    assert {host for host, _ in reduced_between(tmp_path, bind_host="::1")} == {"::1"}


def test_ipv6_with_mutual_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speak_tls(monkeypatch, certify(tmp_path / "certs", "ash", "birch"))
    assert {host for host, _ in reduced_between(tmp_path, bind_host="::1")} == {"::1"}


def test_the_environments_proxy_is_not_for_gateways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
    assert reduced_between(tmp_path)


def test_others_dial_another_host_than_is_bound(tmp_path: Path) -> None:
    told = reduced_between(tmp_path, bind_host="127.0.0.1", dialled_host="localhost")
    assert {host for host, _ in told} == {"localhost"}


def test_an_interface_gives_the_address(tmp_path: Path) -> None:
    told = reduced_between(tmp_path, bind_host="", interface="lo")
    assert {host for host, _ in told} == {"127.0.0.1"}


def test_ports_are_of_the_range_and_run_out(tmp_path: Path, free_ports: PortRange) -> None:
    told = reduced_between(tmp_path, ports=free_ports)
    assert sorted(port for _, port in told) == [free_ports.first, free_ports.last]
    with ExitStack() as stack:
        for site in range(2):
            member = Member(gateway_config(tmp_path, GATHER_2, site, ports=free_ports))
            stack.callback(member.end)
            stack.callback(member.gateway.stop)
        (tmp_path / "more").mkdir()
        taken = f"no port from {free_ports.first} to {free_ports.last} is free"
        with pytest.raises(OSError, match=taken):
            Member(gateway_config(tmp_path / "more", GATHER_2, 0, ports=free_ports))


def test_a_port_that_is_taken_is_passed_over(tmp_path: Path, free_ports: PortRange) -> None:
    with socket.create_server(("127.0.0.1", free_ports.first)), ExitStack() as stack:
        member = Member(gateway_config(tmp_path, GATHER_2, 0, ports=free_ports))
        stack.callback(member.end)
        stack.callback(member.gateway.stop)
        assert member.peer.port == free_ports.first + 1


@pytest.fixture
def free_ports(worker_id: str) -> PortRange:
    """As many as two gateways take, below those that the system hands out.

    Tests run by several workers at once: each has a thousand ports of its own.
    """
    num_ports, worker = 2, int(worker_id.removeprefix("gw").replace("master", "0"))
    begin = 21000 + 1000 * (worker % 9)
    for first in range(begin, begin + 1000 - num_ports, 7):
        with ExitStack() as stack:
            try:
                for port in range(first, first + num_ports):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return PortRange(first=first, last=first + num_ports - 1)
    pytest.fail("no ports are free")


def test_an_interface_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"no interface 'nic7' here: want one of .*lo"):
        address_of("nic7")


@pytest.mark.skipif(netns_problem() is not None, reason="no network namespaces here")
@pytest.mark.parametrize("address", ["192.0.2.7/24", "2001:db8::7/64"])
def test_an_interface_of_its_own_gives_either_kind_of_address(address: str) -> None:
    code = "from isthmus.sites.interfaces import address_of; print(address_of('nic0'))"
    script = (
        f"ip tuntap add nic0 mode tun && ip addr add {address} dev nic0 && ip link set nic0 up && "
        f'exec {sys.executable} -c "{code}"'
    )
    command = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", script]
    found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert found.stdout.strip() == address.partition("/")[0]


def test_an_interface_without_tls_is_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "isthmus.sites.gateway.links.peer_server.address_of", lambda name: "192.0.2.7"
    )
    with pytest.raises(InsecureAddressError, match=r"192\.0\.2\.7"):
        Member(gateway_config(tmp_path, GATHER_2, 0, bind_host="", interface="nic0"))
