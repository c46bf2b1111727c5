"""Turns this process into another program of ours: same pid, same streams, nothing in between."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from orchestrator.cli.output import Output


def become(output: Output, module: str, arguments: Sequence[str]) -> int:
    """Replace this process by `python -m MODULE ARGUMENTS`.

    With --json, MODULE prints the envelope.
    """
    command = [sys.executable, "-m", module, *arguments]
    if output.as_json:
        command.append("--json")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, command)  # noqa: S606 - no shell is wanted
