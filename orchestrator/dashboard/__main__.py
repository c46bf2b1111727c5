"""`python -m isthmus.orchestrator.dashboard`: the dashboard of one run, which `launch` starts.

It serves at a socket that it is given, and ends by itself: once the run is over and nobody looks.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from isthmus.orchestrator.dashboard.access import TOKEN_VARIABLE, Access
from isthmus.orchestrator.dashboard.server import IDLE_S, serve
from isthmus.orchestrator.interruption import INTERRUPTION, Interrupted, run_command

_NICE = 10
"""It may share its machine with ranks."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Show one run; return 0."""
    parser = argparse.ArgumentParser(prog="isthmus dashboard", description="Show one run.")
    parser.add_argument("--listener", required=True, type=int, help="descriptor of a socket")
    parser.add_argument("--home", required=True, type=Path)
    parser.add_argument("--run", required=True)
    parser.add_argument("--idle", type=float, default=IDLE_S, help="seconds")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    os.nice(_NICE)
    with (
        socket.socket(fileno=options.listener) as listener,
        INTERRUPTION.listening(is_program=True),
        contextlib.suppress(Interrupted),
    ):
        host, port = listener.getsockname()[:2]
        access = Access(host, port, os.environ.pop(TOKEN_VARIABLE))
        run_command(lambda: serve(listener, access, options.home, None, options.run, options.idle))
    return 0


if __name__ == "__main__":
    sys.exit(main())
