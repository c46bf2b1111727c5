"""Starts the packet emulator as a child process and makes sure that it ends: for tests and scripts."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import IO

from orchestrator.emulator.backend import SiteNamespace, parse_ready
from orchestrator.emulator.child import EmulatorProcess
from orchestrator.emulator.netns_config import NetnsConfig


class NetnsProcess(EmulatorProcess):
    """A packet emulator that runs.

    Attributes:
        sites: How each is reached and entered.
    """

    def __init__(self, child: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        super().__init__(child, log)
        self.sites: dict[str, SiteNamespace] = {}


@contextlib.contextmanager
def running_netns(config: NetnsConfig) -> Iterator[NetnsProcess]:
    """Run a packet emulator in a process of its own; it has ended when the block has.

    Raises:
        ConfigError: it refuses its configuration, or this machine refuses it; in its own words.
        TimeoutError: it is not ready in time.
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
            ready = parse_ready(emulator.configure(config.to_json()))
            emulator.sites = {site.site: site for site in ready}
            yield emulator
        finally:
            emulator.stop()
