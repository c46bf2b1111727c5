"""The emulated WAN of one run: opened when the core asks for it, and what it tells."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from orchestrator.coordinator.wan import FaultPlan, Listeners, NamespacesRefusedError, Wan
from orchestrator.core import run_events
from orchestrator.emulator.backend import EmulatorError
from orchestrator.run_folder.home import LOG
from topology.faults.script import Pause, TimedChange
from topology.timeouts import Timeouts
from topology.world import Topology

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
        record: Callable[[str, str, dict[str, Any]], None],
        add_metrics: Callable[[Iterable[Mapping[str, Any]]], None],
    ) -> None:
        """Start nothing.

        Args:
            topology: of the run.
            faults: played from `play` on.
            folder: of the run, where an embedded coordinator's log is.
            handle: told that it is up, that it cannot be, or that it is gone.
            record: an event of the run: kind, site, detail.
            add_metrics: what the emulator has counted.
        """
        self._folder = folder
        self._handle = handle
        self._record = record
        self._opening: asyncio.Task[None] | None = None
        listeners = Listeners(on_end=self._ended, on_fault=self._faulted, on_metrics=add_metrics)
        self._wan = Wan(topology, Timeouts.derive(topology.failure).start_s, faults, listeners)

    def open(self, asked: run_events.OpenNamespaces | run_events.OpenRelay) -> None:
        """Begin to open what the core asks for; it is told what came of it."""
        opening = (
            self._namespaces()
            if isinstance(asked, run_events.OpenNamespaces)
            else self._relay(asked)
        )
        self._opening = asyncio.create_task(self._open(opening), name="open-wan")

    def play(self) -> None:
        """Let the faults' time begin."""
        self._wan.play()

    async def close(self) -> None:
        """Return when the emulator has ended, if there was one."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
        await self._wan.close()

    async def _open(self, opening: Awaitable[run_events.Event]) -> None:
        """Wait for the emulator and tell the core that it is up, or that it is not."""
        try:
            event = await opening
        except (EmulatorError, OSError) as error:
            self._ended(str(error))
        except Exception as error:
            log.exception("the emulated WAN was not opened, by a mistake of ours")
            self._ended(f"{type(error).__name__}: {error}")
        else:
            self._handle(event)

    async def _namespaces(self) -> run_events.Event:
        try:
            return run_events.NamespacesOpened(await self._wan.open_namespaces())
        except NamespacesRefusedError as error:
            return run_events.NamespacesRefused(str(error))

    async def _relay(self, action: run_events.OpenRelay) -> run_events.Event:
        return run_events.RelayOpened(await self._wan.open_relay(action.endpoints))

    def _ended(self, message: str) -> None:
        # What the emulator wrote to stderr is there too, if the run is an embedded one.
        log = self._folder / LOG
        self._handle(run_events.EmulatorEnded(message, str(log) if log.is_file() else ""))

    def _faulted(self, timed: TimedChange) -> None:
        site = timed.change.site if isinstance(timed.change, Pause) else ""
        detail = {"what": str(timed.change), "at_s": timed.at_s, "change": timed.change.to_json()}
        self._record("wan.fault", site, detail)
