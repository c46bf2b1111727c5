"""Processes that run scripts of the conformance suite: one a rank, and one that has all data.

They live on from case to case, for a process costs more than a case. Who has met an error ends, as
a script's process does, and is replaced. Gateways are real; they run in this process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import io
import os
import re
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import isthmus
from isthmus.orchestrator.core.parameter_digests import DigestComparison
from isthmus.orchestrator.core.same_data import SameDataWatch
from isthmus.orchestrator.core.step_comparison import StepComparison, StepEnd
from isthmus.protos import metrics
from isthmus.protos.checkpoint.store import checkpoint_name
from isthmus.sites.gateway.agent_port import Said
from isthmus.sites.local.rank_messages import Digest, Metric
from isthmus.sites.node.gateway_configs import gateway_config
from tests.conformance.case import EQUAL, FINITE, STEPS, Case, Kind, Refused, Way
from tests.conformance.coordinated import Coordinated
from tests.conformance.registry import CASES
from tests.conformance.world import OneProcess, World, learnt
from tests.fakes.gateway_sites import Member, gateways
from tests.fakes.marked_processes import MarkedProcesses
from tests.fakes.ranks import environment, run_spec

ORACLE = "one process"
WAITS = "waits"
TOLERANCE = 1e-5
"""Sums of float32 in another order, carried through a few steps."""
STACKS_S = 2.0
"""By then a process that hangs has written its stacks."""
ENDS_S = 10.0
"""By then a process is gone that was killed."""
LOOK_S = 0.1
"""Between two looks at what gateways say."""
OTHERS_S = 1.5
"""So long after an error the other ranks may still say theirs. They may wait for a coordinator, who
would end them, or go on without that site."""
_PRELOADED = ["tests.conformance.pool", "torch._dynamo"]


@dataclass(frozen=True, slots=True)
class End:
    """How a process came to the end of a case."""

    learnt: Mapping[str, torch.Tensor] = field(default_factory=dict)
    losses: Sequence[float] = ()
    error: str = ""
    """The type of an exception; empty: it ended well."""
    code: str = ""
    """Of an error of isthmus's."""
    text: str = ""
    trace: str = ""


class Worker:
    """One process that waits for cases."""

    def __init__(self, folder: Path, name: str, readers: MarkedProcesses) -> None:
        """Start it. What it starts itself is marked as one of `readers`."""
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self.name = name
        self.stacks = folder / f"{name}.stacks"
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self.stacks, readers))
        self._process.start()
        theirs.close()

    @property
    def is_alive(self) -> bool:
        """Whether it waits for more."""
        return self._process.is_alive()

    def begin(self, job: Mapping[str, Any]) -> None:
        """Have it run a case."""
        self.pipe.send(job)

    def end(self) -> End:
        """Return how it ended, now that it says so, or is gone."""
        try:
            written = self.pipe.recv_bytes()
        except (EOFError, OSError):
            self._process.join(ENDS_S)
            return End(error="died", text=f"exit status {self._process.exitcode}")
        return End(**torch.load(io.BytesIO(written), weights_only=True))

    def hung(self) -> End:
        """Return where it hangs, and end it."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGUSR1)
        deadline_s = time.monotonic() + STACKS_S
        while time.monotonic() < deadline_s and not _text(self.stacks):
            wait([self._process.sentinel], 0.05)
        self.close()
        return End(error="hangs", text="it has not ended", trace=_text(self.stacks))

    def close(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.join(ENDS_S)
        self.pipe.close()


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


class Pool:
    """The workers of a session."""

    def __init__(self, folder: Path) -> None:
        """Start nobody yet."""
        self._folder = folder
        self._workers: dict[str, Worker] = {}
        self._readers = MarkedProcesses()
        """Of data loaders, which may outlive a rank that is killed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._workers.values():
            each.close()
        self._readers.kill()

    def run(self, case: Case, way: Way, folder: Path, kind: Kind = "sync") -> dict[str, End]:
        """Run a case to its end at all ranks, and in one process; return how each ended."""
        settings = case.settings(kind)
        if case.resumes_at is None:
            return self._run_once(case, way, folder, settings, kind)
        store = folder / "store"
        saves = [f"checkpoint.to={store}", "checkpoint.every=1 steps", f"checkpoint.keep={STEPS}"]
        (folder / "first").mkdir()
        ends = self._run_once(case, way, folder / "first", [*settings, *saves], kind)
        if any(each.error for each in ends.values()):
            return ends
        (folder / "second").mkdir()
        resumes = f"checkpoint.resume={store / 'run' / checkpoint_name(case.resumes_at)}"
        return self._run_once(case, way, folder / "second", [*settings, *saves, resumes], kind)

    def _run_once(
        self, case: Case, way: Way, folder: Path, settings: Sequence[str], kind: Kind
    ) -> dict[str, End]:
        job = [*settings, "exchange.codec=fp32"]
        spec = run_spec(case.ranks, job)
        configs = [
            dataclasses.replace(
                gateway_config(
                    spec,
                    run_id="run",
                    generation=1,
                    config_hash="hash",
                    site=name,
                    gateway=0,
                    bind_host="127.0.0.1",
                    socket_path=str(folder / name),
                ),
                verify_every=1,
            )
            for name in spec.site_names
        ]
        with gateways(configs) as members:
            for member in members:
                member.wait("connected")
            coordinated = Coordinated(spec, members)
            ends = self._run(case, way, folder, job, coordinated, kind)
            for member in members:
                member.gateway.stop()
                member.end()
        self._readers.kill()
        verdict = verdict_of(members, case, way, kind)
        is_wrong = bool(coordinated.early) is not bool(case.early_ranks)
        if is_wrong and kind == "sync" and verdict is None:  # else a round may come after the end
            verdict = End(error="early", text=f"{coordinated.early}")
        return ends | ({"coordinator": verdict} if verdict is not None else {})

    def _run(
        self,
        case: Case,
        way: Way,
        folder: Path,
        settings: Sequence[str],
        coordinated: Coordinated,
        kind: Kind,
    ) -> dict[str, End]:
        twin_ranks = case.ranks[0] if has_twins(kind, case, way) else 0
        job: dict[str, Any] = {
            "case": case.name,
            "way": way,
            "num_ranks": twin_ranks or sum(case.ranks),
            "twin_ranks": twin_ranks,
        }
        # All before the first one begins: each writes the file that ranks read.
        environs = [
            environment(folder, site, rank, case.ranks, folder / f"site{site}", settings)
            for site, num_ranks in enumerate(case.ranks)
            for rank in range(num_ranks)
        ]
        running = {}
        for place, environ in enumerate(environs):
            name = f"rank {place}"
            # torch keeps what it has made of a mesh, and takes a process for the rank it was then.
            own = f"{environ['RANK']} of {environ['WORLD_SIZE']}"
            running[name] = self._worker(f"{name}, {own} of its site")
            running[name].begin({**job, "rank": place, "environ": environ})
        running[ORACLE] = self._worker(ORACLE)
        running[ORACLE].begin({**job, "rank": -1, "environ": {}})
        return self._ends(running, case.within_s, coordinated)

    def _ends(
        self, running: dict[str, Worker], within_s: float, coordinated: Coordinated
    ) -> dict[str, End]:
        ends: dict[str, End] = {}
        has_failed = False
        deadline_s = time.monotonic() + within_s
        while running:
            left_s = max(0.0, deadline_s - time.monotonic())
            ready = wait([each.pipe for each in running.values()], min(left_s, LOOK_S))
            coordinated.look()
            if not ready and left_s > LOOK_S:
                continue
            for name, each in [*running.items()]:
                if not ready and has_failed:
                    each.close()
                    ends[name] = End(error=WAITS, text="a coordinator would end it")
                elif not ready:
                    ends[name] = each.hung()
                elif each.pipe in ready:
                    ends[name] = each.end()
                    if ends[name].error:
                        each.close()
                        has_failed = True
                        deadline_s = min(deadline_s, time.monotonic() + OTHERS_S)
                if name in ends:
                    del running[name]
        return ends

    def _worker(self, name: str) -> Worker:
        if name not in self._workers or not self._workers[name].is_alive:
            self._workers[name] = Worker(self._folder, name, self._readers)
        return self._workers[name]


def has_twins(kind: Kind, case: Case, way: Way) -> bool:
    """Whether all sites have the same data, and train as one of them does by itself."""
    return kind == "diloco" and EQUAL in case.outcomes(kind, way)


def verdict_of(members: Sequence[Member], case: Case, way: Way, kind: Kind) -> End | None:
    """Return the error that a coordinator makes of what gateways tell their agents, if any."""
    ranks = {member.config.site: num for member, num in zip(members, case.ranks, strict=True)}
    digests, same_data = DigestComparison(ranks), SameDataWatch()
    comparison = StepComparison()
    sampled: set[str] = set()
    steps = dict.fromkeys(ranks, 0)
    for member in members:
        site = member.config.site
        for told in member.said:
            end = _step_end(site, told)
            unlike = comparison.report(end) if end is not None else None
            if unlike is not None:
                return End(error="STEPS_DIFFER", text=str(unlike))
            if isinstance(told, Digest):
                different = digests.report(
                    site, told.rank, told.step, told.combined, told.tensors, told.names
                )
                if different is not None:
                    return End(error="PARAMETERS_DIFFER", text=str(different))
            if isinstance(told, Metric) and told.kind == metrics.SAMPLER:
                sampled.add(told.labels[metrics.DATA])
            if len(sampled) > 1:
                return End(error="DATA_DIFFERS", text=" and ".join(sorted(sampled)))
            if isinstance(told, Metric) and told.kind == metrics.STEP:
                steps[site] = max(steps[site], told.step)
                same = same_data.report(
                    site, told.step, int(told.values.get(metrics.GRADIENT_HASH, 0))
                )
                if same is not None and same.times > 1 and not has_twins(kind, case, way):
                    return End(error="SAME_DATA", text=str(same))
    # Beside `sync` a step ends with the last optimizer, which may step more rarely.
    is_wrong = {*steps.values()} != {case.steps} if kind == "sync" else len({*steps.values()}) > 1
    if case.steps is not None and is_wrong:
        return End(error="steps", text=f"the run has counted {steps}, want {case.steps}")
    return None


def _step_end(site: str, told: Said) -> StepEnd | None:
    """Return what a message says of the rounds of a step, if it does."""
    match told:
        case Digest(round=int(round_)):
            return StepEnd(site, told.rank, told.step, round_)
        case Metric(kind=metrics.STEP, values=values) if metrics.ROUND in values:
            return StepEnd(site, told.rank, told.step, int(values[metrics.ROUND]))
    return None


def check(case: Case, way: Way, ends: Mapping[str, End], kind: Kind = "sync") -> None:
    """Assert that what had to come of a case has come of it."""
    where = f"{case.name} ({way}, {kind})"
    oracle = ends[ORACLE]
    is_waiting = oracle.error == WAITS and any(each.error for each in ends.values())
    assert is_waiting or not oracle.error, f"{where}: one process fails by itself: {_shown(ends)}"
    outcomes = case.outcomes(kind, way)
    refusals = [each for each in outcomes if isinstance(each, Refused)]
    if any(_is_refusal(end, each) for end in ends.values() for each in refusals):
        return
    holds = next((each for each in outcomes if not isinstance(each, Refused)), None)
    failed = any(each.error for each in ends.values())
    assert not failed, f"{where}: want {outcomes}, got\n{_shown(ends)}"
    assert holds is not None, f"{where}: want {outcomes}, got\n{_shown(ends)}"
    early = {f"rank {each}" for each in case.early_ranks}
    ranks = {name: end for name, end in ends.items() if name not in {ORACLE, *early}}
    expected = oracle if holds == EQUAL else next(iter(ranks.values()))
    for name, end in ranks.items():
        assert end.learnt.keys() == oracle.learnt.keys(), f"{where}: {name}"
        for key, value in expected.learnt.items():
            if holds != EQUAL:
                assert bool(end.learnt[key].isfinite().all()), f"{where}: {key} at {name}"
            if holds != FINITE:
                _assert_close(end.learnt[key], value, f"{where}: {key} at {name}")
    if holds == EQUAL:
        losses = torch.tensor([each.losses for each in ranks.values()]).mean(dim=0)
        _assert_close(losses, torch.tensor(oracle.losses), f"{where}: losses")


def _assert_close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    def message(text: str) -> str:
        return f"{what}: {text}"

    torch.testing.assert_close(
        found, expected, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True, msg=message
    )


def _is_refusal(end: End, holds: Refused) -> bool:
    is_named = any(re.fullmatch(holds.error, each) for each in (end.error, end.code))
    return is_named and re.search(holds.text, end.text) is not None


def _shown(ends: Mapping[str, End]) -> str:
    return "\n".join(
        f"{name}: {end.error or 'ended well'} {end.code}: {end.text}\n{end.trace[-3000:]}"
        for name, end in ends.items()
    )


# ---------------------------------------------------------------- in a worker


def _serve(pipe: Connection, stacks: Path, readers: MarkedProcesses) -> None:
    """Run one case after another; end at the first error, as a script's process does."""
    os.environ.update(readers.env)
    torch.set_num_threads(1)
    with stacks.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        while True:
            try:
                job = pipe.recv()
            except EOFError:
                return
            end = _run_case(CASES[job["case"]], job)
            written = io.BytesIO()
            torch.save(dataclasses.asdict(end), written)
            with contextlib.suppress(OSError):
                pipe.send_bytes(written.getvalue())
            if end.error:
                os._exit(1)


def _run_case(case: Case, job: Mapping[str, Any]) -> End:
    os.environ.update(job["environ"])
    rank = job["rank"]
    torch.manual_seed(max(rank, 0))
    try:
        if rank < 0:
            world = World(job["way"], -1, job["num_ranks"], OneProcess())
            found = learnt(case.oracle(world))
        else:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{os.environ['TEST_STORE']}",
                rank=int(os.environ["RANK"]),
                world_size=int(os.environ["WORLD_SIZE"]),
            )
            site = isthmus.join()
            world = World(
                job["way"], rank, site.global_world_size, site, twin_ranks=job["twin_ranks"]
            )
            found = learnt(case.script(world))
            site.leave()
            dist.destroy_process_group()
    except BaseException as error:  # noqa: BLE001 - it is what the case is about
        return End(
            error=type(error).__name__,
            code=str(getattr(error, "code", "")),
            text=str(error),
            trace=traceback.format_exc(),
        )
    return End(learnt=found, losses=world.losses)
