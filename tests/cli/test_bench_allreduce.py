"""isthmus bench allreduce.

Its options, both streams, interruption, failures, and one real benchmark.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from isthmus.orchestrator.evidence.bench.allreduce_bench import ALLREDUCE, Baseline, Times
from isthmus.orchestrator.evidence.record.bench_record import Failed
from isthmus.orchestrator.evidence.record.measured_steps import MeasurementError
from isthmus.topology.spec.world import Emulation, Queue, Topology
from tests.cli.conftest import Isthmus
from tests.fakes.measured_allreduces import MeasuredAllReduces
from tests.multiprocess.harness import bench, job_yaml, topology_yaml


@pytest.fixture
def topology(files: Path) -> Path:
    """Three sites that all reach each other."""
    path = files / "three.yaml"
    path.write_text(topology_yaml([(2, 2), (1, 1), (1, 2)]))
    return path


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> MeasuredAllReduces:
    """What the command makes instead of real runs; Gloo takes 8 s, plain TCP 5 s."""
    made = MeasuredAllReduces()

    def baseline(
        name: str, _: Topology, size_bytes: int, *, repeats: int, **__: object
    ) -> Baseline:
        time_s = {"gloo": 8.0, "tcp": 5.0}[name]
        times = Times(
            cold_s=9.0, all_s=(time_s,) * repeats, median_s=time_s, min_s=time_s, max_s=time_s
        )
        return Baseline(size_bytes=size_bytes, times=times, cpu_s_per_gb=0.25)

    monkeypatch.setattr("isthmus.orchestrator.cli.bench_folder.run_to_end", made)
    monkeypatch.setattr("isthmus.orchestrator.cli.bench_allreduce.measure_baseline", baseline)
    monkeypatch.setattr("isthmus.orchestrator.cli.bench_allreduce.netns_problem", lambda: None)
    return made


def test_every_combination_is_a_run_and_a_row(
    isthmus: Isthmus, topology: Path, home: Path, runs: MeasuredAllReduces
) -> None:
    done = isthmus(
        *("bench", "allreduce", topology, "--name", "mine"),
        *("--size", "1MiB", "--size", "4MiB", "--codec", "fp32", "--codec", "int8"),
        *("--tree", "gather", "--tree", "star"),
    )
    assert done.code == 0
    asked = [
        (pair.job.arguments[0], pair.job.exchange.codec, pair.job.reduction.tree)
        for pair in runs.pairs
    ]
    assert asked == [
        (str(size), codec, tree)
        for size in (1 << 20, 4 << 20)
        for codec in ("fp32", "int8")
        for tree in ("gather", "star")
    ]
    assert "benchmark mine" in done.out
    assert done.out.count("int8") == 2 * 4
    assert re.search(r"^\[8/8, about .* left\] 4MiB, int8, star: 4s$", done.err, re.MULTILINE)
    assert str(home / "bench" / "mine" / ALLREDUCE) in done.err


def test_options_become_the_documents_of_runs(
    isthmus: Isthmus, topology: Path, runs: MeasuredAllReduces
) -> None:
    arguments = (
        "bench",
        "allreduce",
        topology,
        "--size",
        "1MiB",
        "--repeats",
        "3",
        "--warmup",
        "1",
    )
    done = isthmus(
        *arguments,
        *("--streams", "7", "--chunk", "128KiB", "--emulator", "netns"),
        *("--set", "links.0.rtt=70ms", "--set", "exchange.bucket=2MiB"),
    )
    assert done.code == 0
    pair = runs.pairs[-1]
    assert pair.job.arguments == (str(1 << 20), "4", "shared", "0")
    assert pair.job.entrypoint is not None
    assert (pair.job_path.parent / pair.job.entrypoint).is_file()
    assert (pair.job.exchange.channels_per_link, pair.job.exchange.chunk_bytes) == (7, 128 << 10)
    assert pair.job.exchange.bucket_bytes == 2 << 20
    assert (pair.topology.emulate, pair.topology.emulator) == (True, "netns")
    assert pair.topology.links[0].rtt_s == 0.07
    assert [site.num_ranks for site in pair.topology.sites] == [1, 1, 1]

    assert isthmus(*arguments, "--all-ranks", "--emulator", "none").code == 0
    pair = runs.pairs[-1]
    assert [site.num_ranks for site in pair.topology.sites] == [4, 1, 2]
    assert not pair.topology.emulate


def test_without_a_tree_or_codec_the_job_that_ships_decides_or_its_overrides(
    isthmus: Isthmus, topology: Path, runs: MeasuredAllReduces
) -> None:
    trees = "reduction.trees=[{root: b, parents: {a: b, c: b}}]"
    done = isthmus(
        *("bench", "allreduce", topology, "--size", "1MiB"),
        *("--set", trees, "--set", "exchange.codec=bf16"),
    )
    assert done.code == 0
    assert runs.pairs[-1].job.exchange.codec == "bf16"
    assert "as written" in done.out


def test_the_envelope_is_the_file(
    isthmus: Isthmus, topology: Path, runs: MeasuredAllReduces
) -> None:
    done = isthmus(
        *("bench", "allreduce", topology, "--json", "--size", "1MiB", "--emulator", "netns"),
        *("--against", "gloo"),
    )
    assert done.code == 0
    data = done.envelope["data"]
    folder = Path(data.pop("folder"))
    assert data == json.loads((folder / ALLREDUCE).read_text())
    (setting,) = data["settings"]
    assert setting["figures"]["times"]["median_s"] == 4
    assert setting["figures"]["over_bound"] > 1
    assert setting["over_gloo"] == 2
    assert data["gloo"][0]["times"] == {
        "cold_s": 9,
        "all_s": [8] * 5,
        "median_s": 8,
        "min_s": 8,
        "max_s": 8,
    }


def test_conditions_become_those_of_the_topology(
    isthmus: Isthmus, topology: Path, runs: MeasuredAllReduces, home: Path
) -> None:
    done = isthmus(
        *("bench", "allreduce", topology, "--json", "--size", "1MiB", "--emulator", "netns"),
        *("--name", "mine", "--queue", "0.5BDP", "--described", "2", "--congestion", "bbr"),
        *("--loss", "0.1%", "--jitter", "5ms", "--idle", "2s", "--varying"),
        *("--against", "tcp", "--against", "gloo"),
    )
    assert done.code == 0
    pair = runs.pairs[-1]
    assert pair.topology.emulation == Emulation(
        described=2.0, queue=Queue(bdp=0.5), congestion="bbr"
    )
    for link in pair.topology.links:
        assert (link.loss, link.jitter_s, link.congestion) == (0.001, 0.005, "bbr")
    assert pair.job.arguments[3] == "2"
    data = done.envelope["data"]
    assert data["question"]["conditions"]["is_varying"]
    assert data["question"]["baselines"] == ["tcp", "gloo"]
    (setting,) = data["settings"]
    assert (setting["over_gloo"], setting["over_tcp"]) == (2, 1.25)
    assert (home / "bench" / "mine" / "varying.yaml").is_file()


@pytest.mark.parametrize(
    ("options", "code", "word"),
    [
        (["--size", "3B"], "USAGE", "multiple of 4B"),
        (["--size", "64"], "USAGE", "--size"),
        (["--codec", "int3"], "USAGE", "--codec"),
        (["--tree", "bush"], "USAGE", "--tree"),
        (["--streams", "0"], "USAGE", "--streams"),
        (["--chunk", "4B"], "INVALID_CONFIG", "64KiB"),
        (["--name", "../x"], "USAGE", "--name"),
        (["--set", "links.0.rtx=3ms"], "INVALID_CONFIG", "did you mean 'rtt'"),
        (["--against", "gloo", "--emulator", "relay"], "EMULATION_FAILED", "namespaces"),
        (["--loss", "1%", "--emulator", "relay"], "EMULATION_FAILED", "--loss: only where packets"),
        (["--queue", "1BDP", "--emulator", "none"], "EMULATION_FAILED", "add --emulator netns"),
        (["--loss", "100%"], "USAGE", "less than 100%"),
        (["--jitter", "5"], "USAGE", "without a unit"),
        (["--queue", "0.5"], "USAGE", "want 0.5BDP"),
        (["--described", "0"], "USAGE", "more than 0"),
        (["--described", "nan"], "USAGE", "more than 0"),
        (["--cross-traffic", "0"], "USAGE", "1 to 32"),
        (["--cross-traffic", "2:vegas"], "USAGE", "cubic, reno, bbr"),
        (["--congestion", "vegas"], "USAGE", "--congestion"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_runs(
    isthmus: Isthmus,
    topology: Path,
    home: Path,
    runs: MeasuredAllReduces,
    options: list[str],
    code: str,
    word: str,
) -> None:
    done = isthmus("bench", "allreduce", topology, *options, "--json")
    assert done.envelope["error"]["code"] == code
    assert word in done.envelope["error"]["message"]
    assert runs.pairs == []
    assert not list(home.glob("bench/*"))


def test_gloo_is_refused_where_packets_cannot_be_emulated(
    isthmus: Isthmus, topology: Path, runs: MeasuredAllReduces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "isthmus.orchestrator.cli.bench_allreduce.netns_problem", lambda: "not here"
    )
    arguments = ("bench", "allreduce", topology, "--against", "gloo", "--json")
    done = isthmus(*arguments, "--emulator", "auto")
    assert done.envelope["error"]["code"] == "EMULATION_FAILED"
    assert "not here" in done.envelope["error"]["message"]
    assert isthmus(*arguments, "--emulator", "none").code == 0


def test_a_failed_run_is_named_and_the_others_are_shown(
    isthmus: Isthmus, topology: Path, runs: MeasuredAllReduces
) -> None:
    runs.fails = {"bf16": Failed(code="RANK_EXITED", message="rank 0 ended")}
    done = isthmus(
        *("bench", "allreduce", topology, "--codec", "bf16", "--codec", "fp32", "--size", "1MiB")
    )
    assert done.code == 1
    assert "FAILED, RANK_EXITED: rank 0 ended" in done.err
    assert "4s" in done.out


def test_results_that_differ_fail(
    isthmus: Isthmus, topology: Path, runs: MeasuredAllReduces
) -> None:
    runs.differs = "fp32"
    done = isthmus("bench", "allreduce", topology, "--size", "1MiB", "--json")
    assert (done.code, done.envelope["error"]["code"]) == (1, "BENCHMARK_INCOMPLETE")
    assert "repetition 1: the results of" in done.envelope["error"]["message"]
    assert done.envelope["error"]["where"]["run_id"]


def test_gloos_failure_keeps_what_was_measured(
    isthmus: Isthmus, topology: Path, runs: MeasuredAllReduces, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gloo(*_: object, **__: object) -> Baseline:
        raise MeasurementError("Gloo at a failed: no way")

    monkeypatch.setattr("isthmus.orchestrator.cli.bench_allreduce.measure_baseline", gloo)
    done = isthmus(
        *("bench", "allreduce", topology, "--size", "1MiB"),
        *("--emulator", "none", "--against", "gloo"),
    )
    assert done.code == 1
    assert "no way" in done.err
    assert "4s" in done.out


def test_ctrl_c_keeps_what_is_measured(
    isthmus: Isthmus, topology: Path, runs: MeasuredAllReduces
) -> None:
    runs.interrupt_at = 1
    done = isthmus(
        *("bench", "allreduce", topology, "--codec", "fp32", "--codec", "bf16", "--json")
    )
    assert done.code == done.envelope["exit_code"] == 130
    assert done.envelope["data"]["interrupted"] is True
    assert [each["codec"] for each in done.envelope["data"]["settings"]] == ["fp32"]


@pytest.mark.parametrize("name", ["two", "three", "four", "one_slow"])
def test_the_topologies_that_ship_can_be_measured_against_gloo(
    isthmus: Isthmus, runs: MeasuredAllReduces, name: str
) -> None:
    path = Path(__file__).parents[2] / "scripts" / "bench_allreduce" / f"{name}.yaml"
    done = isthmus("bench", "allreduce", path, "--size", "1MiB", "--against", "gloo")
    assert done.code == 0
    assert "x Gloo" in done.out


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_real_sites(tmp_path: Path) -> None:
    with bench(tmp_path) as run:
        run.write(topology_yaml([(1, 2), (1, 1)]), job_yaml())
        result = run.isthmus(
            *("bench", "allreduce", str(tmp_path / "topology.yaml"), "--json", "--all-ranks"),
            *("--size", "1MiB", "--codec", "int8", "--repeats", "2", "--warmup", "1"),
            *("--emulator", "none", "--against", "gloo"),
        ).check()
        data = result.envelope["data"]
        (setting,) = data["settings"]
        figures = setting["figures"]
        assert setting["emulator"] == "none"
        assert len(figures["times"]["all_s"]) == 2
        assert figures["site_sent_bytes"] == pytest.approx((1 << 20) / 4, rel=0.05)
        assert 0 < figures["relative_error"] < 0.02
        assert figures["gateways_cpu_s_per_gb"] > 0
        assert figures["ranks_cpu_s_per_gb"] > 0
        assert setting["over_gloo"] > 0
        run.wait_for_nothing_left(20)
