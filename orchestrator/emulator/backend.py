"""An emulator's process, from outside: started on a leash, told and heard over its pipes.

The protocol is the same for both emulators: docs/protocols.md, "Emulator".
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from isthmus.orchestrator.emulator.emulator_config import (
    NetnsConfig,
    RelayConfig,
    RelayEndpoint,
    Up,
    apply_line,
    lead_line,
    read_line,
)
from isthmus.protos.errors import IsthmusError
from isthmus.protos.failure import name_exit
from isthmus.protos.own_processes import leashed, own_command
from isthmus.topology.faults.script import Change
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.json_fields import read_json, to_json

STOP_S = 3.0
APPLY_S = 10.0
"""It answers within milliseconds, unless the machine is far too busy to emulate anything."""
LINE_BYTES = 4 << 20
"""Counters of 4096 links fit."""

Counters = Sequence[Mapping[str, Any]]
"""One directed link each: `source`, `target`, and figures since the start."""


class EmulatorError(IsthmusError):
    """The emulator does not do what it is there for."""

    code = "EMULATION_FAILED"


def command_of(config: RelayConfig | NetnsConfig) -> list[str]:
    """Return the command line of the emulator that `config` is for."""
    module = "relay" if isinstance(config, RelayConfig) else "netns"
    return own_command(f"isthmus.orchestrator.emulator.{module}")


class Backend:
    """Owns one emulator process, from `start` to `close`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        self._stdin, self._stdout, self._stderr = process.stdin, process.stdout, process.stderr
        self.pid = process.pid
        self.up = Up(op="ready")
        """What it said when it was up: how its sites are reached."""
        self.counters: Counters = ()
        """The latest counters of all links."""
        self._process = process
        self.on_counters: Callable[[Counters], None] | None = None
        """Called each second with the links' counters."""
        self._applied: asyncio.Future[Mapping[str, Any]] | None = None
        self._counted: asyncio.Future[Counters] | None = None
        self._applying = asyncio.Lock()
        self._last_words = ""
        self._ended: asyncio.Task[str] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._complaints = asyncio.create_task(self._pass_complaints_on(), name="emulator-stderr")

    @classmethod
    async def start(cls, config: RelayConfig | NetnsConfig, deadline_s: float) -> Backend:
        """Start the emulator that `config` is for; it has to be up by `deadline_s` of the loop.

        Call it from the main thread: the leash follows the thread that starts the process.

        Raises:
            EmulatorError: it ended, or was not up in time; in its own words if it had any.
        """
        process = await asyncio.create_subprocess_exec(
            *leashed(command_of(config)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=LINE_BYTES,
        )
        backend = cls(process)
        try:
            async with asyncio.timeout_at(deadline_s):
                backend.up = await backend._configure(config)
        except TimeoutError:
            await backend.close()
            raise EmulatorError("it was not up in time") from None
        except BaseException:
            await backend.close()
            raise
        backend._ended = asyncio.create_task(backend._listen(), name="emulator")
        return backend

    async def _configure(self, config: RelayConfig | NetnsConfig) -> Up:
        self._stdin.write(json.dumps(to_json(config)).encode() + b"\n")
        with contextlib.suppress(ConnectionError):  # it has ended, which the next line tells
            await self._stdin.drain()
        line = await self._stdout.readline()
        if not line:
            raise EmulatorError(await self._how_it_ended())
        try:
            return read_line(Up, line)
        except ConfigError as error:
            raise EmulatorError(f"it said {line[:200]!r} first: {error}") from error

    async def apply(self, changes: Sequence[Change]) -> None:
        """Change the links, all at once; return when it has taken effect.

        Raises:
            EmulatorError: it refuses, has ended, or does not answer; then it is killed, for nobody
                knows what the links are like any more.
        """
        await self._ask(apply_line(changes))

    async def lead(self, endpoints: Sequence[RelayEndpoint]) -> tuple[RelayEndpoint, ...]:
        """Have the relay lead to gateways that were started since; return where to dial instead.

        It leads no more to earlier ones of the same sites and numbers. Errors as of `apply`.
        """
        answer = await self._ask(lead_line(endpoints))
        return read_json(tuple[RelayEndpoint, ...], answer["endpoints"])

    async def _ask(self, line: bytes) -> Mapping[str, Any]:
        """Tell it one line, and return its answer; errors as of `apply`."""
        async with self._applying:
            self._applied = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(APPLY_S):
                    self._stdin.write(line)
                    await self._stdin.drain()
                    return await self._applied
            except ConnectionError as error:
                raise EmulatorError("it has ended") from error
            except TimeoutError as error:
                self._last_words = f"it did not take a change within {APPLY_S:g} s"
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                raise EmulatorError(self._last_words) from error

    async def count(self) -> Counters:
        """Return what has passed each link by now; errors as of `apply`. One call at a time."""
        self._counted = asyncio.get_running_loop().create_future()
        try:
            await self.apply(())
            return await self._counted
        except ConnectionError as error:
            raise EmulatorError("it has ended") from error
        finally:
            self._counted.cancel()

    def watch(self, on_end: Callable[[str], None]) -> None:
        """Call `on_end` when the process ends before `close`."""

        async def watch() -> None:
            on_end(await self.wait_ended())

        self._watching = asyncio.create_task(watch(), name="emulator-watch")

    async def wait_ended(self) -> str:
        """Return how it ended, when it does."""
        assert self._ended is not None, "it is up"
        return await asyncio.shield(self._ended)

    async def close(self) -> None:
        """End the process and return when it is gone. A second call changes nothing."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        self._stdin.close()
        await self._wait_or_kill()
        await asyncio.wait([self._complaints, *([self._ended] if self._ended else [])])

    async def _listen(self) -> str:
        """Take what it says until its end; return how it ended."""
        with contextlib.suppress(ValueError):  # a line without an end: it is killed below
            while line := await self._stdout.readline():
                if line.endswith(b"\n"):  # else it was killed in the middle of it
                    self._hear(line)
        for waiting in (self._applied, self._counted):
            if waiting is not None and not waiting.done():
                waiting.set_exception(ConnectionResetError())
        return await self._how_it_ended()

    async def _wait_or_kill(self) -> int:
        """Return its exit status; one that has closed its output, or lost its input, is to end."""
        try:
            async with asyncio.timeout(STOP_S):
                return await self._process.wait()
        except TimeoutError:
            # Never to a process that may be ending: subprocess would take its status from asyncio.
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            return await self._process.wait()

    def _hear(self, line: bytes) -> None:
        try:
            message = json.loads(line)
            op = message["op"]
            if op == "counters":
                self.counters = tuple(message["links"])
                if self.on_counters is not None:
                    self.on_counters(self.counters)
                is_answered = self._applied is not None and self._applied.done()
                if self._counted is not None and not self._counted.done() and is_answered:
                    self._counted.set_result(self.counters)  # those before the answer are old
            elif op == "applied" and self._applied is not None and not self._applied.done():
                self._applied.set_result(message)
            elif op == "refused" and self._applied is not None and not self._applied.done():
                self._applied.set_exception(EmulatorError(str(message["message"])))
        except (ValueError, KeyError, TypeError) as error:
            raise AssertionError(f"our own emulator said {line[:200]!r}") from error

    async def _pass_complaints_on(self) -> None:
        """Copy its stderr to ours, and keep the last line for whoever asks why it ended."""
        while True:
            try:
                line = await self._stderr.readline()
            except ValueError:
                continue  # longer than any line of ours; asyncio has dropped it
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            self._last_words = text or self._last_words
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

    async def _how_it_ended(self) -> str:
        status = await self._wait_or_kill()
        await asyncio.wait([self._complaints])
        said = f": {self._last_words}" if self._last_words else ""
        return f"it ended with {name_exit(status)}{said}"
