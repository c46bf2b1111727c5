"""The emulated WAN of a run: one emulator process, and the faults that are played on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.core.run_events import Endpoint, Namespace
from orchestrator.emulator.backend import (
    NETNS,
    RELAY,
    Backend,
    Counters,
    EmulatorError,
    parse_ready,
)
from orchestrator.emulator.emulator_config import (
    NetnsConfig,
    RelayConfig,
    RelayEndpoint,
    dialled,
    parse_listening,
    shapes_of,
)
from orchestrator.emulator.fault_player import FaultPlayer, needs_relay
from orchestrator.emulator.site_namespaces import netns_problem
from protos import metrics
from topology.errors import ConfigError
from topology.faults.script import Change, FaultScript, Pause, TimedChange
from topology.world import Topology

COUNTERS_KEPT_EVERY_S = 5.0
"""They come each second, which would be most of a long run's metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """What is to happen to the WAN and the sites of a run."""

    script: FaultScript
    seed: int | None
    """Instead of the script's own."""
    pause: Callable[[Pause], None]
    """Stops a site's processes, or lets them go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listeners:
    """Who is told of what happens to a WAN."""

    on_end: Callable[[str], None]
    """The emulator ended before `close`; how."""
    on_fault: Callable[[TimedChange], None]
    """A fault's change was made."""
    on_metrics: Callable[[Sequence[dict[str, Any]]], None]
    """Records of the kinds `fault` and `emulated_link`, without the run's name."""


class NamespacesRefusedError(Exception):
    """The WAN cannot be emulated packet by packet; the message says why."""


class Wan:
    """Owns at most one emulator, from an `open_…` to `close`."""

    def __init__(
        self, topology: Topology, start_s: float, plan: FaultPlan | None, listeners: Listeners
    ) -> None:
        """Start nothing yet.

        Args:
            topology: whose links are emulated.
            start_s: how long an emulator may take until it is up.
            plan: what to play on it.
            listeners: told from the event loop.
        """
        self._topology = topology
        self._start_s = start_s
        self._plan = plan
        self._listeners = listeners
        self._backend: Backend | None = None
        self._playing: asyncio.Task[None] | None = None
        self._counters_kept_s = 0.0
        self._seed = 0
        if plan is not None:
            self._seed = plan.script.seed if plan.seed is None else plan.seed

    async def open_namespaces(self) -> Mapping[str, Namespace]:
        """Emulate packets; return the namespace of each site.

        Raises:
            NamespacesRefusedError: it cannot be done here, or not with these faults.
            EmulatorError: the emulator did not come up.
        """
        why = needs_relay(self._plan.script.faults) if self._plan else None
        why = why or await asyncio.to_thread(netns_problem)
        if why is not None:
            raise NamespacesRefusedError(why)
        try:
            config = NetnsConfig(
                sites=tuple(site.name for site in self._topology.sites),
                links=shapes_of(self._topology),
                seed=self._seed,
            )
        except ConfigError as error:
            raise NamespacesRefusedError(error.problems[0].message) from error
        line = await self._start(NETNS, config.to_json())
        return {
            each.site: Namespace(user=each.user, net=each.net, address=each.address)
            for each in parse_ready(line)
        }

    async def open_relay(self, listening: Iterable[Endpoint]) -> Mapping[str, tuple[Endpoint, ...]]:
        """Emulate connections; return where each site dials the others' gateways.

        Args:
            listening: the gateways.

        Raises:
            EmulatorError: the relay did not come up.
        """
        config = RelayConfig(
            links=shapes_of(self._topology),
            endpoints=dialled(self._topology, listening),
            seed=self._seed,
        )
        line = await self._start(RELAY, config.to_json())
        try:
            return _books(parse_listening(line))
        except ConfigError as error:
            raise EmulatorError(error.problems[0].message) from error

    def play(self) -> None:
        """Begin with the faults; their times count from now. A second call changes nothing."""
        if self._plan is not None and self._playing is None:
            player = FaultPlayer(self._plan.script, self._plan.seed, self, self._played)
            self._playing = asyncio.create_task(player.play(), name="faults")

    async def apply(self, changes: Sequence[Change]) -> None:
        """Change links, all at once; EmulatorError when the emulator is gone."""
        assert self._backend is not None, "faults begin after the WAN is open"
        await self._backend.apply(changes)

    def pause(self, pause: Pause) -> None:
        """Stop a site's processes, or let them go on."""
        assert self._plan is not None
        self._plan.pause(pause)

    async def close(self) -> None:
        """End the faults and the emulator; return when it is gone. Idempotent."""
        if self._playing is not None:
            self._playing.cancel()
            await asyncio.wait([self._playing])
        if self._backend is not None:
            await self._backend.close()
            self._keep(self._backend.counters)  # those of the end: it says them when it is told
            self._backend = None

    async def _start(self, module: str, config: Mapping[str, Any]) -> bytes:
        deadline_s = asyncio.get_running_loop().time() + self._start_s
        self._backend, line = await Backend.start(module, config, deadline_s)
        self._backend.on_counters = self._keep_now_and_then
        self._backend.watch(self._listeners.on_end)
        return line

    def _played(self, timed: TimedChange) -> None:
        self._listeners.on_fault(timed)
        change = timed.change
        labels = {key: str(value) for key, value in change.to_json().items() if key != "kind"}
        figures = change.figures() if isinstance(change, Change) else {}
        labels = {key: value for key, value in labels.items() if key not in figures}
        self._listeners.on_metrics(
            [
                {
                    "kind": metrics.FAULT,
                    "values": {metrics.AT_S: timed.at_s, **figures},
                    "labels": {"what": change.to_json()["kind"], **labels},
                }
            ]
        )

    def _keep_now_and_then(self, counters: Counters) -> None:
        if time.monotonic() - self._counters_kept_s >= COUNTERS_KEPT_EVERY_S:
            self._keep(counters)

    def _keep(self, counters: Counters) -> None:
        self._counters_kept_s = time.monotonic()
        self._listeners.on_metrics(
            [
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
            ]
        )


def _books(endpoints: Iterable[RelayEndpoint]) -> dict[str, tuple[Endpoint, ...]]:
    """Return the address book of each dialling site."""
    books: dict[str, tuple[Endpoint, ...]] = {}
    for each in endpoints:
        endpoint = Endpoint(each.target, each.node, each.host, each.port)
        books[each.source] = (*books.get(each.source, ()), endpoint)
    return books
