"""`python -m isthmus.sites.gateway` as an agent sees it: lines in, lines out."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from isthmus.orchestrator.core.run_events import SiteNamespace
from isthmus.protos.own_processes import leashed, own_command
from isthmus.sites.gateway.config import GatewayConfig
from isthmus.sites.node.gateway_process import MALLOC
from isthmus.topology.spec.json_lines import line_of
from tests.fakes.gateway_rank import DEADLINE_S


class GatewayProcess:
    """One process; killed at the end if it has not ended.

    Args:
        log: What it writes to stderr.
        place: The namespaces that it enters; None: loopback.
    """

    def __init__(self, log: Path, place: SiteNamespace | None = None) -> None:
        self.host = place.address if place else "127.0.0.1"
        self.config: GatewayConfig
        self.lines: list[Mapping[str, Any]] = []
        self._changed = threading.Condition()
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

    def tell(self, message: Mapping[str, object]) -> None:
        """Write one line as an agent does."""
        self.say(json.dumps(message).encode())

    def configure(self, config: GatewayConfig) -> None:
        """Write the first line."""
        self.config = config
        self.say(line_of(config).rstrip())

    def connect(self, *peers: GatewayProcess) -> None:
        """Say where the gateways of other sites listen, which have been configured."""
        endpoints = [
            {
                "site": peer.config.site,
                "gateway": peer.config.gateway,
                "host": peer.host,
                "port": peer.wait("listening")["port"],
            }
            for peer in peers
        ]
        self.say(json.dumps({"op": "connect", "peers": endpoints}).encode())

    def wait(self, op: str, deadline_s: float = DEADLINE_S, **wanted: object) -> Mapping[str, Any]:
        """Return the first line of that kind and with these fields, waiting for it."""

        def is_there() -> bool:
            return self._find(op, wanted) is not None

        with self._changed:
            assert self._changed.wait_for(is_there, deadline_s), (op, wanted)
            found = self._find(op, wanted)
        assert found is not None
        return found

    def end(self) -> int:
        """Close stdin and return the exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(DEADLINE_S)

    def _find(self, op: str, wanted: Mapping[str, object]) -> Mapping[str, Any] | None:
        found = {"op": op, **wanted}.items()
        return next((line for line in self.lines if found <= line.items()), None)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(json.loads(line))
                self._changed.notify_all()
