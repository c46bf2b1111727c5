"""`isthmus report` and `isthmus trace`: which file, which stream, which error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Isthmus
from tests.fakes.recorded_benches import record_bench
from tests.fakes.recorded_runs import record_run


def test_the_latest_run_is_reported_into_its_folder(isthmus: Isthmus, home: Path) -> None:
    folder = record_run(home)
    done = isthmus("report")
    path = folder.path / "report.html"
    assert (done.code, done.out.strip(), done.err) == (0, str(path), "")
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_markdown_goes_to_stdout_or_a_file(isthmus: Isthmus, home: Path, tmp_path: Path) -> None:
    folder = record_run(home)
    done = isthmus("report", "r1", "--md")
    assert done.out.startswith("# hello-wan\n")
    assert not (folder.path / "report.html").exists()
    out = tmp_path / "r.md"
    written = isthmus("report", "r1", "--md", "--out", out)
    assert written.out.strip() == str(out)
    assert out.read_text(encoding="utf-8").strip() == done.out.strip()


def test_json_has_the_same_figures(isthmus: Isthmus, home: Path) -> None:
    record_run(home)
    data = isthmus("report", "--json").envelope["data"]
    assert data["report"].endswith("r1/report.html")
    (run,) = data["runs"]
    assert run["tokens_per_s"] == pytest.approx(15360)
    assert run["links"][0]["source"] == "oregon"
    assert len(run["timelines"][0]["sites"]["oregon"]["buckets"]) == 6
    assert data["benchmarks"] == []


def test_benchmarks_by_name_and_by_folder(isthmus: Isthmus, home: Path) -> None:
    folder = record_bench(home)
    done = isthmus("report", "b1")
    assert done.out.strip() == str(folder / "report.html")
    assert isthmus("report", folder).out == done.out
    data = isthmus("report", "b1", "--json").envelope["data"]
    assert data["benchmarks"][0]["settings"][0]["result"]["efficiency"]["mean"] > 0.7


def test_several_are_compared_in_a_file_that_is_named(
    isthmus: Isthmus, home: Path, tmp_path: Path
) -> None:
    record_run(home)
    record_run(home, "r2")
    record_bench(home)
    refused = isthmus("report", "r1", "r2", "b1")
    assert refused.code == 2
    assert "--out FILE" in refused.err
    out = tmp_path / "all.html"
    assert isthmus("report", "r1", "r2", "b1", "--out", out).code == 0
    assert "Side by side" in out.read_text(encoding="utf-8")
    assert len(isthmus("report", "r1", "r1", "--json").envelope["data"]["runs"]) == 1


def test_what_cannot_be_reported_is_told(isthmus: Isthmus, home: Path, tmp_path: Path) -> None:
    assert isthmus("report", "--json").envelope["error"]["code"] == "RUN_NOT_FOUND"
    assert isthmus("report", "../x", "--json").envelope["error"]["code"] == "RUN_NOT_FOUND"
    folder = record_bench(home)
    (folder / "bench.json").write_text('{"schema_version": 2}')
    broken = isthmus("report", "b1")
    assert broken.code == 2
    assert str(folder / "bench.json") in broken.err
    record_run(home)
    (tmp_path / "file").write_text("")
    refused = isthmus("report", "r1", "--out", tmp_path / "file" / "x.html", "--json")
    assert refused.envelope["error"]["code"] == "FILE_ERROR"


def test_a_trace_is_written_into_the_folder_or_a_file(
    isthmus: Isthmus, home: Path, tmp_path: Path
) -> None:
    folder = record_run(home)
    done = isthmus("trace")
    path = folder.path / "trace.json"
    assert (done.code, done.out.strip(), done.err) == (0, str(path), "")
    assert len(json.loads(path.read_text())["traceEvents"]) > 100
    out = tmp_path / "t.json"
    data = isthmus("trace", "r1", "--out", out, "--json").envelope["data"]
    assert (data["trace"], data["steps"], data["gaps"]) == (str(out), 7, [])
    assert out.read_text() == path.read_text()


def test_a_trace_says_what_it_lacks(isthmus: Isthmus, home: Path) -> None:
    folder = record_run(home, every=0)
    (folder.path / "topology.yaml").unlink()
    err = isthmus("trace").err
    assert "kept no buckets" in err
    assert "topology.yaml" in err
