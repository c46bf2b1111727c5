"""A standalone emulation, which runs until a signal and is changed through a socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from isthmus.orchestrator.core.run_events import Endpoint
from isthmus.orchestrator.core.wan_stage import FALLBACK
from isthmus.orchestrator.emulator.backend import APPLY_S, Backend, Counters, EmulatorError
from isthmus.orchestrator.emulator.emulations import SOCKET, STATE
from isthmus.orchestrator.emulator.emulator_config import (
    NetnsConfig,
    RelayConfig,
    dialled,
    netns_config,
    shapes_of,
)
from isthmus.orchestrator.emulator.fault_player import FaultPlayer, needs_relay, needs_run
from isthmus.orchestrator.emulator.site_namespaces import netns_problem
from isthmus.orchestrator.interruption import first_signal
from isthmus.orchestrator.run_folder.run_files import write_atomically
from isthmus.protos.failure import name_exit, text_of
from isthmus.protos.own_processes import leashed
from isthmus.topology.faults.loading import load_faults
from isthmus.topology.faults.script import Change, FaultScript, Kill, Pause, TimedChange
from isthmus.topology.spec.errors import ConfigError, Problem
from isthmus.topology.spec.json_fields import Message, to_json
from isthmus.topology.spec.json_lines import Kinds, line_of
from isthmus.topology.spec.world import Topology

START_S = 30.0
COMMAND_STOP_S = 5.0
ENVIRONMENT = "ISTHMUS_EMULATION"
"""Environment variable of a command that runs on an emulation: the emulation's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The settings of a standalone emulation."""

    topology: Topology
    emulator: str
    """One of isthmus.topology.spec.world.EMULATORS."""
    served: tuple[Endpoint, ...] = ()
    """Servers, with one port each, that other sites reach through the relay."""
    script: FaultScript
    seed: int
    command: tuple[str, ...] = ()
    """Command with which the emulation ends; empty: it ends at a signal."""
    is_stdout_taken: bool = False
    """Whether the command's stdout goes to stderr instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listeners:
    """Callbacks for the events of an emulation."""

    on_up: Callable[[Mapping[str, Any]], None]
    """Called with the state, which is also in the folder, once the emulation is up."""
    on_fault: Callable[[TimedChange], None]
    on_counters: Callable[[Counters], None]


class Standing:
    """A standalone emulation, which exists while `run` runs."""

    def __init__(self, wanted: Wanted, folder: Path, listeners: Listeners) -> None:
        self._wanted = wanted
        self._folder = folder
        self._listeners = listeners
        self._is_netns = False

    async def run(self) -> int:
        """Emulate until a signal, or the end of the command.

        Returns:
            The command's exit status, or 128 and the signal's number.

        Raises:
            EmulatorError: the emulation is not possible here, or the emulator has ended.
            ConfigError: the faults cannot be played here.
        """
        with first_signal() as signalled:
            backend = await self._open()
            try:
                state = await self._state(backend)
                async with self._playing(backend):
                    write_atomically(self._folder / STATE, json.dumps(state) + "\n")
                    self._listeners.on_up(state)
                    return await self._until_over(backend, signalled)
            finally:
                await backend.close()

    async def _open(self) -> Backend:
        wanted = self._wanted
        _refuse(needs_run(wanted.script.faults))
        self._is_netns = await self._wants_netns()
        config: RelayConfig | NetnsConfig
        if self._is_netns:
            config = netns_config(wanted.topology, wanted.seed, self._folder)
        else:
            config = RelayConfig(
                links=shapes_of(wanted.topology),
                endpoints=dialled(wanted.topology, wanted.served),
                seed=wanted.seed,
            )
        deadline_s = asyncio.get_running_loop().time() + START_S
        backend = await Backend.start(config, deadline_s)
        backend.on_counters = self._listeners.on_counters
        return backend

    async def _state(self, backend: Backend) -> dict[str, Any]:
        """Return the emulation's state for other processes."""
        try:  # pid and start time identify a process
            created_s = psutil.Process(backend.pid).create_time()
        except psutil.NoSuchProcess:
            raise EmulatorError(await backend.wait_ended()) from None
        return {
            "name": self._folder.name,
            "topology": self._wanted.topology.name,
            "pid": os.getpid(),
            "emulator": {
                "kind": "netns" if self._is_netns else "relay",
                "pid": backend.pid,
                "created_s": created_s,
            },
            "sites": to_json(backend.up.sites),
            "endpoints": to_json(backend.up.endpoints),
        }

    async def _wants_netns(self) -> bool:
        """Whether packets are emulated; EmulatorError if the wanted emulator is not possible."""
        wanted = self._wanted
        if wanted.emulator == "relay" or (wanted.emulator == "auto" and wanted.served):
            return False
        why = needs_relay(wanted.script.faults) or await asyncio.to_thread(netns_problem)
        if why is None:
            return True
        if wanted.emulator == "netns":
            raise EmulatorError(f"netns was asked for, and cannot be here: {why}")
        raise EmulatorError(f"{FALLBACK} {why}; for the relay, say what to reach: --serve")

    async def _until_over(self, backend: Backend, signalled: asyncio.Future[int]) -> int:
        ended = asyncio.ensure_future(backend.wait_ended())
        command: asyncio.Task[int] | None = None
        if self._wanted.command:
            command = asyncio.create_task(self._run_command(), name="command")
        waits: list[asyncio.Future[Any]] = [signalled, ended, *([command] if command else [])]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise EmulatorError(ended.result())
            if command is not None and command.done():
                return command.result()
            return 128 + signalled.result()
        finally:
            for wait in waits[1:]:
                wait.cancel()
            await asyncio.wait(waits[1:])

    async def _run_command(self) -> int:
        """Run the command to its end; when cancelled, end it."""
        process = await asyncio.create_subprocess_exec(
            *leashed(self._wanted.command),
            stdout=sys.stderr.fileno() if self._wanted.is_stdout_taken else None,
            env={**os.environ, ENVIRONMENT: self._folder.name},
        )
        try:
            status = await process.wait()
        finally:
            await _end(process)
        if status < 0:
            sys.stderr.write(f"{self._wanted.command[0]} ended with {name_exit(status)}\n")
        return status if status >= 0 else 128 - status

    @contextlib.asynccontextmanager
    async def _playing(self, backend: Backend) -> AsyncIterator[None]:
        """Play the script, and answer requests for further faults, while the block runs."""
        wanted = self._wanted
        player = FaultPlayer(
            wanted.script,
            wanted.seed,
            apply=backend.apply,
            strike=_no_processes,
            on_played=self._listeners.on_fault,
        )

        async def add(text: str) -> Sequence[Change | Pause | Kill]:
            script = load_faults(text, "--apply", wanted.topology)
            _refuse(needs_run(script.faults))
            if self._is_netns:
                _refuse(needs_relay(script.faults))
            return await player.add(script.faults)

        async with answering(self._folder, add):
            playing = asyncio.create_task(player.play(), name="faults")
            try:
                yield
            finally:
                playing.cancel()
                await asyncio.wait([playing])


def _no_processes(strike: Pause | Kill) -> None:
    raise AssertionError(f"{strike}: `needs_run` has refused it")


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a command's process group, and wait for it."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is not None:
            return
        try:
            os.killpg(process.pid, signum)
        except ProcessLookupError:  # the process may not lead a group yet
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signum)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(COMMAND_STOP_S):
                await process.wait()


def _refuse(why: str | None) -> None:
    if why is not None:
        raise ConfigError(why)


REQUEST_S = APPLY_S + 2
"""Longer than the emulator's own deadline, whose error says more."""
REQUEST_BYTES = 64 << 10


class Fault(Message):
    """A request: a fault of a script, without its time."""

    text: str


class Answer(Message):
    """The changes that were made, in words, or why none was."""

    changes: tuple[str, ...] = ()
    wrong: str = ""
    """Why nothing was changed; empty: it was."""
    failed: str = ""
    """Why it was not done."""


_FAULTS: Kinds[Fault] = Kinds("command to emulation", Fault, EmulatorError)
_ANSWERS: Kinds[Answer] = Kinds("emulation to command", Answer, EmulatorError)
Apply = Callable[[str], Awaitable[Sequence[Change | Pause | Kill]]]
"""Makes the changes of a script from `as_script`; raises ConfigError or EmulatorError."""


@contextlib.asynccontextmanager
async def answering(folder: Path, apply: Apply) -> AsyncIterator[None]:
    """Answer requests at a folder's socket while the block runs."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reply = await answer_to(reader, apply)
        with contextlib.suppress(ConnectionError):
            writer.write(line_of(reply))
            await writer.drain()
        writer.close()

    with _control_socket() as (listener, within):
        listener.bind(within(folder))
        listener.listen()
        async with await asyncio.start_unix_server(answer, sock=listener, limit=REQUEST_BYTES):
            yield


def request_change(folder: Path, text: str) -> Sequence[str]:
    """Request a change of a running emulation; return the changes made, in words.

    Raises:
        ConfigError: the change is not valid, or not possible there.
        EmulatorError: the emulation does not answer, or has ended.
    """
    with _control_socket() as (unix, within):
        unix.settimeout(REQUEST_S + 1)
        try:
            unix.connect(within(folder))
            unix.sendall(line_of(Fault(text=text)))
            line = unix.makefile("rb").readline(REQUEST_BYTES)
        except OSError as error:
            raise EmulatorError(
                f"emulation {folder.name} does not answer: {text_of(error)}"
            ) from error
    return read_answer(line)


def read_answer(line: bytes) -> Sequence[str]:
    """Return the changes, in words, in an emulation's answer.

    Raises:
        ConfigError: the change is not valid, or not possible there.
        EmulatorError: the change was not made, or the answer is not valid.
    """
    answer = _ANSWERS.read(line)
    if answer.wrong:
        raise ConfigError(answer.wrong)
    if answer.failed:
        raise EmulatorError(f"not done: {answer.failed}")
    return answer.changes


def as_script(text: str) -> str:
    """Return a fault script whose only fault is `text`, beginning at once.

    Raises:
        ConfigError: `text` has more than one line.
    """
    inner = text.strip()
    if "\n" in inner:
        raise ConfigError("want one fault in one line, as 'link: [a, b], rate: 10Mbit/s'")
    if inner.startswith("{") and inner.endswith("}"):
        inner = inner[1:-1]
    return f"version: 1\nfaults: [{{at: 0s, {inner}}}]\n"


async def answer_to(reader: asyncio.StreamReader, apply: Apply) -> Answer:
    """Execute one untrusted request, and return the answer."""
    try:
        async with asyncio.timeout(REQUEST_S):
            fault = _FAULTS.read(await reader.readline())
            changes = await apply(as_script(fault.text))
    except ConfigError as error:
        return Answer(wrong="; ".join(_located(problem) for problem in error.problems))
    except TimeoutError:
        return Answer(failed=f"it took more than {REQUEST_S:g} s")
    except (EmulatorError, ValueError) as error:
        return Answer(failed=text_of(error))
    return Answer(changes=tuple(str(change) for change in changes))


@contextlib.contextmanager
def _control_socket() -> Iterator[tuple[socket.socket, Callable[[Path], str]]]:
    """Yield a socket, and a function that returns a short path to it in a folder.

    A socket's path must fit into 108 bytes, which a folder's path may exceed, so it goes through a
    descriptor of the folder.
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
