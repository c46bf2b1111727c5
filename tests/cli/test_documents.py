"""Reading the operator's files: what is wrong with a file is told like what is wrong in it."""

from pathlib import Path

import pytest

from isthmus.orchestrator.doctor.document_checks import light_problems, regime_problems
from isthmus.orchestrator.documents import (
    load_pair,
    load_topology_file,
    passed_on,
    read_text,
    with_overrides,
)
from isthmus.orchestrator.exporters.libraries import exporter_problems
from isthmus.protos.limits import DOCUMENT_BYTES
from isthmus.topology.presets.templates import job_yaml, topology_yaml
from isthmus.topology.spec.errors import ConfigError, Problem
from isthmus.topology.text import yaml_document
from isthmus.topology.text.yaml_document import Document, read_document


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "topology.yaml").write_text(topology_yaml())
    (tmp_path / "job.yaml").write_text(job_yaml())
    return tmp_path


def only_problem(told: pytest.ExceptionInfo[ConfigError]) -> Problem:
    (problem,) = told.value.problems
    return problem


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as told:
        read_text(tmp_path / "none.yaml")
    assert only_problem(told).message == "No such file or directory"
    assert only_problem(told).source.endswith("none.yaml")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Is a directory"):
        read_text(tmp_path)


def test_a_file_of_the_largest_size_and_one_byte_more(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    path.write_bytes(b"#" * DOCUMENT_BYTES)
    assert len(read_text(path)) == DOCUMENT_BYTES
    path.write_bytes(b"#" * (DOCUMENT_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        read_text(path)


def test_a_device_without_end_is_not_read_to_its_end() -> None:
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        read_text(Path("/dev/zero"))


def test_bytes_that_are_no_text_are_told_with_their_place(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"version: 1\nname: caf\xe9\n")
    with pytest.raises(ConfigError) as told:
        read_text(path)
    problem = only_problem(told)
    assert (problem.line, problem.column) == (2, 10)
    assert problem.message == "not UTF-8: byte 0xe9"


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "bom.yaml"
    path.write_bytes(b"\xef\xbb\xbfversion: 1\n")
    assert read_text(path) == "version: 1\n"


def test_a_pair_and_its_overrides(folder: Path) -> None:
    pair = load_pair(
        folder / "job.yaml", ["trainer.steps=7", "links.0.rtt=120ms", "name=other", "emulate=false"]
    )
    assert pair.job.trainer.steps == 7
    assert pair.job.name == "other"
    assert pair.topology.links[0].rtt_s == pytest.approx(0.12)
    assert not pair.topology.emulate
    assert pair.topology_document.overrides == ["links.0.rtt=120ms", "emulate=false"]


def test_whatever_is_asked_of_the_documents_they_are_read_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def noted(text: str, source: str) -> Document:
        read.append(Path(source).name)
        return read_document(text, source)

    monkeypatch.setattr(yaml_document, "read_document", noted)
    pair = load_pair(
        folder / "job.yaml",
        ["placement=[{site: oregon, sequences: 48}]", "pass_env=[NOWHERE]"],
        arguments=["--more"],
    )
    assert pair.job.arguments == ("--more",)
    assert [*light_problems(pair), *regime_problems(pair)] == []
    assert exporter_problems(pair.job, pair.job_document, {}) == []
    with pytest.raises(ConfigError, match="NOWHERE is not set"):
        passed_on(pair, {})
    decided = with_overrides(pair, ["exchange.codec=int8"])
    assert (decided.job.exchange.codec, pair.job.exchange.codec) == ("int8", "bf16-split")
    assert decided.job_document.overrides[:-1] == pair.job_document.overrides
    assert sorted(each for each in read if each.endswith(".yaml")) == ["job.yaml", "topology.yaml"]


def test_another_topology_than_the_job_names(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere.yaml"
    elsewhere.write_text(topology_yaml().replace("three-coasts", "elsewhere"))
    assert load_pair(folder / "job.yaml", (), elsewhere).topology.name == "elsewhere"


def test_mistakes_of_both_files_are_told_together(folder: Path) -> None:
    job, topology = folder / "job.yaml", folder / "topology.yaml"
    job.write_text(job.read_text().replace("steps: 150", "stepps: 150"))
    topology.write_text(topology.read_text().replace("rtt: 15ms", "rtt: 15"))
    with pytest.raises(ConfigError) as told:
        load_pair(job)
    assert {Path(problem.source).name for problem in told.value.problems} == {
        "job.yaml",
        "topology.yaml",
    }


def test_a_topology_that_is_not_there_is_told_beside_the_jobs_mistakes(folder: Path) -> None:
    (folder / "topology.yaml").unlink()
    job = folder / "job.yaml"
    job.write_text(job.read_text().replace("steps: 150", "stepps: 150"))
    with pytest.raises(ConfigError) as told:
        load_pair(job)
    unknown, absent = told.value.problems
    assert "stepps" in unknown.message
    assert absent.message == f"{folder / 'topology.yaml'}: No such file or directory"
    line = next(
        number
        for number, text in enumerate(job.read_text().splitlines(), start=1)
        if text.startswith("topology:")
    )
    assert (absent.line, absent.column) == (line, len("topology: ") + 1)


def test_rules_over_both_are_told_at_the_jobs_line(folder: Path) -> None:
    with pytest.raises(ConfigError) as told:
        load_pair(folder / "job.yaml", ["reduction.hub=nowhere", "reduction.tree=star"])
    assert "nowhere" in str(told.value)


def test_a_topology_alone(folder: Path) -> None:
    assert load_topology_file(folder / "topology.yaml", ["name=x"]).name == "x"
