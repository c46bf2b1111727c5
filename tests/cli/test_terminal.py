"""On a terminal: the table is live, on stderr, and the terminal is left as it was."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.runs import a_run
from tests.fakes.scripted_coordinator import ScriptedCoordinator, serving

PROCESS_S = 60.0
HIDE_CURSOR, SHOW_CURSOR = b"\x1b[?25l", b"\x1b[?25h"


def read_until(terminal: int, wanted: bytes) -> bytes:
    """Read what a terminal shows until `wanted` has come."""
    shown = b""
    deadline_s = time.monotonic() + PROCESS_S
    while wanted not in shown:
        left_s = deadline_s - time.monotonic()
        assert left_s > 0, f"{wanted!r} never came: {shown!r}"
        if select.select([terminal], [], [], left_s)[0]:
            shown += os.read(terminal, 65536)
    return shown


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_live_table_gives_the_cursor_back(tmp_path: Path, number: int, code: int) -> None:
    scripted = ScriptedCoordinator(
        runs=[a_run("ACTIVE")], watched=[a_run("ACTIVE")], holds_streams=True
    )
    terminal, end = os.openpty()
    env = {**os.environ, "TERM": "xterm", "ISTHMUS_HOME": str(tmp_path), "COLUMNS": "120"}
    with serving(scripted) as address:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "isthmus.orchestrator.cli.main"),
                *("status", "--watch", "--coordinator", address),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=end,
            env=env,
        )
        try:
            shown = read_until(terminal, b"tokens/s")
            process.send_signal(number)
            out, _ = process.communicate(timeout=PROCESS_S)
            shown += read_until(terminal, SHOW_CURSOR) if SHOW_CURSOR not in shown else b""
        finally:
            process.kill()
            process.communicate()
            os.close(end)
            os.close(terminal)
    assert process.returncode == code
    assert shown.index(HIDE_CURSOR) < shown.rindex(SHOW_CURSOR)
    assert b"Traceback" not in shown
    assert not out
