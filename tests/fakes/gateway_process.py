"""`python -m isthmus.sites.gateway` as an agent sees it: lines in, lines out."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from pathlib import Path
from typing import Self

from isthmus.orchestrator.core.run_events import SiteNamespace
from isthmus.protos.own_processes import leashed, own_command
from isthmus.sites.gateway.agent_port import Address, Connect
from isthmus.sites.gateway.config import GatewayConfig
from isthmus.sites.node.gateway_process import MALLOC
from isthmus.topology.spec.json_fields import Message
from isthmus.topology.spec.json_lines import line_of
from tests.fakes.gateway_rank import DEADLINE_S, Heard


class GatewayProcess(Heard):
    """One process; killed at the end if it has not ended.

    Args:
        log: What it writes to stderr.
        place: The namespaces that it enters; None: loopback.
    """

    def __init__(self, log: Path, place: SiteNamespace | None = None) -> None:
        super().__init__()
        self.host = place.address if place else "127.0.0.1"
        self.config: GatewayConfig
        self._log = log.open("wb")
        self.process = subprocess.Popen(
            leashed(
                own_command("isthmus.sites.gateway"), (place.user, place.net) if place else None
            ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "GLIBC_TUNABLES": MALLOC},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self._log.close()

    def say(self, line: bytes) -> None:
        """Write one line as it is."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def tell(self, message: Message) -> None:
        """Write one line as an agent does."""
        self.say(line_of(message).rstrip())

    def configure(self, config: GatewayConfig) -> None:
        """Write the first line."""
        self.config = config
        self.tell(config)

    def connect(self, *peers: GatewayProcess) -> None:
        """Say where the gateways of other sites listen, which have been configured."""
        self.tell(Connect(peers=tuple(peer.address for peer in peers)))

    @property
    def address(self) -> Address:
        """Where it listens; it has been configured."""
        config, port = self.config, self.wait("listening")["port"]
        return Address(site=config.site, gateway=config.gateway, host=self.host, port=port)

    def end(self) -> int:
        """Close stdin and return the exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(DEADLINE_S)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.hear(json.loads(line))
