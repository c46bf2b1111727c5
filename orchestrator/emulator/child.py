"""Starts the relay as a child process and makes sure that it ends: for tests and scripts.

Blocking, so that tests without an event loop can use it.
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
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from orchestrator.emulator.config import RelayConfig, RelayEndpoint, parse_listening
from topology.errors import ConfigError

START_WITHIN_S = 20.0
STOP_WITHIN_S = 5.0


@dataclass(frozen=True, slots=True)
class RelayProcess:
    """A relay that runs."""

    pid: int
    endpoints: tuple[RelayEndpoint, ...]
    """Where to dial, in the order of the configuration."""


@contextlib.contextmanager
def running_relay(config: RelayConfig) -> Iterator[RelayProcess]:
    """Run a relay in a process of its own; it has ended when the block has.

    Raises:
        ConfigError: the relay refuses its configuration; in its own words.
        TimeoutError: it does not listen within `START_WITHIN_S`.
    """
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            [sys.executable, "-m", "orchestrator.emulator.relay"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        ) as child,
    ):
        try:
            yield RelayProcess(child.pid, _configure(child, config, log))
        finally:
            _stop(child)


def _configure(
    child: subprocess.Popen[bytes], config: RelayConfig, log: BinaryIO
) -> tuple[RelayEndpoint, ...]:
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended, and its log says why
        child.stdin.write(json.dumps(config.to_json()).encode() + b"\n")
        child.stdin.flush()
    line = _read_line(child, time.monotonic() + START_WITHIN_S)
    if not line.endswith(b"\n"):
        child.wait(STOP_WITHIN_S)
        log.seek(0)
        said = log.read(4096).decode(errors="replace").strip()
        raise ConfigError(said or f"the relay ended with status {child.returncode}")
    return parse_listening(line)


def _read_line(child: subprocess.Popen[bytes], deadline_s: float) -> bytes:
    """Return stdout up to its first line break, or up to its end."""
    assert child.stdout is not None
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([child.stdout], [], [], max(0.0, deadline_s - time.monotonic()))
        if not ready:
            raise TimeoutError(f"the relay did not listen within {START_WITHIN_S:g} s")
        # Never more than the first line: the second one comes a second later at the earliest.
        data = os.read(child.stdout.fileno(), 64 << 10)
        if not data:
            break
        line += data
    return line


def _stop(child: subprocess.Popen[bytes]) -> None:
    """End the relay: ask by closing its stdin, then kill."""
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        child.stdin.close()
    try:
        child.wait(STOP_WITHIN_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait(STOP_WITHIN_S)
