"""The dashboard that `isthmus launch --dashboard` starts for its run.

It is a process of its own: like the run, it goes on when the command has detached or was killed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from isthmus.orchestrator.api.errors import CommandError
from isthmus.orchestrator.run_folder.home import RunFolder
from isthmus.protos.own_processes import own_command

HOST = "127.0.0.1"
PORT = 8265
"""The port that a dashboard has unless it is asked for another one."""
LOG = "dashboard.log"
NEEDED = ("starlette", "uvicorn")
CURE = "pip install 'isthmus[dashboard]'"


def require_dashboard() -> None:
    """Refuse where what the dashboard needs is not installed.

    Raises:
        CommandError: with what to install.
    """
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise CommandError(
            "USAGE",
            f"the dashboard needs {' and '.join(missing)}, which this Python has not: {CURE}",
            hint="Install it with the Python that runs isthmus.",
        )


@dataclass(frozen=True, slots=True)
class RunDashboard:
    """An address that listens, for the dashboard of a run that will be submitted."""

    listener: socket.socket
    home: Path
    run_id: str
    token: str

    @property
    def url(self) -> str:
        """The address of the run's page, for a browser to begin with."""
        port = self.listener.getsockname()[1]
        return f"http://{HOST}:{port}/runs/{self.run_id}?token={self.token}"

    def begin(self, folder: RunFolder) -> bool:
        """Start the process, which takes over the address. It ends by itself after the run.

        Return whether there is anything to show: False where the run's journal is on another
        machine.
        """
        from isthmus.orchestrator.dashboard.access import TOKEN_VARIABLE

        if folder.state is None:
            return False
        descriptor = self.listener.fileno()
        command = own_command(
            "isthmus.orchestrator.dashboard",
            *("--listener", str(descriptor)),
            *("--home", str(self.home)),
            *("--run", self.run_id),
        )
        with (folder.path / LOG).open("ab") as lines:
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=lines,
                stderr=lines,
                env={**os.environ, TOKEN_VARIABLE: self.token},  # others see command lines
                pass_fds=(descriptor,),
                start_new_session=True,  # a terminal's Ctrl-C and hang-up are not for it
            )
        return True


@contextlib.contextmanager
def run_dashboard(home: Path, run_id: str) -> Iterator[RunDashboard]:
    """Give an address for the dashboard of a run, at the usual port if nobody has it.

    Raises:
        CommandError: what the dashboard needs is not installed.
    """
    require_dashboard()
    from isthmus.orchestrator.dashboard.access import new_token
    from isthmus.orchestrator.dashboard.server import listen

    try:
        listener = listen(HOST, PORT)
    except OSError:
        listener = listen(HOST, 0)
    with listener:
        yield RunDashboard(listener, home, run_id, new_token())
