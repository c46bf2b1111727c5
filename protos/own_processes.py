"""The command lines of our own processes: one of our modules, alone or at the leash of its parent.

`-P` keeps the folder in which a process starts off its import path. Else a `queue.py` or a
`random.py` that lies there would take the place of Python's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

_LEASH = "isthmus.sites.leash"


def own_command(module: str, *arguments: str, python: str | None = None) -> list[str]:
    """Return the command line of `module`; `python` is another interpreter than this one's."""
    return [python or sys.executable, "-P", "-m", module, *arguments]


def leashed(command: Sequence[str], namespaces: tuple[str, str] | None = None) -> list[str]:
    """Return a command line that does the same, and dies with this process (sites/leash.py).

    `namespaces` are files of a user namespace (may be empty) and a network namespace to enter.
    """
    return [*own_command(_LEASH, str(os.getpid()), *_entering(namespaces), "--"), *command]


def entered(namespaces: tuple[str, str], command: Sequence[str]) -> list[str]:
    """Return a command line that does the same inside namespaces, and outlives this process."""
    return [*own_command(_LEASH, "-", *_entering(namespaces), "--"), *command]


def _entering(namespaces: tuple[str, str] | None) -> tuple[str, ...]:
    return () if namespaces is None else ("--enter", *namespaces)
