"""isthmus simulate: its tables and envelope, sweeps, the run that it keeps, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isthmus.orchestrator.evidence.record.bench_record import BENCH, read_bench
from tests.cli.conftest import SMALL_JOB, Isthmus
from tests.fakes.described import TWO_SITES_YAML

pytestmark = pytest.mark.slow


def test_tables_are_the_result_and_the_rest_goes_to_stderr(
    isthmus: Isthmus, files: Path, home: Path
) -> None:
    done = isthmus("simulate", files / "job.yaml", "--name", "mine", "--steps", "3")
    assert done.code == 0, done.err
    assert "benchmark mine" in done.out
    assert "simulated" in done.out
    assert "oregon → virginia" in done.out
    assert "[1/1] simulated in" in done.err
    bench = read_bench(home / "bench" / "mine" / BENCH)
    (setting,) = bench.settings
    assert setting.result is not None
    assert setting.result.emulator == "simulated"
    assert [run.site for run in setting.runs] == ["oregon", "virginia", "montreal", None]


@pytest.mark.no_cover
def test_a_sweep_is_that_of_bench(isthmus: Isthmus, files: Path, home: Path) -> None:
    done = isthmus(
        *("simulate", files / "job.yaml", "--json", "--name", "swept", "--steps", "2"),
        *("--sweep", "links.*.bandwidth=10Mbit/s,1Gbit/s", "--sweep", "codec=fp32,int8"),
        *("--set", "reduction.tree=gather", "--set", "trainer.model.width=256"),
        *("--set", "emulator=relay"),  # no packets: what is sent grows no windows for later
    )
    assert done.code == 0, done.err
    data = done.envelope["data"]
    assert Path(data.pop("folder")) == home / "bench" / "swept"
    simulated = data.pop("simulated")
    assert data == json.loads((home / "bench" / "swept" / BENCH).read_text())
    assert [setting["overrides"] for setting in data["settings"]] == [
        {"links.*.bandwidth": bandwidth, "codec": codec}
        for bandwidth in ("10Mbit/s", "1Gbit/s")
        for codec in ("fp32", "int8")
    ]
    steps_s = [setting["result"]["step_s"]["mean"] for setting in data["settings"]]
    assert steps_s[0] > steps_s[1] > steps_s[3]
    assert steps_s[0] > steps_s[2] >= steps_s[3]
    for setting, one in zip(data["settings"], simulated, strict=True):
        result = setting["result"]
        assert result["step_s"]["mean"] == pytest.approx(one["steps_s"][-1], rel=0.02)
        assert sum(result["shares"].values()) == pytest.approx(1.0)
        assert one["goodput"] == 1.0
    page = isthmus("report", "swept", "--out", home / "page.html")
    assert page.code == 0, page.err


def test_report_trace_and_status_draw_it_as_a_run_and_say_that_none_was(
    isthmus: Isthmus, files: Path, home: Path
) -> None:
    kept = home / "elsewhere"
    done = isthmus(
        *("simulate", files / "job.yaml", "--out", kept, "--name", "s", "--steps", "6"),
        *("--warmup", "0", "--set", "links.0.bandwidth=20Mbit/s"),
    )
    assert done.code == 0, done.err
    runs = ("s-0", "--home", kept)
    told = isthmus("status", *runs)
    assert "note: simulated: no process ran, and no byte crossed" in told.out
    assert "SUCCEEDED" in told.out
    report = isthmus("report", *runs, "--json").envelope["data"]["runs"][0]
    assert report["steps"] == 6
    assert report["emulator"] == "a simulation"
    assert report["num_timelines"] == 3
    # The override went along: the page and the trace are of the links that were simulated.
    assert any(link["configured_bytes_per_s"] == 2.5e6 for link in report["links"])
    trace = isthmus("trace", *runs, "--json")
    assert trace.envelope["data"]["steps"] == 3
    assert trace.envelope["data"]["gaps"] == []
    summary = json.loads((kept / "runs" / "s-0" / "summary.json").read_text())
    assert summary["notes"] == ["simulated: no process ran, and no byte crossed"]
    mean_s = sum(site["step_s"] for site in report["sites"]) / 3
    assert sum(summary["time_split"].values()) == pytest.approx(mean_s)


@pytest.mark.no_cover
def test_failures_have_a_table_and_a_seed(isthmus: Isthmus, files: Path) -> None:
    asked = (
        *("simulate", files / "job.yaml", "--steps", "60", "--mtbf", "20s", "--recovery", "2s"),
        *("--checkpoint-every", "5", "--stragglers", "exponential:5%"),
    )
    first = isthmus(*asked, "--seed", "3", "--name", "a", "--json").envelope["data"]["simulated"]
    again = isthmus(*asked, "--seed", "3", "--name", "b", "--json").envelope["data"]["simulated"]
    other = isthmus(*asked, "--seed", "4", "--name", "c", "--json").envelope["data"]["simulated"]
    assert first == again
    assert first != other
    assert first[0]["outages"]
    assert first[0]["goodput"] < 1
    people = isthmus(*asked, "--seed", "3", "--name", "d")
    assert "goodput" in people.out


def test_a_fault_script_is_played_and_stands_in_the_report(
    isthmus: Isthmus, files: Path, home: Path
) -> None:
    script = files / "faults.yaml"
    script.write_text(
        "version: 1\nseed: 7\nfaults:\n"
        "  - {at: 1s, cut: [oregon, virginia]}\n  - {at: 4s, heal: all}\n"
    )
    asked = ("simulate", files / "job.yaml", "--steps", "5", "--warmup", "0", "--json")
    plain = isthmus(*asked, "--name", "p").envelope["data"]["simulated"][0]
    cut = isthmus(*asked, "--name", "c", "--faults", script).envelope["data"]["simulated"][0]
    assert cut["wall_s"] > plain["wall_s"] + 1.0
    runs = ("c-0", "--home", home / "bench" / "c")
    report = isthmus("report", *runs, "--json").envelope["data"]["runs"][0]
    assert [each["what"] for each in report["happened"] if each["mark"]] == [
        "cut",
        "cut",
        "heal",
        "heal",
    ]
    assert report["gaps"] == []
    script.write_text("version: 1\nfaults:\n  - {at: 1s, pause: oregon, for: 1s}\n")
    refused = isthmus(*asked, "--name", "r", "--faults", script)
    assert refused.envelope["error"]["code"] == "USAGE"
    assert "only rate, rtt, cut" in refused.envelope["error"]["message"]


DESCRIBED = """\
version: 1
name: mine
topology: topology.yaml
entrypoint: train.py
workload: {layers: 16, width: 1024, heads: 16, vocabulary: 32000, context: 512, global_batch: 64}
"""


@pytest.fixture
def described(tmp_path: Path) -> Path:
    """A job that describes its model, for two sites of eight accelerators each."""
    (tmp_path / "topology.yaml").write_text(TWO_SITES_YAML)
    (tmp_path / "job.yaml").write_text(DESCRIBED)
    return tmp_path / "job.yaml"


def cut(parallel: str, sequences: int = 32) -> list[str]:
    """Return options that place a model at both sites, each cutting it like this."""
    placed = [f"{{site: {site}, sequences: {sequences}, parallel: {parallel}}}" for site in "ab"]
    return ["--set", f"placement=[{', '.join(placed)}]"]


@pytest.mark.no_cover
def test_a_described_model_goes_through_pipelines(
    isthmus: Isthmus, described: Path, home: Path
) -> None:
    asked = ("simulate", described, "--name", "piped")
    plain = isthmus(*asked, *cut("{pipeline: 4, virtual_stages: 2, data: 2}"), "--json")
    assert plain.code == 0, plain.err
    data = plain.envelope["data"]
    inside = data["simulated"][0]["inside"]
    assert [each["site"] for each in inside] == ["a", "b"]
    for each in inside:
        assert each["micro_batches"] == 16
        busy_s = max(each["stages_busy_s"])
        # (p - 1) / (v m), less what the logits of the last stage make of it.
        assert each["pipeline_s"] / busy_s - 1 == pytest.approx(3 / 32, rel=0.4)
    result = data["settings"][0]["result"]
    assert result["predicted"]["deviation"] == pytest.approx(0.0, abs=0.08)
    assert result["efficiency"]["mean"] < 1
    people = isthmus(*asked[:-1], "two", *cut("{pipeline: 2, tensor: 4}"))
    assert "inside each site" in people.out
    assert "pipeline 2" in people.out
    runs = ("piped-0", "--home", home / "bench" / "piped")
    assert isthmus("report", *runs, "--json").envelope["data"]["runs"][0]["gaps"] == []
    assert isthmus("trace", *runs, "--json").envelope["data"]["gaps"] == []


@pytest.mark.no_cover
def test_rounds_are_simulated_reported_and_traced(
    isthmus: Isthmus, files: Path, home: Path
) -> None:
    asked = (
        *("simulate", files / "job.yaml", "--sweep", "links.*.bandwidth=2Mbit/s", "--json"),
        *("--set", "reduction.tree=gather"),
    )
    every = isthmus(*asked).envelope["data"]["settings"][0]["result"]
    options = {
        "diloco": ("--local-steps", "10"),
        "streamed": ("--local-steps", "10", "--fragments", "2", "--overlap-steps", "1"),
    }
    found = {}
    for name, each in options.items():
        done = isthmus(*asked, *each, "--name", name)
        assert done.code == 0, done.err
        assert len(done.envelope["data"]["simulated"][0]["steps_s"]) == 30
        found[name] = done.envelope["data"]["settings"][0]["result"]
        assert found[name]["predicted"]["deviation"] == pytest.approx(0.0, abs=0.02)
        for link in found[name]["links"]:
            [whole] = [one for one in every["links"] if one["target"] == link["target"]
                       and one["source"] == link["source"]]  # fmt: skip
            wanted = pytest.approx(whole["bytes_per_step"] / 10, rel=0.01)
            assert link["bytes_per_step"] == wanted
    steps_s = [each["step_s"]["mean"] for each in (found["streamed"], found["diloco"], every)]
    assert steps_s == sorted(steps_s)
    runs = ("streamed-0", "--home", home / "bench" / "streamed")
    told = " ".join(isthmus("status", *runs).out.split())
    assert "rounds of 10 steps, 2 fragments, each back 1 step later" in told
    report = isthmus("report", *runs, "--json").envelope["data"]["runs"][0]
    assert report["gaps"] == []
    assert report["steps"] == 30
    assert isthmus("trace", *runs, "--json").envelope["data"]["gaps"] == []


@pytest.mark.no_cover
def test_a_job_s_own_regime_is_simulated(isthmus: Isthmus, files: Path) -> None:
    def simulated(*options: str) -> dict[str, Any]:
        done = isthmus("simulate", files / "job.yaml", *options, "--json")
        assert done.code == 0, done.err
        return dict(done.envelope["data"])

    told = ("--set", "regime={kind: diloco, sync_every: 10}")
    by_job = simulated(*told)
    assert by_job["simulated"] == simulated("--local-steps", "10")["simulated"]
    assert len(by_job["simulated"][0]["steps_s"]) == 10 + 20
    slow = ("--set", "exchange.codec=fp32", "--sweep", "links.*.bandwidth=40Mbit/s")
    sync, late = simulated(*slow, "--sweep", "regime=sync,delayed")["settings"]
    step_s = [each["result"]["step_s"]["mean"] for each in (late, sync)]
    assert step_s[0] < 0.8 * step_s[1]
    assert late["result"]["predicted"] is None


@pytest.mark.parametrize(
    ("options", "code", "word"),
    [
        (["--stragglers", "gamma:5%"], "USAGE", "want one of exponential"),
        (["--stragglers", "uniform"], "USAGE", "want a share"),
        (["--mtbf", "10"], "USAGE", "unit"),
        (["--mtbf", "0s"], "USAGE", "--mtbf"),
        (["--mtbf", "1h", "--faults", "f.yaml"], "USAGE", "--faults"),
        (["--faults", "absent.yaml"], "INVALID_CONFIG", "No such file"),
        (["--name", "../x"], "USAGE", "--name"),
        (["--steps", "0"], "USAGE", "--steps"),
        (["--sweep", "links.*.rtt"], "INVALID_CONFIG", "want PATH=V1,V2"),
        (["--sweep", "links.*.rtx=5ms,6ms"], "INVALID_CONFIG", "did you mean 'rtt'"),
        (["--set", "entrypoint=train.py"], "INVALID_CONFIG", "trainer.model"),
        (
            ["--sweep", "regime=sync,diloco"],
            "USAGE",
            "regime=diloco: it has other rounds than the job: simulate it by itself, with --set",
        ),
        (
            ["--set", "regime=diloco", "--steps", "20"],
            "USAGE",
            "--steps: want whole rounds, a multiple of their 30 steps; got 20",
        ),
        (["--fragments", "2"], "USAGE", "no use without --local-steps"),
        (["--local-steps", "4", "--fragments", "5"], "USAGE", "want at most 4"),
        (["--local-steps", "4", "--overlap-steps", "5"], "USAGE", "want at most 4"),
        (["--local-steps", "4", "--steps", "5"], "USAGE", "--steps: want whole rounds"),
        (["--local-steps", "4", "--warmup", "3"], "USAGE", "--warmup: want whole rounds"),
        (
            ["--local-steps", "4", "--mtbf", "1h", "--checkpoint-every", "3"],
            "USAGE",
            "--checkpoint-every: want whole rounds",
        ),
        (["--set", "probe={}"], "INVALID_CONFIG", "trains nothing"),
        (["--mtbf", "1us", "--recovery", "1s"], "USAGE", "failures in a row"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    isthmus: Isthmus, files: Path, options: list[str], code: str, word: str
) -> None:
    done = isthmus("simulate", files / "job.yaml", *options, "--json")
    assert done.envelope["error"]["code"] == code, done.err
    assert word in done.envelope["error"]["message"]
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("options", "where", "word"),
    [
        ([], "job.yaml:5:11: ", "want a `plan` section"),
        (
            ["--set", "placement=[{site: a, sequences: 32}, {site: b, sequences: 32}]"],
            "--set placement: ",
            "want `parallel`",
        ),
        (cut("{pipeline: 32}"), "", "are 32 ranks"),
        (cut("{pipeline: 8}", 4), "", "add up to 8"),
        (cut("{context: 8, data: 1}"), "", "does not divide the sequence of 511 tokens"),
        (cut("{data: 8}", 4), "", "one for each replica"),
    ],
)
def test_cuts_that_cannot_be_simulated_are_refused_at_their_place(
    isthmus: Isthmus, described: Path, options: list[str], where: str, word: str
) -> None:
    text = described.read_text()
    if "511" in word:
        described.write_text(text.replace("512", "511"))
    if "replica" in word:
        described.write_text(text.replace("global_batch: 64", "global_batch: 8"))
    done = isthmus("simulate", described, *options)
    assert done.code == 2
    assert word in done.err
    assert where in done.err


def test_a_cut_that_does_not_fit_is_simulated_and_warned_of_as_a_plan_does(
    isthmus: Isthmus, described: Path
) -> None:
    options = [*cut("{data: 8}"), "--set", "workload.width=65536"]
    planned = isthmus("plan", described, *options)
    simulated = isthmus("simulate", described, *options, "--steps", "1")
    assert (planned.code, simulated.code) == (0, 0), planned.err + simulated.err
    assert "a, b: tensor 1, data 8, micro-batch 1 does not fit: needs" in simulated.err
    [warned] = [each for each in simulated.err.splitlines() if "does not fit" in each]
    assert warned in " ".join(planned.out.split())


def test_a_name_that_is_taken_is_refused(isthmus: Isthmus, files: Path) -> None:
    asked = ("simulate", files / "job.yaml", "--name", "twice", "--steps", "1")
    assert isthmus(*asked).code == 0
    again = isthmus(*asked, "--json")
    assert again.envelope["error"]["code"] == "REFUSED"
    message = again.envelope["error"]["message"]
    assert "'twice'" in message
    assert "--resume" not in message, "there is no such option"


@pytest.mark.no_cover
def test_a_job_that_asks_for_a_plan_is_simulated_as_launch_would_run_it(
    isthmus: Isthmus, job: Path
) -> None:
    job.write_text(f"{SMALL_JOB}plan: {{codecs: [int8]}}\n")
    sweep = ("--sweep", "links.*.bandwidth=1kbit/s,1Gbit/s")
    done = isthmus("simulate", job, "--json", "--steps", "2", *sweep)
    assert done.code == 0, done.err
    assert "links.*.bandwidth=1kbit/s: plan: 1 of 3 sites take part" in done.err
    assert "links.*.bandwidth=1Gbit/s: plan: 3 of 3 sites take part" in done.err
    alone, together = done.envelope["data"]["settings"]
    assert (len(alone["runs"]), len(together["runs"])) == (2, 4)


def test_a_batch_too_small_for_all_sites_says_who_would_idle(
    isthmus: Isthmus, described: Path
) -> None:
    described.write_text(
        described.read_text().replace("global_batch: 64", "global_batch: 1")
        + "plan: {sites: all}\n"
    )
    done = isthmus("plan", described)
    assert done.code == 2
    assert "b would stay without a sequence" in done.err
    assert "want at least 2 (a 1, b 1), got 1" in done.err
    assert "[workload.global_batch]" in done.err


@pytest.mark.no_cover
def test_what_is_predicted_counts_collectives_inside_sites(isthmus: Isthmus, files: Path) -> None:
    """With them left out, the predicted efficiency of a slow fabric was a quarter too low."""
    fabric = "{node: 300MB/s, cluster: 30MB/s, latency: 20us}"
    changes = (f"sites.0.fabric={fabric}", f"sites.1.fabric={fabric}", "links.0.bandwidth=2Mbit/s")
    options = [option for change in changes for option in ("--set", change)]
    done = isthmus("simulate", files / "job.yaml", *options, "--json")
    assert done.code == 0, done.err
    found = done.envelope["data"]["settings"][0]["result"]
    assert found["predicted"]["efficiency"] == pytest.approx(found["efficiency"]["mean"], rel=0.1)
