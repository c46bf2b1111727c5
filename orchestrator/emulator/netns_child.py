"""Starts the packet emulator as a child process and makes sure that it ends: for tests and scripts.

Blocking, so that those without an event loop can use it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any

from orchestrator.emulator.backend import SiteNamespace, parse_ready
from orchestrator.emulator.netns_config import NetnsConfig
from topology.changes import Change
from topology.errors import ConfigError

ANSWER_WITHIN_S = 20.0
STOP_WITHIN_S = 5.0


class NetnsProcess:
    """A packet emulator that runs.

    Attributes:
        pid: Its process.
        sites: How each is reached and entered.
    """

    def __init__(self, child: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        self.pid = child.pid
        self.sites: dict[str, SiteNamespace] = {}
        self._child = child
        self._log = log
        self._rest = b""

    def configure(self, config: NetnsConfig) -> None:
        """Tell it what to be, and learn the sites.

        Raises:
            ConfigError: it refuses; in its own words.
        """
        self._write(config.to_json())
        self.sites = {site.site: site for site in parse_ready(self._read_line())}

    def apply(self, changes: Sequence[Change]) -> None:
        """Change links; return when it has taken effect.

        Raises:
            ConfigError: it refuses, and has ended; in its own words.
        """
        self._write({"op": "apply", "changes": [change.to_json() for change in changes]})
        self._wait_for("applied")

    def counters(self) -> dict[tuple[str, str], dict[str, int]]:
        """Wait for the next counters; return them by source and target."""
        links = self._wait_for("counters")["links"]
        return {(link.pop("source"), link.pop("target")): link for link in links}

    def stop(self) -> int:
        """End it: ask by closing its stdin, then kill. Return its exit status."""
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.close()
        try:
            return self._child.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            return self._child.wait(STOP_WITHIN_S)

    def _wait_for(self, op: str) -> dict[str, Any]:
        while True:
            message: dict[str, Any] = json.loads(self._read_line())
            if message["op"] == op:
                return message

    def _write(self, message: dict[str, Any]) -> None:
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and its log says why
            self._child.stdin.write(json.dumps(message).encode() + b"\n")
            self._child.stdin.flush()

    def _read_line(self) -> bytes:
        assert self._child.stdout is not None
        deadline_s = time.monotonic() + ANSWER_WITHIN_S
        while b"\n" not in self._rest:
            left_s = max(0.0, deadline_s - time.monotonic())
            if not select.select([self._child.stdout], [], [], left_s)[0]:
                raise TimeoutError(f"the emulator said nothing for {ANSWER_WITHIN_S:g} s")
            data = os.read(self._child.stdout.fileno(), 64 << 10)
            if not data:
                raise ConfigError(self._last_words())
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _last_words(self) -> str:
        status = self._child.wait(STOP_WITHIN_S)
        self._log.seek(0)
        said = self._log.read(4096).decode(errors="replace").strip()
        return said or f"the emulator ended with status {status}"


@contextlib.contextmanager
def running_netns(config: NetnsConfig) -> Iterator[NetnsProcess]:
    """Run a packet emulator in a process of its own; it has ended when the block has.

    Raises:
        ConfigError: it refuses its configuration, or this machine refuses it; in its own words.
        TimeoutError: it is not ready within `ANSWER_WITHIN_S`.
    """
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            [sys.executable, "-m", "orchestrator.emulator.netns"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        ) as child,
    ):
        emulator = NetnsProcess(child, log)
        try:
            emulator.configure(config)
            yield emulator
        finally:
            emulator.stop()
