"""Gateways whose calls pass proxies that speak HTTP/2 themselves, as gRPC's calls may."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from isthmus.sites.gateway.config import GatewayConfig
from isthmus.sites.gateway.links.transport import Peer
from tests.fakes.gateway_sites import (
    GATHER_2,
    Member,
    gateway_config,
    gateways,
    join,
    leave,
    reduce_once,
)
from tests.fakes.waiting import wait_for
from tests.tools.daemons import free_ports

NGINX = shutil.which("nginx") or ""
CONFIGURATION = """\
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log {folder}/error.log warn;
events {{ worker_connections 1024; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  client_max_body_size 0;
  client_body_timeout 1h;
  grpc_read_timeout 1h;
  grpc_send_timeout 1h;
  server {{
    listen 127.0.0.1:{port} http2;
    location / {{ grpc_pass grpc://127.0.0.1:{target}; }}
  }}
}}
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not NGINX, reason="no nginx is installed here"),
]


@contextmanager
def nginx(folder: Path, target: int) -> Iterator[int]:
    """Pass calls on to a port of this machine; give the proxy's own."""
    folder.mkdir()
    [port] = free_ports(1)
    configuration = folder / "nginx.conf"
    configuration.write_text(CONFIGURATION.format(folder=folder, port=port, target=target))
    # Without -e it writes its first errors to a folder of the system's.
    command = [NGINX, "-e", str(folder / "error.log"), "-c", str(configuration)]
    process = subprocess.Popen(command)
    try:
        wait_for(lambda: accepts(port), "nginx listens")
        yield port
    finally:
        process.terminate()
        process.wait(20)


def accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("shut", [None, 0], ids=["both dial", "one dials"])
def test_all_that_gateways_say_passes_a_proxy(tmp_path: Path, shut: int | None) -> None:
    """Greetings, frames of a megabyte and more, and farewells."""
    configs: list[GatewayConfig] = []
    for site in range(2):
        config = gateway_config(
            tmp_path, GATHER_2, site, listens=site != shut, chunk_bytes=2 << 20, peer_lost_s=5.0
        )
        links = tuple(
            replace(each, dials_in=shut is not None and site != shut) for each in config.links
        )
        configs.append(replace(config, links=links))
    with ExitStack() as stack:
        num_proxies = 0

        def through_proxy(_: Member, peer: Peer) -> Peer:
            nonlocal num_proxies
            if not peer.port:
                return peer
            num_proxies += 1
            folder = tmp_path / f"proxy{num_proxies}"
            return replace(peer, port=stack.enter_context(nginx(folder, peer.port)))

        members = stack.enter_context(gateways(configs, through_proxy))
        ranks = [join(stack, member) for member in members]
        for round_ in range(3):
            reduce_once(ranks, round_, 2_000_000, [1.0, 3.0], seed=round_)
        leave(members, ranks)
        assert [member.end() for member in members] == [None, None]
        assert num_proxies == (2 if shut is None else 1)
