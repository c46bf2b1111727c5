"""Somebody else's flows, which a benchmark holds beside its own."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from isthmus.sites.bench import cross_traffic

HOSTS_CHOICE = Path("/proc/sys/net/ipv4/tcp_congestion_control")


class Caught(Exception):  # noqa: N818 - not an error
    """What a flow follows once it sends."""


class RoutedFlow(socket.socket):
    """A socket whose route names a congestion control, which Linux takes on connecting."""

    def connect(self, address: tuple[str, int]) -> None:  # type: ignore[override]
        super().connect(address)
        choice = HOSTS_CHOICE.read_text().strip()
        self.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, choice.encode())

    def sendall(self, *_: object) -> None:
        name = self.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        raise Caught(name.rstrip(b"\0").decode())


def test_a_flow_follows_what_it_is_told_whatever_its_route_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setattr(cross_traffic, "PORT", listener.getsockname()[1])
        monkeypatch.setattr(socket, "socket", RoutedFlow)
        with pytest.raises(Caught, match=r"^reno$"):
            cross_traffic.send("127.0.0.1", "127.0.0.1", "reno")  # every host has it
