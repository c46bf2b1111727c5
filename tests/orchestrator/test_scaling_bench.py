"""The session: which runs are made, what is kept of each, and how an interrupted one goes on.

Figures of runs and settings, against numbers worked out by hand.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest

from isthmus.orchestrator.cli.bench_folder import new_bench
from isthmus.orchestrator.documents import Pair, load_pair
from isthmus.orchestrator.evidence.bench.experiment import Ended
from isthmus.orchestrator.evidence.bench.scaling import Scaling, predict, result_of
from isthmus.orchestrator.evidence.bench.sweep_settings import Point, load_points
from isthmus.orchestrator.evidence.record.bench_record import (
    BENCH,
    Bench,
    Failed,
    Run,
    interval,
    read_bench,
    t_95,
)
from isthmus.orchestrator.evidence.record.measured_steps import MeasurementError, measure
from isthmus.topology.model.step_model import exchange_time_s
from isthmus.topology.spec.compute import layer_times, num_parameters, step_compute_s
from isthmus.topology.spec.world import Topology
from tests.fakes import benches
from tests.fakes.benches import a_question
from tests.fakes.measured_runs import MeasuredRuns, Told, link_record, step_record

TOPOLOGY_YAML = """\
version: 1
name: two
accelerators: {chip: {peak: {bf16: 50GFLOP/s}, memory: 4GiB, mfu: 0.5}}
sites:
  - {name: a, nodes: 1, accelerators_per_node: 1, accelerator: chip}
  - {name: b, like: a}
links: [{between: [a, b], bandwidth: 100Mbit/s, rtt: 10ms}]
emulate: true
"""


class Session:
    """A benchmark in a folder, to be taken up as often as a test likes."""

    def __init__(self, folder: Path, repeats: int, *sweeps: str) -> None:
        (folder / "topology.yaml").write_text(TOPOLOGY_YAML)
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
            folder=self.folder,
            bench=self.bench,
            points=self._points,
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
    assert session.told.ends[0] == failed

    again = MeasuredRuns()
    mended = session.run(again)
    assert again.names == ["a", "a"]
    assert mended.settings[0].result is not None
    assert all(run.failed is None for run in mended.settings[0].runs)


def test_a_run_that_made_too_few_steps_has_failed(tmp_path: Path) -> None:
    class Short(MeasuredRuns):
        def __call__(self, pair: Pair, home: Path, run_id: str, **_: object) -> Ended:
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
        def __call__(self, pair: Pair, home: Path, run_id: str, **_: object) -> Ended:
            ended = super().__call__(pair, home, run_id)
            path = home / "runs" / run_id / "metrics.jsonl"
            path.write_text(path.read_text() + '{"site": ')
            return ended

    bench = Session(tmp_path, 1).run(Torn())
    failed = bench.settings[0].runs[0].failed
    assert failed is not None
    assert "metrics.jsonl" in failed.message


TOPOLOGY = benches.a_topology()
SITES = benches.SITES


def test_an_interval_is_students() -> None:
    # Mean 3, s = sqrt(2.5), n = 5: 2.776 * 1.5811 / 2.2361.
    found = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.mean == 3.0
    assert found.half_width == pytest.approx(1.963, abs=1e-3)
    assert found.values == (1.0, 2.0, 3.0, 4.0, 5.0)


def test_a_single_value_has_no_interval() -> None:
    assert interval([0.9]).half_width is None


def test_quantiles_between_rows_are_the_wider_ones() -> None:
    assert t_95(1) == 12.706
    assert t_95(30) == t_95(35) == 2.042
    assert t_95(45) == 2.021
    assert t_95(1000) == 1.980


def records(slow_step: int = 1) -> list[dict[str, object]]:
    """Two sites, steps 1 to 4 of 0.5 s but for one that took 9 s; 1000 and 3000 tokens."""
    return [
        step_record(
            site, step, step_s=9.0 if step == slow_step else 0.5, tokens=tokens, wire_bytes=600.0
        )
        for step in range(1, 5)
        for site, tokens in zip(SITES, (1000.0, 3000.0), strict=True)
    ]


def test_warm_up_does_not_count() -> None:
    found = measure(records(slow_step=1), TOPOLOGY, warmup_steps=1, steps=3)
    assert found.step_s == 0.5
    assert found.tokens_per_step == 4000
    assert found.tokens_per_s == 8000
    assert found.split.compute_s == pytest.approx(0.4)
    assert found.split.exposed_inter_s == pytest.approx(0.1)


def test_what_counts_does() -> None:
    found = measure(records(slow_step=4), TOPOLOGY, warmup_steps=1, steps=3)
    assert found.step_s == pytest.approx(10 / 3)
    assert found.tokens_per_s == pytest.approx(4000 / (10 / 3))


def test_sites_that_do_not_wait_have_a_pace_each() -> None:
    lines = [
        step_record(site, 1, step_s=step_s, tokens=1000.0)
        for site, step_s in zip(SITES, (0.5, 1.0), strict=True)
    ]
    assert measure(lines, TOPOLOGY, warmup_steps=0, steps=1).tokens_per_s == 3000


def test_links_totals_are_spread_over_steps_as_the_first_rank_sent() -> None:
    # Two nodes; their gateways together sent 4000 bytes, the first rank 600 in each of four steps.
    lines = [
        *records(),
        link_record(*SITES, sent_bytes=1.0),
        link_record(*SITES, sent_bytes=3000.0),
        link_record(*SITES, sent_bytes=1000.0, gateway="1"),
    ]
    found = measure(lines, TOPOLOGY, warmup_steps=1, steps=3)
    assert [(each.source, each.bytes_per_step) for each in found.links] == [
        (SITES[0], 1000.0),
        (SITES[1], 0.0),  # no totals came from there
    ]
    assert found.wire_ratio == 0.5
    nothing = measure(records(), TOPOLOGY, warmup_steps=1, steps=3)
    assert nothing.wire_ratio is None


def test_missing_steps_and_figures_are_told() -> None:
    with pytest.raises(MeasurementError, match=r"oregon has no record of step 5, of 6"):
        measure(records(), TOPOLOGY, warmup_steps=1, steps=5)
    lines = records()
    del lines[-1]["values"]["wait_s"]  # type: ignore[attr-defined]
    with pytest.raises(MeasurementError, match="no wait_s"):
        measure(lines, TOPOLOGY, warmup_steps=1, steps=3)


def a_repeat(repeat: int, together_s: float, alone_s: float) -> list[Run]:
    return [
        benches.a_run(
            repeat, None, benches.measured(step_s=together_s, wire_bytes=benches.WIRE_BYTES)
        ),
        *(benches.a_run(repeat, site, benches.measured(sites=1, step_s=alone_s)) for site in SITES),
    ]


def test_each_repeat_is_divided_by_its_own_solo_runs() -> None:
    # The machine was half as fast in the second repeat: the efficiency is the same.
    runs = [*a_repeat(0, 0.5, 0.4), *a_repeat(1, 1.0, 0.8)]
    found = result_of(benches.a_job(), TOPOLOGY, runs)
    assert found is not None
    assert found.efficiency.values == pytest.approx((0.8, 0.8))
    assert found.efficiency.half_width == pytest.approx(0.0, abs=1e-12)
    assert found.step_s.mean == 0.75
    assert [each.site for each in found.solo] == list(SITES)


def test_the_shares_of_a_step_add_up_to_it() -> None:
    found = result_of(benches.a_job(), TOPOLOGY, a_repeat(0, 0.5, 0.4))
    assert found is not None
    assert found.shares == pytest.approx(
        {"compute": 0.8, "intra": 0.0, "exposed_inter": 0.2, "wait": 0.0}
    )


def test_links_in_a_setting() -> None:
    found = result_of(benches.a_job(), TOPOLOGY, a_repeat(0, 0.5, 0.4))
    assert found is not None
    link = found.links[0]
    # 2 MB of the 12.5 MB that 200 Mbit/s carry in half a second.
    assert link.utilisation == pytest.approx(0.16)
    assert link.egress_usd_per_step == pytest.approx(2e6 * 0.05e-9)
    assert link.egress_usd_per_1e9_tokens == pytest.approx(1e-4 / 16384 * 1e9)
    assert (link.bytes_per_s, link.rtt_s) == (25e6, 0.02)


def test_only_complete_repeats_count() -> None:
    complete, half = a_repeat(0, 0.5, 0.4), a_repeat(1, 0.5, 0.1)[:2]
    failed = dataclasses.replace(
        benches.a_run(1, SITES[1]), measured=None, failed=Failed(code="RANK_EXITED", message="x")
    )
    job = benches.a_job()
    assert result_of(job, TOPOLOGY, [*half, failed]) is None
    found = result_of(job, TOPOLOGY, [*complete, *half, failed])
    assert found is not None
    assert found.efficiency.values == pytest.approx((0.8,))


def test_what_is_predicted() -> None:
    serial, overlap = benches.a_job("serial"), benches.a_job("overlap")
    compute_s = step_compute_s(serial, TOPOLOGY, TOPOLOGY.sites[0])
    gradient_bytes = 4 * num_parameters(serial.trainer.model)
    exchange_s = exchange_time_s(serial, TOPOLOGY, gradient_bytes)

    found = predict(serial, TOPOLOGY, "relay", 0.9, 2 * (compute_s + exchange_s))
    assert found is not None
    assert found.step_s == pytest.approx(compute_s + exchange_s)
    assert found.efficiency == pytest.approx(compute_s / (compute_s + exchange_s))
    assert found.deviation == pytest.approx(1.0)

    # One bucket holds the whole gradient: there is nothing that backward could hide.
    assert gradient_bytes < overlap.exchange.bucket_bytes
    alike = predict(overlap, TOPOLOGY, "relay", 0.9, 1.0)
    assert alike is not None
    assert alike.step_s == pytest.approx(found.step_s)

    off = predict(benches.a_job("off"), TOPOLOGY, "relay", None, compute_s)
    assert off is not None
    assert (off.exchange_s, off.efficiency) == (0.0, 1.0)
    assert off.deviation == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("rate", "micro_batch"), [("2Mbit/s", 32), ("2Gbit/s", 32), ("2Mbit/s", 8)]
)
def test_overlap_is_predicted_by_whatever_is_slower(rate: str, micro_batch: int) -> None:
    topology, job = a_swift_link(rate), benches.a_job("overlap")
    job = dataclasses.replace(
        job,
        exchange=dataclasses.replace(job.exchange, bucket_bytes=1 << 18),
        trainer=dataclasses.replace(job.trainer, micro_batch=micro_batch),
    )
    site = topology.sites[0]
    compute_s = step_compute_s(job, topology, site)
    embedding, first_block, *_ = layer_times(job, site, micro_batch)
    found = predict(job, topology, "relay", None, 1.0)
    assert found is not None
    if rate == "2Mbit/s":
        # The WAN decides, which begins when the last block and the head are done.
        later_s = embedding.backward_s + first_block.backward_s
        assert found.step_s == pytest.approx(compute_s - later_s + found.exchange_s)
    else:
        # The accelerator does: what is left is the first block, 384 rows of the embeddings, and a
        # norm of the second block, whose bucket was full before it.
        num_left = 12 * 128 * 128 + 4 * 128 + 384 * 128 + 2 * 128
        last_s = exchange_time_s(job, topology, 4 * num_left)
        assert found.step_s == pytest.approx(compute_s + last_s)


def a_swift_link(rate: str) -> Topology:
    return benches.a_topology(rtt="1ms", bandwidth=rate)


def test_packets_have_headers_and_compression_is_what_was_measured() -> None:
    job = benches.a_job()
    relay, netns = (predict(job, TOPOLOGY, name, None, 1.0) for name in ("relay", "netns"))
    assert relay is not None
    assert netns is not None
    assert netns.exchange_s > relay.exchange_s
    split = predict(benches.a_job(codec="split"), TOPOLOGY, "relay", 0.5, 1.0)
    assert split is not None
    half_rtt_s = TOPOLOGY.links[0].rtt_s / 2
    assert split.exchange_s - half_rtt_s == pytest.approx(
        (relay.exchange_s - half_rtt_s) / 2, rel=1e-3
    )


def test_nothing_is_predicted_of_real_compute() -> None:
    job = benches.a_job()
    job = dataclasses.replace(job, trainer=dataclasses.replace(job.trainer, compute="real"))
    assert predict(job, TOPOLOGY, "relay", None, 1.0) is None
