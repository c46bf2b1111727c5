"""Keeps an active run's plan fit for its links.

`Replanning` carries out what orchestrator/core/replan_machine.py decides. `Replanner` has plans
made, each in a process of its own (replan_process.py) that is gone afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from isthmus.orchestrator.coordinator.journal import JournalError
from isthmus.orchestrator.coordinator.replan_question import Divided, Drifted, Question
from isthmus.orchestrator.core import replan_machine
from isthmus.orchestrator.core.event_kinds import EventKind
from isthmus.orchestrator.core.replan_machine import (
    PlanAgain,
    PlanningFailed,
    RelaunchPlanned,
    ReplanMachine,
    SwitchPlanned,
)
from isthmus.orchestrator.core.run_events import RecordEvent, TreesWanted
from isthmus.protos import metrics
from isthmus.protos.control.v1 import control_pb2
from isthmus.protos.errors import RemoteProtocolError
from isthmus.protos.failure import reason_of
from isthmus.protos.own_processes import leashed, own_command
from isthmus.topology.spec.epoch import Epoch
from isthmus.topology.spec.json_lines import Kinds, line_of
from isthmus.topology.spec.run_spec import RunSpec
from isthmus.topology.spec.world import Topology

MODULE = "isthmus.orchestrator.coordinator.replan_process"
PLAN_S = 300.0
"""Sixteen sites take half a minute."""
LINE_BYTES = 4 << 20

log = logging.getLogger(__name__)

Answer = SwitchPlanned | RelaunchPlanned | PlanningFailed
_ANSWERS: Kinds[Answer] = Kinds("replanning to coordinator", Answer, RemoteProtocolError)
Record = Callable[[EventKind, str, dict[str, Any]], None]
"""Writes an event: kind, site, detail."""


class Replanning:
    """Watches one run's links and sites, and asks for other plans, until `close`."""

    def __init__(
        self,
        spec: RunSpec,
        epoch: Epoch,
        planner: Replanner,
        *,
        record: Record,
        want: Callable[[TreesWanted], None],
    ) -> None:
        """Begin to watch.

        Args:
            spec: The run; its plan may be made again.
            epoch: What it has by now.
            planner: Tells `handle`; closed with this.
            record: In the journal.
            want: Asks for other trees; `handle` is told what came of it.
        """
        self._machine = ReplanMachine(spec, epoch)
        self._planner, self._record, self._want = planner, record, want

    def handle(self, event: replan_machine.Event) -> None:
        """Let the core decide on an event, and do what it says.

        Raises:
            JournalError: it cannot be written down.
        """
        for action in self._machine.handle(event, time.monotonic()):
            match action:
                case RecordEvent():
                    self._record(action.kind, action.site, dict(action.detail))
                case PlanAgain():
                    self._planner.plan(action)
                case TreesWanted():
                    self._want(action)

    async def close(self) -> None:
        """End what plans. Idempotent."""
        await self._planner.close()


def link_reported(site: str, metric: control_pb2.Metric) -> replan_machine.LinkReported | None:
    """Return what a site's metric says of one of its links; None if it is of another kind."""
    labels = metric.labels
    if metric.kind != metrics.LINK or labels.get("source") != site:
        return None
    target, gateway = labels.get("target", ""), labels.get("gateway", "")
    return replan_machine.LinkReported(site, target, gateway, dict(metric.values))


def step_reported(site: str, metric: control_pb2.Metric) -> replan_machine.SiteStepped | None:
    """Return what a site's metric says of one of its steps; None if it is of another kind."""
    if metric.kind != metrics.STEP:
        return None
    return replan_machine.SiteStepped(site, dict(metric.values))


class Replanner:
    """Plans one run again, whenever asked. Owns at most one process, until `close`."""

    def __init__(
        self, spec: RunSpec, described: Topology, on_answer: Callable[[Answer], None]
    ) -> None:
        """Start nothing.

        Args:
            spec: The run.
            described: All sites, those that take no part included.
            on_answer: Told from the event loop.
        """
        self._spec = spec
        self._described = described
        self._on_answer = on_answer
        self._planning: asyncio.Task[None] | None = None

    def plan(self, asked: PlanAgain) -> None:
        """Begin to plan; what is still being planned is given up."""
        if self._planning is not None:
            self._planning.cancel()
        self._planning = asyncio.create_task(self._plan(asked), name="replan")

    async def close(self) -> None:
        """End the process, if there is one. Idempotent."""
        if self._planning is not None:
            self._planning.cancel()
            await asyncio.wait([self._planning])

    async def _plan(self, asked: PlanAgain) -> None:
        try:
            async with asyncio.timeout(PLAN_S):
                why = await self._read_answers(asked)
        except TimeoutError:
            why = f"it took longer than {PLAN_S:g} s"
        except OSError as error:
            why = f"no process for it: {error.strerror or error}"
        except JournalError:
            return  # whoever lets time pass raises it
        except Exception as error:
            log.exception("a plan was not made again, by a mistake of ours")
            why = reason_of(error)
        if why:
            self._on_answer(PlanningFailed(why=why))

    async def _read_answers(self, asked: PlanAgain) -> str:
        """Pass on what the process says; return why it said no more, or nothing."""
        process = await asyncio.create_subprocess_exec(
            *leashed(own_command(MODULE)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_BYTES,
        )
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(line_of(self._question(asked)))
            process.stdin.close()
            why, is_answered = "", False
            while line := await process.stdout.readline():
                answer = _ANSWERS.read(line)
                why = answer.why if isinstance(answer, PlanningFailed) else ""
                if not why:
                    is_answered = True
                    self._on_answer(answer)
            status = await process.wait()
            if status or not is_answered:  # or whoever asked would wait for ever
                why = why or f"its process ended with status {status}"
            return why
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _question(self, asked: PlanAgain) -> Question:
        division, members = asked.division, asked.epoch.members
        return Question(
            division=None
            if division is None
            else Divided(
                parts=tuple(division.members[name] for name in members),
                compute_s=tuple(division.compute_s[name] for name in members),
            ),
            spec=self._spec,
            described=self._described,
            epoch=asked.epoch,
            dead_links=tuple(sorted(asked.dead_links)),
            drifted=tuple(
                Drifted(source=source, target=target, figures=figures)
                for (source, target), figures in asked.figures.items()
            ),
            keeps_codecs=asked.keeps_codecs,
            at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
