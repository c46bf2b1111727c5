"""isthmus bench: its options, both streams, resuming, interruption, and one real benchmark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isthmus.orchestrator.documents import Pair
from isthmus.orchestrator.evidence.bench.experiment import Ended
from isthmus.orchestrator.evidence.bench.recovery import RECOVERY
from isthmus.orchestrator.evidence.record.bench_record import BENCH, Failed, read_bench
from isthmus.protos.catalogue import ExitCode
from tests.cli.conftest import Isthmus
from tests.fakes.measured_runs import MeasuredRuns
from tests.multiprocess.harness import Bench, bench, job_yaml, topology_yaml

pytestmark = pytest.mark.slow


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> MeasuredRuns:
    """What the command makes instead of real runs."""
    made = MeasuredRuns()

    def run_to_end(pair: Pair, home: Path, run_id: str, **_: object) -> Ended:
        return made(pair, home, run_id)

    monkeypatch.setattr("isthmus.orchestrator.cli.bench_folder.run_to_end", run_to_end)
    return made


def test_the_tables_are_the_result_and_the_rest_goes_to_stderr(
    isthmus: Isthmus, files: Path, home: Path, runs: MeasuredRuns
) -> None:
    done = isthmus("bench", files / "job.yaml", "--repeats", "2", "--name", "mine")
    assert done.code == 0
    assert runs.names == ["oregon", "virginia", "montreal", "all"] * 2
    assert "0.500 ± 0.000" in done.out
    assert "benchmark mine" in done.out
    assert "[8/8" in done.err
    assert str(home / "bench" / "mine" / BENCH) in done.err
    assert "kept in" not in done.out


def test_the_envelope_is_the_file(
    isthmus: Isthmus, files: Path, home: Path, runs: MeasuredRuns
) -> None:
    done = isthmus(
        *("bench", "scaling", files / "job.yaml", "--json", "--repeats", "1"),
        *("--sweep", "links.*.rtt=5ms,20ms", "--sweep", "codec=fp32,bf16"),
    )
    assert done.code == 0
    data = done.envelope["data"]
    folder = Path(data.pop("folder"))
    assert folder.parent == home / "bench"
    assert data == json.loads((folder / BENCH).read_text())
    assert [setting["overrides"] for setting in data["settings"]] == [
        {"links.*.rtt": rtt, "codec": codec}
        for rtt in ("5ms", "20ms")
        for codec in ("fp32", "bf16")
    ]


def test_options_become_the_documents_of_runs(
    isthmus: Isthmus, files: Path, runs: MeasuredRuns
) -> None:
    done = isthmus(
        *("bench", files / "job.yaml", "--repeats", "1", "--steps", "4", "--warmup", "2"),
        *("--no-overlap", "--compute", "real", "--emulator", "relay", "--set", "trainer.seed=9"),
    )
    assert done.code == 0
    pair = runs.pairs[-1]
    assert pair.job.trainer.steps == 6
    assert pair.job.trainer.seed == 9
    assert pair.job.trainer.compute == "real"
    assert pair.job.exchange.schedule == "serial"
    assert pair.topology.emulator == "relay"
    assert "real compute" in done.out


@pytest.mark.parametrize(
    ("options", "code", "word"),
    [
        (["--no-exchange", "--no-overlap"], "USAGE", "--no-overlap"),
        (["--name", "../x"], "USAGE", "--name"),
        (["--resume"], "USAGE", "--name"),
        (["--steps", "0"], "USAGE", "--steps"),
        (["--steps", "9"], "USAGE", "an even number"),
        (
            ["--steps", "40", "--set", "regime=diloco"],
            "USAGE",
            "whole rounds, a multiple of their 30",
        ),
        (["--warmup", "5", "--set", "regime=diloco"], "USAGE", "--warmup: want whole rounds"),
        (["--compute", "guessed"], "USAGE", "--compute"),
        (["--require", "efficency>=0.9"], "USAGE", "did you mean 'efficiency'"),
        (["--require", "egress<=1.2 USD/day"], "USAGE", "no link of"),
        (["--sweep", "links.*.rtx=5ms,20ms"], "INVALID_CONFIG", "did you mean 'rtt'"),
        (["--sweep", "links.*.rtt"], "INVALID_CONFIG", "want PATH=V1,V2"),
        (["--resume", "--name", "nothing"], "REFUSED", "is not there"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_runs(
    isthmus: Isthmus,
    files: Path,
    home: Path,
    runs: MeasuredRuns,
    options: list[str],
    code: str,
    word: str,
) -> None:
    done = isthmus("bench", files / "job.yaml", *options, "--json")
    assert done.envelope["error"]["code"] == code
    assert done.envelope["command"] == "bench"
    assert word in done.envelope["error"]["message"]
    assert runs.pairs == []
    assert not list(home.glob("bench/*"))


def test_rounds_of_several_steps_are_measured_whole(
    isthmus: Isthmus, files: Path, runs: MeasuredRuns
) -> None:
    sweep = "regime=sync,{kind: diloco, sync_every: 7},{kind: streaming, sync_every: 4}"
    assert isthmus("bench", files / "job.yaml", "--repeats", "1", "--sweep", sweep).code == 0
    assert {pair.job.trainer.steps for pair in runs.pairs} == {28 + 56}, "of 4 and of 7 steps"


def test_a_requirement_that_is_not_met_has_an_exit_status_of_its_own(
    isthmus: Isthmus, files: Path, home: Path, runs: MeasuredRuns
) -> None:
    topology = files / "topology.yaml"
    topology.write_text(topology.read_text().replace("rtt: 62ms,", "rtt: 62ms, egress: 2USD/GB,"))
    ask = ("bench", files / "job.yaml", "--repeats", "1", "--name", "mine")
    missed = ("--require", "efficiency>=0.96", "--require", "egress<=0.000000001 USD/day")
    assert isthmus(*ask, "--require", "efficiency>=0.5").code == 0
    done = isthmus(*ask, "--resume", *missed)
    assert done.code == ExitCode.NOT_MET
    assert "0.500" in done.out
    assert "efficiency>=0.96: measured 0.5" in done.err
    assert "egress<=0.000000001 USD/day: measured" in done.err
    error = isthmus(*ask, "--resume", *missed, "--json").envelope["error"]
    assert error["code"] == "REQUIREMENT_NOT_MET"
    assert len(error["where"]["unmet"]) == 2
    assert isthmus(*ask, "--resume", "--require", "egress<=100000000 USD/day").code == 0


def test_without_a_job_it_says_how_it_is_used(isthmus: Isthmus) -> None:
    for arguments in (["bench"], ["bench", "scaling"], ["bench", "--json"]):
        done = isthmus(*arguments)
        assert done.code == 2
        assert "Usage: isthmus bench" in done.err
    assert "scaling" in isthmus("bench", "--help").out
    assert "--sweep" in isthmus("bench", "scaling", "--help").out


def test_a_bench_json_that_was_changed_by_hand_is_refused(
    isthmus: Isthmus, files: Path, home: Path, runs: MeasuredRuns
) -> None:
    arguments = ("bench", files / "job.yaml", "--repeats", "1", "--name", "mine", "--resume")
    assert isthmus(*arguments[:-1]).code == 0
    path = home / "bench" / "mine" / BENCH
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "settings": []}))
    done = isthmus(*arguments, "--json")
    assert done.envelope["error"]["code"] == "INVALID_CONFIG"
    assert "not those that its question makes" in done.envelope["error"]["message"]
    path.write_text("[]")
    assert isthmus(*arguments).code == 2


def test_ctrl_c_keeps_what_is_measured_and_resume_goes_on(
    isthmus: Isthmus, files: Path, home: Path, runs: MeasuredRuns
) -> None:
    arguments = ("bench", files / "job.yaml", "--repeats", "2", "--name", "mine")
    runs.interrupt_at = 5
    stopped = isthmus(*arguments, "--json")
    assert stopped.code == stopped.envelope["exit_code"] == 130
    assert stopped.envelope["data"]["interrupted"] is True
    assert "--name mine --resume" in stopped.err
    assert len(read_bench(home / "bench" / "mine" / BENCH).settings[0].runs) == 5

    assert isthmus(*arguments).code == 8
    other = isthmus(*arguments, "--resume", "--steps", "8", "--json")
    assert other.code == 8
    assert other.envelope["error"]["where"]["differs"] == ["steps"]
    job = files / "job.yaml"
    text = job.read_text()
    job.write_text(text.replace("global_batch: 48", "global_batch: 96"))
    assert "job or topology" in isthmus(*arguments, "--resume").err
    job.write_text(text)

    done = isthmus(*arguments, "--resume")
    assert done.code == 0
    assert len(runs.pairs) == 6 + 3
    assert "0.500 ± 0.000" in done.out


def test_a_failed_run_is_named_and_the_others_are_shown(
    isthmus: Isthmus, files: Path, runs: MeasuredRuns
) -> None:
    runs.fails = {"virginia": Failed(code="RANK_EXITED", message="rank 0 ended")}
    arguments = ("bench", files / "job.yaml", "--repeats", "1", "--name", "mine")
    done = isthmus(*arguments)
    assert done.code == 1
    assert "FAILED, RANK_EXITED: rank 0 ended" in done.err
    assert "benchmark mine" in done.out
    told = isthmus(*arguments, "--resume", "--json")
    error = told.envelope["error"]
    assert (told.code, error["code"]) == (1, "BENCHMARK_INCOMPLETE")
    assert "virginia" in error["message"]
    assert error["where"]["run_id"]


def test_recovery_keeps_every_kind_and_names_one_that_failed(
    isthmus: Isthmus, files: Path, home: Path, runs: MeasuredRuns
) -> None:
    runs.fails = {"all": Failed(code="RANK_EXITED", message="rank 0 ended")}
    kinds = ("--kind", "gateway", "--kind", "site", "--name", "mine")
    arguments = ("bench", "recovery", files / "job.yaml", "--set", "emulate=true", *kinds)
    done = isthmus(*arguments, "--json")
    error = done.envelope["error"]
    assert (done.code, error["code"]) == (1, "BENCHMARK_INCOMPLETE")
    assert error["message"].endswith("gateway: RANK_EXITED: rank 0 ended, and 1 more")
    record = json.loads((home / "bench" / "mine" / RECOVERY).read_text())
    assert (record["job"]["name"], record["question"]["site"]) == ("hello-wan", "montreal")
    assert [each["kind"] for each in record["settings"]] == ["gateway", "site"]
    assert record["settings"][0]["run_id"] == error["where"]["run_id"]
    again = isthmus(*arguments)
    assert again.code == 8
    assert "choose another --name" in again.err


def test_one_process_at_a_time(
    isthmus: Isthmus, files: Path, runs: MeasuredRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("bench", files / "job.yaml", "--repeats", "1", "--name", "mine")
    codes: list[int] = []

    def meanwhile(pair: Pair, home: Path, run_id: str, **_: object) -> Ended:
        if not codes:
            codes.append(0)
            codes[0] = isthmus(*arguments, "--resume").code
        return runs(pair, home, run_id)

    monkeypatch.setattr("isthmus.orchestrator.cli.bench_folder.run_to_end", meanwhile)
    assert isthmus(*arguments).code == 0
    assert codes == [8]


@pytest.mark.exhaustive
@pytest.mark.multiprocess
def test_a_benchmark_that_was_interrupted_goes_on_with_real_runs(
    isthmus: Isthmus, tmp_path: Path, runs: MeasuredRuns
) -> None:
    """Three real runs would be right, and take long: the first one is a fake."""
    with bench(tmp_path) as run:
        job = run.write(topology_yaml([(1, 1), (1, 1)], emulate=False), job_yaml())
        arguments = (
            *("bench", str(job), "--json", "--emulator", "relay", "--no-overlap"),
            *("--repeats", "1", "--steps", "2", "--warmup", "1", "--name", "mine"),
        )
        runs.interrupt_at = 1
        assert isthmus(*arguments).code == 130
        _two_real_runs(run, run.isthmus(*arguments, "--resume").check().envelope["data"])


def _two_real_runs(run: Bench, data: dict[str, Any]) -> None:
    (setting,) = data["settings"]
    assert [each["site"] for each in setting["runs"]] == ["a", "b", None]
    assert [each["emulator"] for each in setting["runs"]] == ["none", "none", "relay"]
    figures = setting["result"]
    assert (figures["compute"], figures["emulator"]) == ("modelled", "relay")
    split = figures["split"]
    parts = [split[part] for part in ("compute_s", "intra_s", "exposed_inter_s", "wait_s")]
    assert sum(parts) == pytest.approx(figures["step_s"]["mean"], rel=0.01)
    assert figures["efficiency"]["mean"] > 0
    assert figures["predicted"]["step_s"] > 0
    assert all(link["bytes_per_step"] > 0 for link in figures["links"])
    for each in setting["runs"]:
        assert (run.home / "bench" / "mine" / each["folder"] / "metrics.jsonl").is_file()
    run.wait_for_nothing_left(20)


def test_links_play_a_recording_in_runs_of_all_sites(
    isthmus: Isthmus, files: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, played = MeasuredRuns(), []

    def run_to_end(pair: Pair, home: Path, run_id: str, **given: Any) -> Ended:  # noqa: ANN401
        played.append((pair.topology.emulate, given["faults"]))
        return made(pair, home, run_id)

    monkeypatch.setattr("isthmus.orchestrator.cli.bench_folder.run_to_end", run_to_end)
    trace = files / "trace.csv"
    trace.write_text("time_s,source,target,bytes_per_s\n0,oregon,virginia,1e6\n")
    options = ("--repeats", "1", "--name", "mine", "--link-trace", trace)
    assert isthmus("bench", files / "job.yaml", *options).code == 0
    script = home / "bench" / "mine" / "link-trace.yaml"
    assert "rate: 8000000bit/s" in script.read_text()
    assert played == [(False, ())] * 3 + [(True, ("--faults", str(script)))]
    trace.write_text("time_s,source,target,bytes_per_s\n0,oregon,virginia,2e6\n")
    refused = isthmus("bench", files / "job.yaml", *options, "--resume", "--json")
    assert refused.code == ExitCode.REFUSED
    assert "link" in refused.envelope["error"]["message"]


@pytest.mark.parametrize(
    ("text", "options", "code", "words"),
    [
        (None, [], "INVALID_CONFIG", "No such file"),
        ("time_s,source\n", [], "INVALID_CONFIG", "a column is missing: target"),
        ("time_s,source,target,rtt_s\n0,oregon,paris,1", [], "INVALID_CONFIG", "no link from oregon to paris"),
        ("time_s,source,target,rtt_s\n", ["--no-exchange"], "USAGE", "--no-exchange"),
    ],
)  # fmt: skip
def test_mistakes_in_a_recording_are_named_before_anything_runs(
    isthmus: Isthmus,
    files: Path,
    runs: MeasuredRuns,
    text: str | None,
    options: list[str],
    code: str,
    words: str,
) -> None:
    if text is not None:
        (files / "trace.csv").write_text(text)
    done = isthmus(
        *("bench", files / "job.yaml", "--link-trace", files / "trace.csv", "--json"), *options
    )
    assert done.envelope["error"]["code"] == code
    assert words in json.dumps(done.envelope["error"], ensure_ascii=False)
    assert not runs.names
