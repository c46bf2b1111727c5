"""Daemons of somebody else that a test needs: one program starts them, and ends with its stdin.

So they are gone when the test is, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from isthmus.protos.own_processes import leashed

ROOT = Path(__file__).parents[2]
END_S = 10.0
STOP_S = 100.0


class Daemons:
    """Processes that write their logs into a folder, and die with this process."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self._folder = folder
        self._env = {**os.environ, **env}
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """End all, the last one first."""
        for process in reversed(self._running):
            process.terminate()
        for process in self._running:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(END_S)

    def start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        """Start one by a command line; its log is NAME.log."""
        with (self._folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                leashed(words),
                env=self._env,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._running.append(process)
        return process


def hold(line: str) -> None:
    """Print what to put into the environment, and return once stdin has ended, or on Ctrl-C."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print(line, flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        sys.stdin.read()


@contextlib.contextmanager
def held(module: str, *arguments: str) -> Iterator[None]:
    """Run a program that holds daemons for as long as the block lasts."""
    with subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline().startswith("export "), "see what it says above"
            yield
        finally:
            process.stdin.close()
            assert process.wait(STOP_S) == 0


def free_ports(num_ports: int) -> list[int]:
    """Return ports of loopback that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num_ports)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
