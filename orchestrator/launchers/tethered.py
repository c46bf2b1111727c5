"""The near end of `python -m isthmus.sites.tether`: versions, what to run, and what went wrong."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from isthmus.orchestrator.launchers.launcher import Launcher, LaunchError, Stream
from isthmus.protos.own_processes import own_command
from isthmus.protos.versions import (
    CONTROL_PROTOCOL_MAX,
    CONTROL_PROTOCOL_MIN,
    EXCHANGE_PROTOCOL_MAX,
    EXCHANGE_PROTOCOL_MIN,
    build,
    negotiate,
)

TETHER = "isthmus.sites.tether"
GREETING = "isthmus-tether "
"""As sites/tether.py has it: the two meet on the wire alone."""
FOLDER = "{folder}"
CREDENTIALS = f"{FOLDER}/credentials"
GREETING_LINES = 1000
"""A login shell may print so many before the greeting."""
BEAT_S = 5.0
"""Between two signs of life to the other end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What a tether runs. FOLDER in command and environment is the folder, as it is there."""

    folder: str
    """`~` is the home of who runs it."""
    command: Sequence[str]
    files: Mapping[str, bytes]
    """Secrets and documents, by their names; they lie in CREDENTIALS, readable by the user alone,
    for as long as the command lives."""
    env: Mapping[str, str]
    silence_s: float
    """The other end ends by itself once it has heard nothing for so long."""

    def line(self) -> bytes:
        """Return this spec as the line that the tether reads."""
        written = {
            "folder": self.folder,
            "command": list(self.command),
            "files": {
                name: base64.b64encode(content).decode() for name, content in self.files.items()
            },
            "env": dict(self.env),
            "silence_s": self.silence_s,
        }
        return json.dumps(written).encode() + b"\n"


async def start(launcher: Launcher, spec: Spec, greet_s: float) -> Stream:
    """Start what a spec says; return its stream, from the command's first line on.

    Raises:
        LaunchError: it does not start there; with the cure.
    """
    stream = await launcher.start(own_command(TETHER, python=launcher.python))
    try:
        async with asyncio.timeout(greet_s):
            check_versions(await _greeted(stream, launcher.python))
            await stream.write(spec.line())
    except TimeoutError as error:
        await stream.abandon()
        message = f"{launcher.python} has not started isthmus within {greet_s:g} s"
        raise LaunchError("no_answer", message, "see what the machine is busy with") from error
    except OSError as error:
        await stream.abandon()
        raise LaunchError(
            "host_unreachable", f"the connection was lost: {error}", "again"
        ) from error
    except BaseException:
        await stream.abandon()
        raise
    return stream


async def _greeted(stream: Stream, python: str) -> str:
    """Return what follows the greeting; LaunchError: there is none."""
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
        status: Its exit status; None: the connection was lost.
        lines: What came instead.
        python: What should have run it.
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
    """Refuse a build that has no protocol in common with this one.

    Raises:
        LaunchError: it has none.
    """
    try:
        theirs = json.loads(greeting)
        control = tuple(int(each) for each in theirs["control"])
        exchange = tuple(int(each) for each in theirs["exchange"])
        their_build = str(theirs["build"])
        agreed = [
            negotiate((CONTROL_PROTOCOL_MIN, CONTROL_PROTOCOL_MAX), (control[0], control[1])),
            negotiate((EXCHANGE_PROTOCOL_MIN, EXCHANGE_PROTOCOL_MAX), (exchange[0], exchange[1])),
        ]
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise _other_version("unknown") from error
    if None in agreed:
        raise _other_version(their_build)


def _other_version(theirs: str) -> LaunchError:
    return LaunchError(
        "other_version",
        f"isthmus {theirs} is there, {build()} here: they have no protocol in common",
        f"install isthmus {build()} there",
    )
