"""The session: which runs are made, what is kept of each, and how an interrupted one goes on."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest

from orchestrator.cli.bench_folder import new_bench
from orchestrator.documents import Pair, load_pair
from orchestrator.evidence.bench.scaling import Ended, Scaling
from orchestrator.evidence.bench.sweep_settings import Planned, Point, load_points
from orchestrator.evidence.record.bench_record import BENCH, Bench, Failed, Run, read_bench
from tests.fakes.benches import a_question
from tests.fakes.measured_runs import MeasuredRuns

TOPOLOGY = """\
version: 1
name: two
accelerators: {chip: {peak: {bf16: 50GFLOP/s}, memory: 4GiB, mfu: 0.5}}
sites:
  - {name: a, nodes: 1, accelerators_per_node: 1, accelerator: chip}
  - {name: b, like: a}
links: [{between: [a, b], bandwidth: 100Mbit/s, rtt: 10ms}]
emulate: true
"""


class Told:
    """A `Watch` that keeps what it is told."""

    def __init__(self) -> None:
        self.starts: list[tuple[int, int, float | None]] = []
        self.ends: list[Run] = []

    def started(self, planned: Planned, number: int, total: int, left_s: float | None) -> None:
        self.starts.append((number, total, left_s))

    def ended(self, planned: Planned, run: Run) -> None:
        self.ends.append(run)


class Session:
    """A benchmark in a folder, to be taken up as often as a test likes."""

    def __init__(self, folder: Path, repeats: int, *sweeps: str) -> None:
        (folder / "topology.yaml").write_text(TOPOLOGY)
        job = folder / "job.yaml"
        job.write_text("version: 1\nname: job\ntopology: topology.yaml\n")
        question = a_question(*sweeps, warmup_steps=1, repeats=repeats)
        self.folder = folder
        self.told = Told()
        self._points: list[Point] = load_points(question, job, None)
        self._new = new_bench("test", load_pair(job), question, self._points)
        self._ids = (f"run-{number}" for number in itertools.count())
        self._clock = itertools.count()

    @property
    def bench(self) -> Bench:
        """What is on the disk, or the new one."""
        path = self.folder / BENCH
        return read_bench(path) if path.is_file() else self._new

    def run(self, runs: MeasuredRuns) -> Bench:
        """Take it up and go on to the end; return what is on the disk then."""
        scaling = Scaling(
            self.folder,
            self.bench,
            self._points,
            launch=runs,
            watch=self.told,
            new_run_id=lambda: next(self._ids),
            now_s=lambda: 10.0 * next(self._clock),
        )
        scaling.run()
        assert scaling.bench == self.bench
        return scaling.bench


def test_each_site_alone_then_all_for_every_repeat(tmp_path: Path) -> None:
    runs = MeasuredRuns()
    session = Session(tmp_path, 2)
    bench = session.run(runs)
    assert runs.names == ["a", "b", "all"] * 2
    (setting,) = bench.settings
    assert setting.result is not None
    assert setting.result.efficiency.values == pytest.approx((0.5, 0.5))
    assert setting.result.emulator == "relay"
    run = setting.runs[2]
    assert (run.kind, run.site, run.repeat, run.folder) == ("all", None, 0, "runs/run-2")
    assert run.wall_s == 10.0


def test_settings_share_their_solo_runs(tmp_path: Path) -> None:
    runs = MeasuredRuns()
    bench = Session(tmp_path, 1, "links.*.rtt=5ms,20ms,80ms").run(runs)
    assert runs.names == ["a", "b", "all", "all", "all"]
    assert [
        [run.run_id for run in setting.runs if run.kind == "solo"] for setting in bench.settings
    ] == [["run-0", "run-1"]] * 3
    assert all(setting.result is not None for setting in bench.settings)


def test_how_much_is_left_is_told_once_it_is_known(tmp_path: Path) -> None:
    session = Session(tmp_path, 1)
    session.run(MeasuredRuns())
    assert session.told.starts == [(1, 3, None), (2, 3, 20.0), (3, 3, 10.0)]


@pytest.mark.parametrize("interrupt_at", range(7))
def test_an_interrupted_one_goes_on_where_it_was(tmp_path: Path, interrupt_at: int) -> None:
    session = Session(tmp_path, 2, "codec=fp32,bf16")
    first = MeasuredRuns(interrupt_at=interrupt_at)
    with pytest.raises(KeyboardInterrupt):
        session.run(first)
    kept = {run.run_id for setting in session.bench.settings for run in setting.runs}
    assert len(kept) == interrupt_at

    second = MeasuredRuns()
    bench = session.run(second)

    assert first.names[:interrupt_at] + second.names == ["a", "b", "all", "all"] * 2
    assert all(
        setting.result is not None and len(setting.result.efficiency.values) == 2
        for setting in bench.settings
    )
    third = MeasuredRuns()
    assert session.run(third) == bench
    assert third.names == []


def test_a_failed_run_is_told_its_like_are_left_and_the_others_kept(tmp_path: Path) -> None:
    session = Session(tmp_path, 2)
    failed = Failed(code="RANK_EXITED", message="rank 0 of a ended")
    runs = MeasuredRuns(fails={"a": failed})
    bench = session.run(runs)
    assert runs.names == ["a", "b", "all", "b", "all"]
    (setting,) = bench.settings
    assert setting.result is None
    assert [run.failed for run in setting.runs if run.site == "a"] == [failed]
    assert session.told.ends[0].failed == failed

    again = MeasuredRuns()
    mended = session.run(again)
    assert again.names == ["a", "a"]
    assert mended.settings[0].result is not None
    assert all(run.failed is None for run in mended.settings[0].runs)


def test_a_run_that_made_too_few_steps_has_failed(tmp_path: Path) -> None:
    class Short(MeasuredRuns):
        def __call__(self, pair: Pair, home: Path, run_id: str) -> Ended:
            trainer = dataclasses.replace(pair.job.trainer, steps=2)
            job = dataclasses.replace(pair.job, trainer=trainer)
            return super().__call__(dataclasses.replace(pair, job=job), home, run_id)

    bench = Session(tmp_path, 1).run(Short())
    (setting,) = bench.settings
    failures = [run.failed for run in setting.runs]
    assert all(each is not None and each.code == "BENCHMARK_INCOMPLETE" for each in failures)
    assert "no record of step 3" in str(failures[0])


def test_metrics_that_cannot_be_read_fail_the_run(tmp_path: Path) -> None:
    class Torn(MeasuredRuns):
        def __call__(self, pair: Pair, home: Path, run_id: str) -> Ended:
            ended = super().__call__(pair, home, run_id)
            path = home / "runs" / run_id / "metrics.jsonl"
            path.write_text(path.read_text() + '{"site": ')
            return ended

    bench = Session(tmp_path, 1).run(Torn())
    failed = bench.settings[0].runs[0].failed
    assert failed is not None
    assert "metrics.jsonl" in failed.message
