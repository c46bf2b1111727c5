"""This side of `python -m isthmus.sites.tether`: spec, version check, explained errors."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

from isthmus.orchestrator.launchers.launcher import Launcher, LaunchError, Stream
from isthmus.protos.failure import text_of
from isthmus.protos.own_processes import own_command
from isthmus.protos.versions import (
    CONTROL_PROTOCOL_MAX,
    CONTROL_PROTOCOL_MIN,
    EXCHANGE_PROTOCOL_MAX,
    EXCHANGE_PROTOCOL_MIN,
    build,
    negotiate,
)
from isthmus.topology.spec.json_lines import Kinds, line_of
from isthmus.topology.spec.tether_messages import GREETING, Spec, Versions

TETHER = "isthmus.sites.tether"
GREETING_LINES = 1000
"""Limit on the lines that a login shell prints before the greeting."""
BEAT_S = 5.0
"""Interval of heartbeats to the other end."""
_VERSIONS: Kinds[Versions] = Kinds(
    "tether to launcher", Versions, lambda _: _other_version("unknown"), on_unknown=lambda _: None
)


async def start(launcher: Launcher, spec: Spec, greet_s: float) -> Stream:
    """Start the command of a spec; return its stream, from the command's first line on.

    Raises:
        LaunchError: it does not start; the error has the remedy.
    """
    stream = await launcher.start(own_command(TETHER, python=launcher.python))
    try:
        async with asyncio.timeout(greet_s):
            check_versions(await _greeted(stream, launcher.python))
            await stream.write(line_of(spec))
    except TimeoutError as error:
        await stream.abandon()
        message = f"{launcher.python} has not started isthmus within {greet_s:g} s"
        raise LaunchError("no_answer", message, "see what the machine is busy with") from error
    except OSError as error:
        await stream.abandon()
        raise LaunchError(
            "host_unreachable", f"the connection was lost: {text_of(error)}", "again"
        ) from error
    except BaseException:
        await stream.abandon()
        raise
    return stream


async def _greeted(stream: Stream, python: str) -> str:
    """Return the text after the greeting; LaunchError: there is none."""
    lines: list[str] = []
    while line := await stream.readline():
        text = line.decode(errors="replace").rstrip()
        if text.startswith(GREETING):
            return text.removeprefix(GREETING)
        lines = [*lines, text][-GREETING_LINES:]
    raise diagnosed(await stream.wait(), lines, python)


def diagnosed(status: int | None, lines: Sequence[str], python: str) -> LaunchError:
    """Return why a tether did not greet.

    Args:
        status: Exit status of the tether; None: the connection was lost.
        lines: Output instead of the greeting.
        python: The interpreter that should have run it.
    """
    last = next((each for each in reversed(lines) if each.strip()), "it said nothing")
    if status is None:
        return LaunchError("host_unreachable", f"the connection was lost: {last}", "try again")
    if "No module named" in last:
        missing = last.rpartition("No module named")[2].strip(" '\"")
        if missing == TETHER:
            return LaunchError(
                "other_version",
                f"{python}: the isthmus there is older: it has no {TETHER}",
                f"install isthmus {build()} there",
            )
        return LaunchError(
            "isthmus_missing",
            f"{python}: isthmus is not installed there, or not whole: {last}",
            f"there: {python} -m pip install 'isthmus[train]=={build()}'; or name a Python that has it as "
            "launcher.python",
        )
    if re.search(r"nknown option:? -P", last):
        return LaunchError(
            "python_missing",
            f"{python}: is older than Python 3.11: {last}",
            "install a newer Python there, and name it as launcher.python in the topology",
        )
    if status in {126, 127}:
        return LaunchError(
            "python_missing",
            f"{python}: cannot be run there: {last}",
            "install Python there, and name it as launcher.python in the topology; its user has "
            "to be able to read it",
        )
    return LaunchError("start_failed", f"{python} ended with status {status}: {last}", "see above")


def check_versions(greeting: str) -> None:
    """Refuse a build without a common protocol version.

    Raises:
        LaunchError: there is no common version.
    """
    theirs = _VERSIONS.read(greeting.encode())
    agreed = [
        negotiate((CONTROL_PROTOCOL_MIN, CONTROL_PROTOCOL_MAX), theirs.control),
        negotiate((EXCHANGE_PROTOCOL_MIN, EXCHANGE_PROTOCOL_MAX), theirs.exchange),
    ]
    if None in agreed:
        raise _other_version(theirs.build)


def _other_version(theirs: str) -> LaunchError:
    return LaunchError(
        "other_version",
        f"isthmus {theirs} is there, {build()} here: they have no protocol in common",
        f"install isthmus {build()} there",
    )
