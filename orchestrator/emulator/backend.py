"""The owner's side of an emulator process: starts it, and talks to it over its pipes.

The protocol is the same for both emulators: docs/protocols.md, "Emulator".
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from isthmus.orchestrator.emulator.emulator_config import (
    Applied,
    Apply,
    Counted,
    NetnsConfig,
    Refused,
    RelayConfig,
    RelayEndpoint,
    Up,
)
from isthmus.protos.errors import IsthmusError
from isthmus.protos.failure import name_exit
from isthmus.protos.own_processes import leashed, own_command
from isthmus.topology.faults.script import Change
from isthmus.topology.spec.json_lines import Kinds, line_of

STOP_S = 3.0
APPLY_S = 10.0
"""Timeout of a change; an emulator answers within milliseconds unless the machine is overloaded."""
LINE_BYTES = 4 << 20
"""Longest line: counters of 4096 links fit."""

Counters = Sequence[Mapping[str, Any]]
"""Counters of directed links: `source`, `target`, and figures since the start."""


class EmulatorError(IsthmusError):
    """The emulator has failed, or refuses a request."""

    code = "EMULATION_FAILED"


_UPS: Kinds[Up] = Kinds("emulator to owner", Up, EmulatorError)
_SAID: Kinds[Applied | Refused | Counted] = Kinds(
    "emulator to owner", Applied | Refused | Counted, AssertionError
)


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
        self.up = Up()
        """The emulator's first message: how its sites are reached."""
        self.counters: Counters = ()
        """The latest counters of all links."""
        self._process = process
        self.on_counters: Callable[[Counters], None] | None = None
        """Called each second with the links' counters."""
        self._applied: asyncio.Future[Applied] | None = None
        self._counted: asyncio.Future[Counters] | None = None
        self._applying = asyncio.Lock()
        self._last_words = ""
        self._ended: asyncio.Task[str] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._complaints = asyncio.create_task(self._pass_complaints_on(), name="emulator-stderr")

    @classmethod
    async def start(cls, config: RelayConfig | NetnsConfig, deadline_s: float) -> Backend:
        """Start the emulator of `config`; it must be up by `deadline_s` on the loop's clock.

        Call it from the main thread: the leash follows the thread that starts the process.

        Raises:
            EmulatorError: the emulator ended, or was not up in time; with its own message, if any.
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
        self._stdin.write(line_of(config))
        with contextlib.suppress(ConnectionError):  # it has ended: the next read shows that
            await self._stdin.drain()
        line = await self._stdout.readline()
        if not line:
            raise EmulatorError(await self._how_it_ended())
        return _UPS.read(line)

    async def apply(self, changes: Sequence[Change]) -> None:
        """Change the links, all at once; return when the changes have taken effect.

        Raises:
            EmulatorError: the emulator refuses, has ended, or does not answer. In the last case it
                is killed, because the state of the links is unknown.
        """
        await self._ask(Apply(changes=tuple(changes)))

    async def lead(self, endpoints: Sequence[RelayEndpoint]) -> tuple[RelayEndpoint, ...]:
        """Make the relay forward to gateways started since; return the addresses to dial instead.

        They replace earlier ones of the same sites and numbers. Errors as in `apply`.
        """
        return (await self._ask(Apply(endpoints=tuple(endpoints)))).endpoints

    async def _ask(self, request: Apply) -> Applied:
        """Send a request, and return the answer; errors as in `apply`."""
        async with self._applying:
            self._applied = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(APPLY_S):
                    self._stdin.write(line_of(request))
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
        """Return the links' current counters; errors as in `apply`. One call at a time."""
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
        """Wait for the process and return how it ended."""
        assert self._ended is not None, "it is up"
        return await asyncio.shield(self._ended)

    async def close(self) -> None:
        """End the process and wait for it. Idempotent."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        self._stdin.close()
        await self._wait_or_kill()
        await asyncio.wait([self._complaints, *([self._ended] if self._ended else [])])

    async def _listen(self) -> str:
        """Handle its messages until it ends; return how it ended."""
        with contextlib.suppress(ValueError):  # an endless line: the process is killed below
            while line := await self._stdout.readline():
                if line.endswith(b"\n"):  # else the process was killed within the line
                    self._hear(line)
        for waiting in (self._applied, self._counted):
            if waiting is not None and not waiting.done():
                waiting.set_exception(ConnectionResetError())
        return await self._how_it_ended()

    async def _wait_or_kill(self) -> int:
        """Return the exit status of a process that should be ending; kill it if it does not."""
        try:
            async with asyncio.timeout(STOP_S):
                return await self._process.wait()
        except TimeoutError:
            # Not while the process may be ending: subprocess would take its status from asyncio.
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            return await self._process.wait()

    def _hear(self, line: bytes) -> None:
        waiting = self._applied
        is_answered = waiting is not None and waiting.done()
        match _SAID.read(line):
            case Counted(links=links):
                self.counters = links
                if self.on_counters is not None:
                    self.on_counters(links)
                if self._counted is not None and not self._counted.done() and is_answered:
                    self._counted.set_result(links)  # counters before the answer are old
            case Applied() as applied if waiting is not None and not is_answered:
                waiting.set_result(applied)
            case Refused(why=why) if waiting is not None and not is_answered:
                waiting.set_exception(EmulatorError(why))

    async def _pass_complaints_on(self) -> None:
        """Copy its stderr to ours, and keep the last line as the reason of its end."""
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
