"""The emulated WAN of one run: one emulator process, and the faults that are played on it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from isthmus.orchestrator.coordinator.wan import FaultPlan
from isthmus.orchestrator.core import run_events
from isthmus.orchestrator.core.event_kinds import EventKind
from isthmus.orchestrator.core.run_events import Endpoint
from isthmus.orchestrator.emulator.backend import Backend, Counters, EmulatorError
from isthmus.orchestrator.emulator.emulator_config import (
    NetnsConfig,
    RelayConfig,
    RelayEndpoint,
    Up,
    dialled,
    netns_config,
    shapes_of,
)
from isthmus.orchestrator.emulator.fault_files import load_faults_file
from isthmus.orchestrator.emulator.fault_player import FaultPlayer, needs_relay
from isthmus.orchestrator.emulator.site_namespaces import netns_problem
from isthmus.orchestrator.emulator.strikes import strike
from isthmus.orchestrator.run_folder.home import LOG
from isthmus.protos import metrics
from isthmus.protos.failure import reason_of, text_of
from isthmus.topology.faults.script import Change, FaultScript, Kill, Pause, TimedChange
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.timeouts import Timeouts
from isthmus.topology.spec.world import Topology

__all__ = ["RunWan", "load_faults_file"]

COUNTERS_KEPT_EVERY_S = 5.0
"""Interval of recorded counters; all of them, one per second, would dominate a long run's
metrics."""

log = logging.getLogger(__name__)


class RunWan:
    """Owns the emulator, if the topology asks for one, until `close`."""

    def __init__(
        self,
        topology: Topology,
        faults: FaultPlan | None,
        folder: Path,
        *,
        handle: Callable[[run_events.Event], None],
        record: Callable[[EventKind, str, dict[str, Any]], None],
        add_metrics: Callable[[Iterable[Mapping[str, Any]]], None],
    ) -> None:
        """Start nothing yet.

        `handle` is called when the WAN is up, cannot be opened, or is gone. `record` writes an
        event of the run: kind, site, detail. `add_metrics` takes records of the kinds `fault` and
        `emulated_link`, without the run's name.
        """
        self._topology = topology
        self._start_s = Timeouts.derive(topology.failure).start_s
        self._faults = faults
        self._script = cast("FaultScript | None", faults and faults.script)
        self._folder = folder
        self._handle = handle
        self._record = record
        self._add_metrics = add_metrics
        self._backend: Backend | None = None
        self._opening: set[asyncio.Task[None]] = set()
        self._playing: asyncio.Task[None] | None = None
        self._counters_kept_s = 0.0

    def open(self, asked: run_events.OpenNamespaces | run_events.OpenRelay) -> None:
        """Begin to open the emulator that the core asks for; `handle` gets the outcome."""
        if isinstance(asked, run_events.OpenNamespaces):
            opening = self._open(self._open_namespaces())
        elif self._backend is None:
            opening = self._open(self._open_relay(asked.endpoints))
        else:
            opening = self._lead(self._backend, asked.endpoints)
        task = asyncio.create_task(opening, name="open-wan")
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def play(self) -> None:
        """Begin to play the faults; their times count from now. Idempotent."""
        if self._script is not None and self._playing is None:
            assert self._backend is not None, "faults begin after the WAN is open"
            player = FaultPlayer(
                self._script,
                self._seed,
                apply=self._backend.apply,
                strike=self._strike,
                on_played=self._played,
            )
            self._playing = asyncio.create_task(player.play(), name="faults")

    async def close(self) -> None:
        """End the faults and the emulator; return when it is gone. Idempotent."""
        for task in (*self._opening, self._playing):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        if self._backend is not None:
            await self._backend.close()
            self._keep(self._backend.counters)  # the final counters, which it reports when it ends
            self._backend = None

    # ------------------------------------------------------------ opening

    async def _open(self, opening: Awaitable[run_events.Event]) -> None:
        """Wait for the emulator, and report to the core whether it is up."""
        try:
            event = await opening
        except (EmulatorError, OSError) as error:
            self._ended(text_of(error))
        except Exception as error:
            log.exception("the emulated WAN was not opened, by a mistake of ours")
            self._ended(reason_of(error))
        else:
            self._handle(event)

    async def _open_namespaces(self) -> run_events.Event:
        """Emulate packets, if this machine and these faults allow it.

        Raises:
            EmulatorError: the emulator did not come up.
        """
        why = needs_relay(self._script.faults) if self._script else None
        why = why or await asyncio.to_thread(netns_problem)
        if why is not None:
            return run_events.NamespacesRefused(why)
        try:
            config = netns_config(self._topology, self._seed, self._folder)
        except ConfigError as error:
            return run_events.NamespacesRefused(error.problems[0].message)
        up = await self._start(config)
        return run_events.NamespacesOpened({each.site: each for each in up.sites})

    async def _open_relay(self, listening: Sequence[Endpoint]) -> run_events.Event:
        """Emulate connections between the gateways that listen.

        Raises:
            EmulatorError: the relay did not come up.
        """
        config = RelayConfig(
            links=shapes_of(self._topology),
            endpoints=dialled(self._topology, listening),
            seed=self._seed,
        )
        up = await self._start(config)
        return run_events.RelayOpened(_ways(listening, up.endpoints))

    async def _lead(self, relay: Backend, listening: Sequence[Endpoint]) -> None:
        """Make the relay forward to a site's gateways that were started during the run.

        A refusal ends only that attempt.
        """
        try:
            endpoints = dialled(self._topology, listening)
            ways = await relay.lead(endpoints) if endpoints else ()
        except (ConfigError, EmulatorError) as error:
            site, why = listening[0].site, f"the relay does not lead to its gateways: {error}"
            self._handle(run_events.GoOnWithout(site, why))
        else:
            self._handle(run_events.RelayOpened(_ways(listening, ways)))

    @property
    def _seed(self) -> int:
        if self._script is None or self._faults is None:
            return 0
        return self._script.seed if self._faults.seed is None else self._faults.seed

    def _strike(self, fault: Pause | Kill) -> None:
        assert self._faults is not None, "there is a script"
        if (agent_pid := self._faults.agent_pid(fault.site)) is not None:
            strike(agent_pid, fault)

    async def _start(self, config: RelayConfig | NetnsConfig) -> Up:
        deadline_s = asyncio.get_running_loop().time() + self._start_s
        self._backend = await Backend.start(config, deadline_s)
        self._backend.on_counters = self._keep_now_and_then
        self._backend.watch(self._ended)
        return self._backend.up

    # ------------------------------------------------------------ what it tells

    def _ended(self, message: str) -> None:
        # In an embedded run the emulator's stderr is in this file, too.
        path = self._folder / LOG
        self._handle(run_events.EmulatorEnded(message, str(path) if path.is_file() else ""))

    def _played(self, timed: TimedChange) -> None:
        """Record a fault's change as an event of the run, and in its metrics."""
        change = timed.change
        fields = change.to_json()
        site = "" if isinstance(change, Change) else change.site
        detail = {"what": str(change), "at_s": timed.at_s, "change": fields}
        self._record(EventKind.WAN_FAULT, site, detail)
        figures = change.figures() if isinstance(change, Change) else {}
        labels = {
            key: str(value) for key, value in fields.items() if key != "kind" and key not in figures
        }
        self._add_metrics(
            [
                {
                    "kind": metrics.FAULT,
                    "values": {metrics.AT_S: timed.at_s, **figures},
                    "labels": {"what": fields["kind"], **labels},
                }
            ]
        )

    def _keep_now_and_then(self, counters: Counters) -> None:
        if time.monotonic() - self._counters_kept_s >= COUNTERS_KEPT_EVERY_S:
            self._keep(counters)

    def _keep(self, counters: Counters) -> None:
        self._counters_kept_s = time.monotonic()
        self._add_metrics(
            {
                "kind": metrics.EMULATED_LINK,
                "values": {
                    key: float(value)
                    for key, value in link.items()
                    if isinstance(value, int | float)
                },
                "labels": {"source": str(link["source"]), "target": str(link["target"])},
            }
            for link in counters
        )


def _ways(
    listening: Iterable[Endpoint], endpoints: Iterable[RelayEndpoint]
) -> dict[Endpoint, dict[str, Endpoint]]:
    """Return, by gateway and dialling site, the relay's address to dial instead.

    A gateway that accepts no connections has an empty entry.
    """
    ways: dict[Endpoint, dict[str, Endpoint]] = {}
    for gateway in listening:
        ways[gateway] = {
            each.source: Endpoint(each.target, each.gateway, each.host, each.port)
            for each in endpoints
            if (each.target, each.gateway) == (gateway.site, gateway.gateway)
        }
    return ways
