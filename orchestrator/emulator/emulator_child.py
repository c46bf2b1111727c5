"""Starts an emulator as a child process and makes sure that it ends: for tests and scripts.

Blocking, so that tests without an event loop can use it; from several threads, if they like.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from orchestrator.core.run_events import SiteNamespace
from orchestrator.emulator.backend import command_of
from orchestrator.emulator.emulator_config import (
    NetnsConfig,
    RelayConfig,
    RelayEndpoint,
    Up,
    apply_line,
    read_line,
)
from topology.errors import ConfigError
from topology.faults.script import Change
from topology.json_fields import to_json

ANSWER_WITHIN_S = 20.0
STOP_WITHIN_S = 5.0
LinkCounters = Mapping[tuple[str, str], Mapping[str, int]]
"""What has passed each directed link, by source and target."""


class EmulatorProcess:
    """An emulator that runs."""

    def __init__(self, child: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        self.pid = child.pid
        self.endpoints: tuple[RelayEndpoint, ...] = ()
        """Where to dial, in the order of the relay's configuration."""
        self.sites: Mapping[str, SiteNamespace] = {}
        """How each site of the packet emulator is reached and entered."""
        self._child = child
        self._log = log
        self._rest = b""
        self._lock = threading.Lock()

    def configure(self, config: RelayConfig | NetnsConfig) -> None:
        """Tell it what to be; return when it is up. ConfigError and TimeoutError as of `apply`."""
        self._write(json.dumps(to_json(config)).encode() + b"\n")
        up = read_line(Up, self._read_line(time.monotonic() + ANSWER_WITHIN_S))
        self.endpoints = up.endpoints
        self.sites = {site.site: site for site in up.sites}

    def apply(self, changes: Sequence[Change]) -> None:
        """Change links, all at once; return when it has taken effect.

        Raises:
            ConfigError: it refuses, and has changed nothing; in its own words.
            TimeoutError: it does not answer within `ANSWER_WITHIN_S`.
        """
        with self._lock:
            self._apply(changes)

    def counters(self) -> LinkCounters:
        """Return what has passed each link by now; errors as of `apply`."""
        with self._lock:
            self._apply(())  # the counters that were said before it are old
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

    def _apply(self, changes: Sequence[Change]) -> None:
        self._write(apply_line(changes))
        answer = self._wait_for("applied", "refused")
        if answer["op"] == "refused":
            raise ConfigError(str(answer["message"]))

    def _wait_for(self, *ops: str) -> dict[str, Any]:
        deadline_s = time.monotonic() + ANSWER_WITHIN_S
        while True:
            message: dict[str, Any] = json.loads(self._read_line(deadline_s))
            if message["op"] in ops:
                return message

    def _write(self, line: bytes) -> None:
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and its log says why
            self._child.stdin.write(line)
            self._child.stdin.flush()

    def _read_line(self, deadline_s: float) -> bytes:
        assert self._child.stdout is not None
        while b"\n" not in self._rest:
            left_s = max(0.0, deadline_s - time.monotonic())
            if not select.select([self._child.stdout], [], [], left_s)[0]:
                raise TimeoutError(f"the emulator did not answer within {ANSWER_WITHIN_S:g} s")
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
def running_emulator(config: RelayConfig | NetnsConfig) -> Iterator[EmulatorProcess]:
    """Run the emulator that `config` is for; it has ended when the block has.

    Raises:
        ConfigError: it refuses its configuration, or this machine refuses it; in its own words.
        TimeoutError: it is not up within `ANSWER_WITHIN_S`.
    """
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            command_of(config), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        ) as child,
    ):
        emulator = EmulatorProcess(child, log)
        try:
            emulator.configure(config)
            yield emulator
        finally:
            emulator.stop()
