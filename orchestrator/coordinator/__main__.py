"""`python -m isthmus.orchestrator.coordinator`: its process, from arguments to exit status."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# Before grpc is imported: processes are started here, and gRPC's fork handlers would run each time.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

from isthmus.orchestrator.coordinator.active_run import ActiveRun
from isthmus.orchestrator.coordinator.control import Control
from isthmus.orchestrator.coordinator.journal import Journal, JournalError, JournalGoneError
from isthmus.orchestrator.coordinator.local_agents import LocalAgents
from isthmus.orchestrator.coordinator.own_log import OwnLines, bound
from isthmus.orchestrator.coordinator.service import CoordinatorService, listen, make_server
from isthmus.orchestrator.coordinator.wan import FaultPlan, emulation
from isthmus.orchestrator.documents import load_topology_file, protect
from isthmus.orchestrator.interruption import first_signal
from isthmus.orchestrator.run_folder.home import ANNOUNCED, LOG
from isthmus.orchestrator.run_folder.run_files import write_atomically
from isthmus.protos.catalogue import CATALOGUE
from isthmus.protos.envelope import failure, success
from isthmus.protos.errors import IsthmusError
from isthmus.protos.failure import reason_of
from isthmus.protos.identities import COORDINATOR
from isthmus.protos.private_files import keep_private
from isthmus.protos.security import control_security, require_protected
from isthmus.protos.usable_cores import usable_cores
from isthmus.topology.documents.placement import restricted
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.timeouts import Timeouts
from isthmus.topology.spec.world import Endpoint, Topology

COMMAND = "coordinator"
LOG_FORMAT = "%(asctime)s coordinator: %(message)s"
DRAIN_S = 5.0
"""Time for watchers to be told the end of an embedded run, before the process ends by itself."""
RETRY_S = 2.0
"""Between two attempts to write the journal."""
CLOSE_S = 1.0
"""Time for calls that are going on when the server stops."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the process was started with, checked."""

    topology: Topology
    agents: tuple[str, ...]
    """Sites that an embedded coordinator starts an agent for."""
    state: Path
    runs: Path
    bind: Endpoint
    is_embedded: bool
    faults: object | None
    """A fault script, as the emulator has it."""
    seed: int | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the coordinator; return its exit status."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    keep_private()
    try:
        status = asyncio.run(_serve(_settings(options)))
    except ConfigError as error:
        return _failed(options, "INVALID_CONFIG", str(error))
    except IsthmusError as error:
        return _failed(options, error.code, str(error))
    except OSError as error:
        return _failed(options, "FILE_ERROR", f"{error.filename or 'state'}: {error.strerror}")
    except Exception as error:
        log.exception("the coordinator has ended by a mistake of its own")
        return _failed(options, "INTERNAL", reason_of(error))
    if options.json:
        print(success(COMMAND, {"state": str(options.state)}, status))  # noqa: T201
    return status


def _settings(options: argparse.Namespace) -> Settings:
    """Check what the operator gave.

    Raises:
        ConfigError: the topology has mistakes.
        InsecureAddressError: others could reach the address.
    """
    topology = load_topology_file(options.topology, options.set)
    bind = options.bind or topology.coordinator.bind
    protect(topology, options.topology)
    require_protected(bind.host)
    here = restricted(topology, options.site) if options.site else topology
    return Settings(
        topology=topology,
        agents=tuple(site.name for site in here.sites),
        state=options.state.absolute(),
        runs=(options.runs or options.state / "runs").absolute(),
        bind=bind,
        is_embedded=options.embedded,
        faults=emulation().load_faults_file(options.faults, here) if options.faults else None,
        seed=options.seed,
    )


async def _serve(settings: Settings) -> int:
    """Serve until a signal, or for an embedded coordinator until its run has ended.

    One that was paused, because its journal could not be written, begins anew by that journal.
    """
    with first_signal() as signalled:
        while (bind := await _lead(settings, signalled)) is not None:
            log.info("the journal can be written again: this coordinator begins anew")
            settings = replace(settings, bind=bind)
    return 128 + signalled.result() if signalled.done() else 0


async def _lead(settings: Settings, signalled: asyncio.Future[int]) -> Endpoint | None:
    """Serve until the end; or until a journal can be written again: return where to go on."""
    timeouts = Timeouts.derive(settings.topology.failure)
    with contextlib.closing(Journal(settings.state)) as journal:
        agents = LocalAgents()
        control = Control(
            settings.topology,
            journal,
            settings.runs,
            _fault_plan(settings, agents),
            agents_outlive=not settings.is_embedded,
            own_cores=usable_cores() if settings.is_embedded else None,
            security=control_security(COORDINATOR),
        )
        service = CoordinatorService(control)
        server = make_server(service, timeouts)
        address = listen(server, settings.bind.host, settings.bind.port)
        await server.start()
        ticking = asyncio.create_task(control.run(), name="control")
        watching = asyncio.create_task(control_security(COORDINATOR).watch(), name="certificate")
        try:
            with (
                _own_lines_kept(control),
                _announced(settings.state, address, control.runs.generation),
            ):
                log.info("listening on %s, generation %d", address, control.runs.generation)
                async with _running(agents, settings, address, control):
                    try:
                        await _until_over(settings, control, service, ticking, signalled)
                    except JournalError as error:
                        await _cannot_write(error, settings, control, service)
                        if not await _is_written_again(journal, signalled):
                            return None
                        return replace(settings.bind, port=int(address.rpartition(":")[2]))
        finally:
            await control.close()
            ticking.cancel()
            watching.cancel()
            await server.stop(CLOSE_S)
    return None


async def _cannot_write(
    error: JournalError, settings: Settings, control: Control, service: CoordinatorService
) -> None:
    """End the run of an embedded coordinator by name, for its agents end with it; else pause.

    Raises:
        JournalError: this coordinator ends, too.
    """
    if settings.is_embedded:
        control.end_unwritten(error)
    else:
        control.pause(error)
    if settings.is_embedded or isinstance(error, JournalGoneError):
        await service.wait_for_streams(DRAIN_S)
        raise error
    log.error("paused, until the journal can be written: %s", error)


async def _is_written_again(journal: Journal, signalled: asyncio.Future[int]) -> bool:
    """Wait until the journal can be written; False: the process is to end before."""
    while True:
        await asyncio.wait([signalled], timeout=RETRY_S)
        if signalled.done():
            return False
        if journal.can_be_written():
            return True


async def _until_over(
    settings: Settings,
    control: Control,
    service: CoordinatorService,
    ticking: asyncio.Task[None],
    signalled: asyncio.Future[int],
) -> None:
    """Return when the process has nothing left to do; watchers have been told by then."""
    reasons: list[asyncio.Future[Any]] = [ticking, signalled]
    if settings.is_embedded:
        reasons.append(asyncio.create_task(_run_once(control), name="run-once"))
    try:
        await asyncio.wait(reasons, return_when=asyncio.FIRST_COMPLETED)
        if ticking.done():
            await ticking  # raises: what happens can no longer be written down
        if signalled.done():
            log.info("asked to end by signal %d", signalled.result())
            await _cancel_run(control, signalled.result())
        await service.wait_for_streams(DRAIN_S)
    finally:
        for each in reasons[2:]:
            each.cancel()


async def _run_once(control: Control) -> None:
    """Return when the first run has ended, or none was submitted in time."""
    try:
        async with asyncio.timeout(control.timeouts.start_s):
            await control.runs.submitted.wait()
    except TimeoutError:
        log.info("no run was submitted within %g s", control.timeouts.start_s)
        return
    assert control.runs.latest is not None
    await _wait_for_end(control.runs.latest)


async def _cancel_run(control: Control, signum: int) -> None:
    """End the runs that are going on; the core gives sites as long as this to confirm it."""
    name = signal.Signals(signum).name
    timeouts = control.timeouts
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeouts.stop_grace_s + timeouts.lease_s + CLOSE_S):
            for run in control.runs.end(f"the coordinator was asked to end ({name})"):
                await _wait_for_end(run)


async def _wait_for_end(run: ActiveRun) -> None:
    while not run.has_ended:
        await run.changed.wait()


@asynccontextmanager
async def _running(
    agents: LocalAgents, settings: Settings, address: str, control: Control
) -> AsyncIterator[None]:
    """Run the agents of an embedded coordinator. Leaving the block ends them."""
    log_path = settings.state / LOG

    def on_end(site: str, how: str) -> None:
        control.agent_ended(site, f"the agent of site {site} ended with {how}", str(log_path))

    bounding: asyncio.Task[None] | None = None
    try:
        if settings.is_embedded:
            bounding = asyncio.create_task(bound(log_path), name="log")
            await agents.start(
                settings.agents,
                address=address,
                topology=settings.topology,
                state=settings.state,
                on_end=on_end,
                may_restart=lambda: (
                    control.runs.latest is not None and control.runs.latest.restarts_agents
                ),
            )
        yield
    finally:
        await agents.stop()
        if bounding is not None:
            bounding.cancel()


def _fault_plan(settings: Settings, agents: LocalAgents) -> FaultPlan | None:
    if settings.faults is None:
        return None
    return FaultPlan(script=settings.faults, seed=settings.seed, agent_pid=agents.pid)


@contextmanager
def _own_lines_kept(control: Control) -> Iterator[None]:
    """Have what this process logs be among the logs of the run that is going on."""
    handler = OwnLines(lambda: control.runs.latest)
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


@contextmanager
def _announced(state: Path, address: str, generation: int) -> Iterator[None]:
    """Keep this coordinator's address in the state folder for as long as it listens."""
    path = state / ANNOUNCED
    announced = {"address": address, "pid": os.getpid(), "generation": generation}
    write_atomically(path, json.dumps(announced) + "\n")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _failed(options: argparse.Namespace, code: str, message: str) -> int:
    """Print what went wrong, for people and with --json for programs; return the exit status."""
    entry = CATALOGUE[code]
    if options.json:
        print(failure(COMMAND, code, message))  # noqa: T201
    print(f"error: {message}\nhint: {entry.hint}", file=sys.stderr)  # noqa: T201
    return int(entry.exit_code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="isthmus coordinator", description="Start runs at all sites together, and end them."
    )
    parser.add_argument("--topology", required=True, type=Path, metavar="FILE")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE")
    parser.add_argument("--state", required=True, type=Path, metavar="DIR", help="the journal's")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="of run folders [STATE/runs]")
    parser.add_argument("--bind", type=_endpoint, metavar="HOST:PORT", help="port 0: any")
    parser.add_argument(
        "--embedded", action="store_true", help="also run all agents, for one run, then end"
    )
    parser.add_argument(
        "--site",
        action="append",
        default=[],
        metavar="NAME",
        help="with --embedded: a site that has an agent [all]; may be repeated",
    )
    parser.add_argument(
        "--faults", type=Path, metavar="FILE", help="fault script of an embedded, emulated run"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="of the fault script [its own]")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    return parser


def _endpoint(text: str) -> Endpoint:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"want HOST:PORT, got {text!r}")
    return Endpoint(host=host.strip("[]"), port=int(port))


if __name__ == "__main__":
    sys.exit(main())
