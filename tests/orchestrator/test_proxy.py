"""The control plane through an HTTP proxy; gateways and loopback never go through one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from isthmus.orchestrator.client.coordinator_client import Client
from isthmus.protos.control.v1.control_pb2 import AgentMessage, CoordinatorMessage
from isthmus.protos.control.v1.control_pb2_grpc import CoordinatorStub
from isthmus.protos.identities import COORDINATOR
from isthmus.protos.proxies import PROXY, ProxyError, proxy_options
from isthmus.protos.security import InsecureAddressError, control_security
from isthmus.sites.agent.session import channel_options
from tests.fakes.certified import certify, speak_tls
from tests.fakes.coordinators import coordinating
from tests.fakes.http_proxy import http_proxy

if TYPE_CHECKING:
    from isthmus.protos.control.v1.control_pb2_grpc import CoordinatorAsyncStub


async def test_agents_and_operators_go_through_the_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speak_tls(monkeypatch, certify(tmp_path / "certs", "a", "b"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    async with coordinating(tmp_path / "state") as bench, http_proxy() as proxy:
        url = proxy.url.replace("//", "//me:secret@")
        monkeypatch.setenv(PROXY, url)
        options = channel_options(bench.control.timeouts)
        security = control_security("a.agent")
        async with security.aio_channel(bench.address, options, COORDINATOR) as channel:
            stub: CoordinatorAsyncStub = CoordinatorStub(channel)  # type: ignore[assignment]
            call = stub.Session(timeout=20)
            await call.write(AgentMessage(hello=bench.hello(site="a")))
            answer = await call.read()
            assert isinstance(answer, CoordinatorMessage)
            assert answer.welcome.generation

        def listed() -> int:
            with Client(bench.address) as client:
                return len(client.list_runs())

        assert await asyncio.to_thread(listed) == 0
        assert set(proxy.asked) == {bench.address}
        assert len(proxy.asked) == len(proxy.credentials) == 2


async def test_the_webs_proxy_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with coordinating(tmp_path / "state") as bench, http_proxy() as proxy:
        for name in ("http_proxy", "https_proxy", "grpc_proxy"):
            monkeypatch.setenv(name, proxy.url)

        def listed() -> int:
            with Client(bench.address) as client:
                return len(client.list_runs())

        assert await asyncio.to_thread(listed) == 0
        assert proxy.asked == []


def test_a_proxy_takes_tls_and_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROXY, "http://proxy.example:3128")
    with pytest.raises(InsecureAddressError, match="a proxy would read"):
        proxy_options()
    monkeypatch.setenv(PROXY, "socks5://me:secret@proxy.example:1080")
    with pytest.raises(ProxyError) as caught:
        proxy_options()
    assert "secret" not in str(caught.value)
