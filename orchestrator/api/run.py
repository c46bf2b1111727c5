"""Runs, in Python: what scripts and notebooks launch, look at, wait for and cancel."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.orchestrator.api.checkpoint_request import saved
from isthmus.orchestrator.api.errors import CommandError
from isthmus.orchestrator.api.launching import job_of_script, prepared
from isthmus.orchestrator.client.coordinator_client import Client
from isthmus.orchestrator.client.run_reader import reading
from isthmus.orchestrator.documents import load_pair
from isthmus.orchestrator.plans import plan_of
from isthmus.orchestrator.run_folder.home import RunChoice, home_folder
from isthmus.orchestrator.runs.facts import to_json
from isthmus.orchestrator.runs.told_facts import told_sites, told_totals
from isthmus.protos.catalogue import CATALOGUE
from isthmus.protos.control.v1 import control_pb2

SUFFIXES = frozenset({".yaml", ".yml"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteStatus:
    """One site of a run, as it was when it was asked for."""

    name: str
    state: str
    """ABSENT, JOINED, PREPARED, STARTING, RUNNING, ENDED, LOST, RETURNING or DROPPED."""
    host: str
    step: int
    figures: Mapping[str, Any]
    """Figures of the site over the run, as `status --json` has them: `tokens_per_s`, `step_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A run, as it was when it was asked for."""

    id: str
    name: str
    state: str
    """QUEUED, FORMING, ACTIVE, STOPPING, SUCCEEDED, FAILED or CANCELLED."""
    step: int
    """Steps of the site that is furthest."""
    num_steps: int
    """Steps that the job makes; 0: its script decides."""
    loss: float | None
    sites: Sequence[SiteStatus]
    totals: Mapping[str, float | None]
    """Figures of the whole run, as `status --json` has them: `tokens`, `sent_bytes`."""
    notes: Sequence[str]
    """What people should know of it, a line each, as that a site was lost."""
    reason_code: str
    """Why it ended badly or with losses, by its code in errors.md; empty: it did not."""
    reason: str

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self.state in {"SUCCEEDED", "FAILED", "CANCELLED"}

    @classmethod
    def of(cls, run: control_pb2.Run) -> RunStatus:
        """Return what a coordinator's message says."""
        totals = told_totals(run)
        return cls(
            id=run.run_id,
            name=run.name,
            state=control_pb2.RunState.Name(run.state).removeprefix("RUN_STATE_"),
            step=max((site.step for site in run.sites), default=0),
            num_steps=run.num_steps,
            loss=totals["loss"],
            sites=tuple(
                SiteStatus(
                    name=site.site,
                    state=control_pb2.SiteState.Name(site.state).removeprefix("SITE_STATE_"),
                    host=site.host,
                    step=site.step,
                    figures=to_json(facts),
                )
                for site, facts in zip(run.sites, told_sites(run), strict=True)
            ),
            totals=totals,
            notes=(*(note.text for note in run.noted), *run.notes),
            reason_code=run.reason_code,
            reason=run.reason,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a run, from its journal."""

    sequence: int
    wall_s: float
    """Unix time."""
    kind: str
    site: str
    """Empty: the run as a whole."""
    text: str
    """What people read of it."""
    detail: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line that a rank, gateway or agent has written."""

    site: str
    source: str
    """rank0, gateway0, torchrun0 or agent."""
    wall_s: float
    """Unix time at the site; 0: not known."""
    text: str


class RunFailedError(CommandError):
    """A run has failed; `code` and the message are those of what broke first."""


class Run:
    """A run of a coordinator, or one that has ended and whose files are here.

    `isthmus.launch` and `isthmus.connect` make it. Any number may be of the same run.
    """

    def __init__(
        self,
        id: str = "",  # noqa: A002 - as it is called everywhere
        *,
        home: str | Path | None = None,
        coordinator: str | None = None,
    ) -> None:
        """Find a run.

        Args:
            id: Its id; empty: the latest.
            home: Where runs are kept; None: `$ISTHMUS_HOME`, else the user's state folder.
            coordinator: host:port; None: the one that the run was launched with.

        Raises:
            IsthmusError: there is no such run, or its coordinator does not answer.
        """
        place = _home(home)
        self._choice = RunChoice(run_id=id, home=place, coordinator=coordinator)
        with reading(self._choice) as reader:
            self.id = reader.run_id or reader.get().run_id
        self._choice = RunChoice(run_id=self.id, home=place, coordinator=coordinator)

    def __repr__(self) -> str:
        return f"<isthmus.Run {self.id}>"

    def status(self) -> RunStatus:
        """Return the run as it is now."""
        with reading(self._choice) as reader:
            return RunStatus.of(reader.get())

    def wait(self, timeout_s: float | None = None) -> RunStatus:
        """Return the run once it has ended well, perhaps with losses (`reason_code`).

        Raises:
            DeadlineExceededError: it has not ended after `timeout_s`; it goes on.
            RunFailedError: it has failed, or was cancelled.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with reading(self._choice) as reader:
            *_, run = reader.watch(deadline_s)
        if run.state == control_pb2.RUN_STATE_SUCCEEDED:
            return RunStatus.of(run)
        is_cancelled = run.state == control_pb2.RUN_STATE_CANCELLED
        code = "CANCELLED" if is_cancelled else run.reason_code
        code = code if code in CATALOGUE else "RANK_EXITED"
        raise RunFailedError(code, run.reason or CATALOGUE[code].message, {"run_id": run.run_id})

    async def wait_async(self, timeout_s: float | None = None) -> RunStatus:
        """Return the run once it has ended well; other tasks of the event loop go on meanwhile."""
        return await asyncio.to_thread(self.wait, timeout_s)

    def events(self, *, follow: bool = False) -> Iterator[Event]:
        """Yield what has happened to the run; with `follow` until it has ended."""
        with reading(self._choice) as reader:
            for event in reader.events(follow=follow):
                yield Event(
                    sequence=event.sequence,
                    wall_s=event.wall_s,
                    kind=event.kind,
                    site=event.site,
                    text=event.text,
                    detail=event.detail,
                )

    def logs(
        self, *, follow: bool = False, site: str = "", rank: int | None = None, tail: int = 0
    ) -> Iterator[LogLine]:
        """Yield log lines; with `follow` until the run has ended.

        Args:
            follow: Wait for more.
            site: Only of this site; empty: of all.
            rank: Only of this rank of a site; None: of everything.
            tail: Only the last so many lines of each source; 0: all.
        """
        with reading(self._choice) as reader:
            lines = reader.logs(
                follow=follow, site=site, rank=-1 if rank is None else rank, tail=tail
            )
            for line in lines:
                yield LogLine(
                    site=line.site, source=line.source, wall_s=line.wall_s, text=line.text
                )

    @property
    def losses(self) -> Any:  # noqa: ANN401 - a DataFrame where pandas is there
        """The training loss over all sites by step.

        A pandas DataFrame with the columns `step` and `loss`; a list of pairs where pandas is not
        installed. Of a run whose folder is on another machine there are 40 points at most.
        """
        with reading(self._choice) as reader:
            run = reader.get()
        pairs = self._facts().loss.losses or _curve(run)
        if importlib.util.find_spec("pandas") is None:
            return list(pairs)
        import pandas as pd

        return pd.DataFrame(list(pairs), columns=["step", "loss"])

    def cancel(self, *, checkpoint: bool = False, timeout_s: float = 120.0) -> str:
        """Stop the run at all sites; one that has ended stays as it is.

        Args:
            checkpoint: Have all sites write a checkpoint first.
            timeout_s: Stop it after this long with the last checkpoint there is.

        Returns:
            What came of the checkpoint, in words.
        """
        answer = ""
        with reading(self._choice) as reader:
            if checkpoint:
                assert self._choice.home is not None
                answer = saved(reader, self._choice.home, time.monotonic() + timeout_s)
            reader.cancel()
        return answer

    def report(self, to: str | Path) -> Path:
        """Write the run's report, one page that loads nothing from elsewhere; return its path."""
        from isthmus.orchestrator.evidence.report.page import page
        from isthmus.protos.versions import build

        path = Path(to).absolute()
        path.write_text(page([self._facts()], [], build()), encoding="utf-8")
        return path

    def _facts(self) -> Any:  # noqa: ANN401 - imported where it is used: it takes a while
        from isthmus.orchestrator.evidence.record.run_record import read_run_record
        from isthmus.orchestrator.evidence.report.run_facts import run_facts

        return run_facts(read_run_record(self._choice))

    def _repr_html_(self) -> str:
        """Draw the first screen of the report, for notebooks."""
        from isthmus.orchestrator.evidence.report.page import first_screen

        return first_screen(self._facts())


class Coordinator:
    """A coordinator that `isthmus up` or `isthmus coordinator` has started."""

    def __init__(self, address: str, *, home: str | Path | None = None) -> None:
        """Connect to host:port.

        Raises:
            IsthmusError: nothing answers there.
        """
        self.address = address
        self._home = _home(home)
        self.runs()

    def __repr__(self) -> str:
        return f"<isthmus.Coordinator {self.address}>"

    def runs(self) -> list[RunStatus]:
        """Return the runs that it knows, newest first."""
        with Client(self.address) as client:
            return [RunStatus.of(run) for run in client.list_runs()]

    def run(self, id: str = "") -> Run:  # noqa: A002 - as it is called everywhere
        """Return a run; without an id the latest."""
        return Run(id, home=self._home, coordinator=self.address)

    def launch(self, job: str | Path, **options: Any) -> Run:  # noqa: ANN401 - those of `launch`
        """Launch a job here; `options` are those of `isthmus.launch`."""
        return launch(job, coordinator=self.address, home=self._home, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What `isthmus plan` decides for a job."""

    why: Sequence[str]
    """In words, the most important first."""
    predicted: Mapping[str, Any]
    decisions: Mapping[str, Any]
    alternatives: Sequence[Mapping[str, Any]]
    text: str
    """The plan as a file, for `launch(plan=…)`."""


def launch(
    job: str | Path,
    *,
    sites: int = 2,
    ranks: int = 1,
    topology: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    arguments: Sequence[str] = (),
    coordinator: str | None = None,
    plan: str | Path | None = None,
    resume: str | None = None,
    allow_cpu: bool = False,
    run_id: str | None = None,
    priority: int = 0,
    home: str | Path | None = None,
    say: Callable[[str], object] = print,
) -> Run:
    """Start a job at all sites, and return the run, which goes on by itself.

    Args:
        job: A job file, or a script: then there are `sites` sites on this machine.
        sites: Sites for a script.
        ranks: Ranks of each of them.
        topology: The topology's file; None: the one that the job names.
        settings: Changes of either document by path, as `{"trainer.steps": 100}`.
        arguments: More for the script, after the job's own.
        coordinator: host:port; None: that of `isthmus up` for the topology, else one is started
            on this machine, with all sites.
        plan: File of a plan to carry out.
        resume: The run, or the path of a checkpoint, to go on from; empty: the latest run.
        allow_cpu: Train on CPUs where the topology has an accelerator and a machine has none.
        run_id: Names the run; the same again is the same run. None: a new name.
        priority: Of runs that wait for the same sites, the highest begins first.
        home: Where runs are kept; None: `$ISTHMUS_HOME`, else the user's state folder.
        say: Called with each line about what is done: warnings, what is carried, the plan.

    Raises:
        ConfigError: a document, or a file that it names, is wrong; with line and column.
        IsthmusError: the machine cannot run it, or the coordinator refuses or does not answer.
    """
    place, path = _home(home), Path(job)
    if path.suffix not in SUFFIXES:
        path = job_of_script(path, place, sites=sites, ranks=ranks)
    made = prepared(
        path,
        place,
        say,
        topology=None if topology is None else Path(topology),
        overrides=[f"{name}={json.dumps(value)}" for name, value in (settings or {}).items()],
        arguments=arguments,
        coordinator=coordinator,
        plan=None if plan is None else Path(plan),
        resume=resume,
        allow_cpu=allow_cpu,
        run_id=run_id,
    )
    made.submit(say, priority=priority)
    return Run(made.run_id, home=place)


def connect(address: str, *, home: str | Path | None = None) -> Coordinator:
    """Return the coordinator at host:port.

    Raises:
        IsthmusError: nothing answers there.
    """
    return Coordinator(address, home=home)


def plan(job: str | Path, *, topology: str | Path | None = None) -> Plan:
    """Decide which sites run a job, what each computes, and how gradients cross.

    Raises:
        ConfigError: a document is wrong, or there is no plan.
    """
    from isthmus.topology.planner.document import plan_text

    pair = load_pair(Path(job), (), None if topology is None else Path(topology), to_plan=True)
    made = plan_of(pair)
    return Plan(
        why=tuple(made["why"]),
        predicted=made["predicted"],
        decisions=made["decisions"],
        alternatives=tuple(made["alternatives"]),
        text=plan_text(made),
    )


def _home(given: str | Path | None) -> Path:
    given = given or os.environ.get("ISTHMUS_HOME")
    return home_folder(None if given is None else Path(given))


def _curve(run: control_pb2.Run) -> list[tuple[int, float]]:
    """Return the curve that a coordinator tells, with steps as far apart as it has points."""
    last = max((site.step for site in run.sites), default=0)
    num = len(run.loss_curve)
    return [(round(last * (at + 1) / num), loss) for at, loss in enumerate(run.loss_curve)]
