"""isthmus simulate: its tables and envelope, sweeps, the run that it keeps, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.bench.record import BENCH, read_bench
from tests.cli.conftest import Isthmus

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


def test_a_sweep_is_that_of_bench(isthmus: Isthmus, files: Path, home: Path) -> None:
    done = isthmus(
        *("simulate", files / "job.yaml", "--json", "--name", "swept", "--steps", "2"),
        *("--sweep", "links.*.bandwidth=10Mbit/s,1Gbit/s", "--sweep", "codec=fp32,int8"),
        *("--set", "reduction.tree=gather", "--set", "trainer.model.width=256"),
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
        "version: 1\nseed: 7\nfaults:\n  - {at: 1s, cut: [oregon, virginia]}\n  - {at: 4s, heal: all}\n"
    )
    asked = ("simulate", files / "job.yaml", "--steps", "5", "--warmup", "0", "--json")
    plain = isthmus(*asked, "--name", "p").envelope["data"]["simulated"][0]
    cut = isthmus(*asked, "--name", "c", "--faults", script).envelope["data"]["simulated"][0]
    assert cut["wall_s"] > plain["wall_s"] + 1.0
    runs = ("c-0", "--home", home / "bench" / "c")
    report = isthmus("report", *runs, "--json").envelope["data"]["runs"][0]
    assert [fault["what"] for fault in report["faults"]] == ["cut", "cut", "heal", "heal"]
    assert report["gaps"] == []
    script.write_text("version: 1\nfaults:\n  - {at: 1s, pause: oregon, for: 1s}\n")
    refused = isthmus(*asked, "--name", "r", "--faults", script)
    assert refused.envelope["error"]["code"] == "USAGE"
    assert "only rate, rtt, cut" in refused.envelope["error"]["message"]


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


def test_a_name_that_is_taken_is_refused(isthmus: Isthmus, files: Path) -> None:
    asked = ("simulate", files / "job.yaml", "--name", "twice", "--steps", "1")
    assert isthmus(*asked).code == 0
    again = isthmus(*asked, "--json")
    assert again.envelope["error"]["code"] == "REFUSED"
    message = again.envelope["error"]["message"]
    assert "'twice'" in message
    assert "--resume" not in message, "there is no such option"
