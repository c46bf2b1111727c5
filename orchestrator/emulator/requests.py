"""Changes by hand of an emulation that is up: asked for and answered at a socket in its folder."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from orchestrator.emulator.backend import APPLY_S, EmulatorError
from orchestrator.emulator.emulations import SOCKET
from topology.errors import ConfigError, Problem
from topology.faults.changes import Change, Pause

REQUEST_S = APPLY_S + 2
"""The emulator's own deadline comes first, and says more."""
REQUEST_BYTES = 64 << 10

Apply = Callable[[str], Awaitable[Sequence[Change | Pause]]]
"""Makes the changes of a script that `as_script` has made; ConfigError or EmulatorError."""


@contextlib.asynccontextmanager
async def answering(folder: Path, apply: Apply) -> AsyncIterator[None]:
    """Answer requests at a folder's socket while the block runs."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reply = await answer_to(reader, apply)
        with contextlib.suppress(ConnectionError):
            writer.write(json.dumps(reply).encode() + b"\n")
            await writer.drain()
        writer.close()

    with _control_socket() as (listener, within):
        listener.bind(within(folder))
        listener.listen()
        async with await asyncio.start_unix_server(answer, sock=listener, limit=REQUEST_BYTES):
            yield


def request_change(folder: Path, text: str) -> list[str]:
    """Have an emulation that is up make a change; return what was changed, in words.

    Raises:
        ConfigError: it is none, or cannot be made there.
        EmulatorError: the emulation does not answer, or cannot be changed any more.
    """
    with _control_socket() as (unix, within):
        unix.settimeout(REQUEST_S + 1)
        try:
            unix.connect(within(folder))
            unix.sendall(json.dumps({"apply": text}).encode() + b"\n")
            line = unix.makefile("rb").readline(REQUEST_BYTES)
        except OSError as error:
            raise EmulatorError(f"emulation {folder.name} does not answer: {error}") from error
    return read_answer(line, folder.name)


def read_answer(line: bytes, name: str) -> list[str]:
    """Return what an emulation says that it has changed, in words.

    Args:
        line: its answer.
        name: the emulation's.

    Raises:
        ConfigError: the change is none, or cannot be made there.
        EmulatorError: it was not made, or the answer is none.
    """
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise EmulatorError(f"emulation {name} does not answer: {error}") from error
    match answer:
        case {"wrong": str(wrong)}:
            raise ConfigError(wrong)
        case {"failed": failed}:
            raise EmulatorError(f"not done: {failed}")
        case {"changes": list(changes)}:
            return [str(each) for each in changes]
    raise EmulatorError(f"emulation {name} answers something else than changes: {line[:100]!r}")


def as_script(text: str) -> str:
    """Return a fault script whose only fault is `text`, which has no time: it begins at once.

    Raises:
        ConfigError: it is more than one line.
    """
    inner = text.strip()
    if "\n" in inner:
        raise ConfigError("want one fault in one line, as 'link: [a, b], rate: 10Mbit/s'")
    if inner.startswith("{") and inner.endswith("}"):
        inner = inner[1:-1]
    return f"version: 1\nfaults: [{{at: 0s, {inner}}}]\n"


async def answer_to(reader: asyncio.StreamReader, apply: Apply) -> dict[str, Any]:
    """Do what one request asks for, whatever it is, and return the answer."""
    try:
        async with asyncio.timeout(REQUEST_S):
            request = json.loads(await reader.readline())
            made = await apply(as_script(request["apply"]))
    except ConfigError as error:
        return {"wrong": "; ".join(_located(problem) for problem in error.problems)}
    except TimeoutError:
        return {"failed": f"it took more than {REQUEST_S:g} s"}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return {"failed": f"not a request: {error}"}
    except EmulatorError as error:
        return {"failed": str(error)}
    return {"changes": [str(change) for change in made]}


@contextlib.contextmanager
def _control_socket() -> Iterator[tuple[socket.socket, Callable[[Path], str]]]:
    """Give a socket, and a function that returns a path for it that is short enough anywhere.

    A socket's path must fit into 108 bytes, which a folder's own need not: it is reached through
    a descriptor of the folder.
    """
    with contextlib.ExitStack() as stack:

        def within(folder: Path) -> str:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, descriptor)
            return f"/proc/self/fd/{descriptor}/{SOCKET}"

        unix = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        yield unix, within


def _located(problem: Problem) -> str:
    path = str(problem.path).removeprefix("faults.0.").removeprefix("faults.0")
    return f"{problem.message} [{path}]" if path else problem.message
