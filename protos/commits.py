"""The commit of a folder's code, as git tells it."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

GIT_S = 5.0
"""A repository on a slow file system is not waited for longer."""


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit, and whether files that git tracks were changed since."""

    name: str
    is_changed: bool


def commit_of(folder: Path) -> Commit | None:
    """Return the commit of the repository around a folder; None: there is none, or no git.

    Files that git does not track do not count as changed.
    """
    command = ["git", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},  # leaves no trace in the repository
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=GIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.splitlines()
    name = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), "")
    if not re.fullmatch(r"[0-9a-f]{40,64}", name):  # a repository without commits
        return None
    return Commit(name, any(not line.startswith("#") for line in lines))
