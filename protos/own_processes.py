"""Command lines of our own processes, optionally tied to the life of the parent process.

`-P` keeps the working directory off the import path. Otherwise a `queue.py` or `random.py` there
would replace Python's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

_LEASH = "isthmus.sites.leash"


def own_command(module: str, *arguments: str, python: str | None = None) -> list[str]:
    """Return the command line of `module`; `python`: another interpreter than this one's."""
    return [python or sys.executable, "-P", "-m", module, *arguments]


def leashed(command: Sequence[str], namespaces: tuple[str, str] | None = None) -> list[str]:
    """Wrap a command line so that the process dies with this one (sites/leash.py).

    `namespaces` are files of a user namespace (may be empty) and a network namespace to enter.
    """
    return [*own_command(_LEASH, str(os.getpid()), *_entering(namespaces), "--"), *command]


def entered(namespaces: tuple[str, str], command: Sequence[str]) -> list[str]:
    """Wrap a command line to run inside namespaces; the process may outlive this one."""
    return [*own_command(_LEASH, "-", *_entering(namespaces), "--"), *command]


def _entering(namespaces: tuple[str, str] | None) -> tuple[str, ...]:
    return () if namespaces is None else ("--enter", *namespaces)
