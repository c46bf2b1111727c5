"""What `validate` finds beyond the text, and `launch` refuses in the same words and places."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.topology.presets.templates import topology_yaml
from tests.cli.conftest import Isthmus

JOB = """\
version: 1
name: job
topology: topology.yaml
entrypoint: train.py
"""
JOINING = "import isthmus\nsite = isthmus.join()\nsite.attach(model, optimizer)\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "topology.yaml").write_text(topology_yaml())
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "train.py").write_text(JOINING)
    return tmp_path


def mistakes(isthmus: Isthmus, *arguments: str | Path) -> list[tuple[str, str, str]]:
    """Return `line:column`, path and message of what `validate` and `launch` refuse alike."""
    done = isthmus("validate", *arguments, "--json")
    assert done.code == 2, done.err
    launched = isthmus("launch", *arguments, "--json")
    where = done.envelope["error"]["where"]
    assert launched.envelope["error"]["where"] == where
    return [(f"{each['line']}:{each['column']}", each["path"], each["message"]) for each in where]


def warned(isthmus: Isthmus, *arguments: str | Path) -> list[tuple[str, str]]:
    """Return `line:column` and message of each warning of what is valid."""
    done = isthmus("validate", *arguments, "--json")
    assert done.code == 0, done.err
    (entry,) = done.envelope["data"]["files"]
    assert entry["warnings"][-len(entry["warnings_at"]) or len(entry["warnings"]) :] == [
        each["message"] for each in entry["warnings_at"]
    ]
    assert done.err.count("warning: ") == len(entry["warnings"])
    return [(f"{each['line']}:{each['column']}", each["message"]) for each in entry["warnings_at"]]


def test_a_script_that_joins_has_nothing_to_be_told(isthmus: Isthmus, folder: Path) -> None:
    assert warned(isthmus, folder / "job.yaml") == []


def test_a_missing_entrypoint(isthmus: Isthmus, folder: Path) -> None:
    (folder / "train.py").unlink()
    told = f"the entrypoint {folder}/train.py: No such file or directory"
    assert mistakes(isthmus, folder / "job.yaml") == [("4:13", "entrypoint", told)]


def test_an_entrypoint_that_is_not_python_is_told_at_its_own_line(
    isthmus: Isthmus, folder: Path
) -> None:
    (folder / "train.py").write_text("import isthmus\nsite = = 3\n")
    done = isthmus("validate", folder / "job.yaml", "--json")
    (where,) = done.envelope["error"]["where"]
    assert (where["file"], where["line"]) == (str(folder / "train.py"), 2)
    assert "not Python" in where["message"]


def test_a_pattern_that_matches_nothing(isthmus: Isthmus, folder: Path) -> None:
    (folder / "job.yaml").write_text(
        JOB.replace("entrypoint: train.py", "trainer: {data: {files: [train.py, '*.text']}}")
    )
    told = f"no file matches '{folder}/*.text'"
    assert mistakes(isthmus, folder / "job.yaml") == [("4:36", "trainer.data.files.1", told)]


def test_a_topology_that_is_not_there_is_told_at_its_line(isthmus: Isthmus, folder: Path) -> None:
    (folder / "topology.yaml").unlink()
    told = f"{folder}/topology.yaml: No such file or directory"
    assert mistakes(isthmus, folder / "job.yaml") == [("3:11", "topology", told)]


@pytest.mark.parametrize(
    ("script", "joins"),
    [
        (JOINING, True),
        ("from isthmus import join\nsite = join(alone=True, averages=False)", True),
        ("from isthmus import join as enter\nenter().attach(m, o)", True),
        (
            "import isthmus as wan\n\ndef main():\n    with wan.join() as site: site.broadcast(m)",
            True,
        ),
        (
            "import isthmus.sites.worker.api.joining\nisthmus.sites.worker.joining.join().all_reduce([t])",
            True,
        ),
        ("import helper", True),
        ("from package import helper", True),
        ("import isthmus, helper\nmain(isthmus.join)", True),
        ("import isthmus", False),
        ("import os\nos.path.join('a', 'b')", False),
        ("from isthmus import Site\n','.join([])", False),
        ("import other", False),
    ],
)
def test_a_script_that_never_joins(
    isthmus: Isthmus, folder: Path, script: str, joins: bool
) -> None:
    (folder / "train.py").write_text(script)
    (folder / "helper.py").write_text(JOINING)
    (folder / "other.py").write_text("import train\nimport json")
    (folder / "package").mkdir()
    (folder / "package" / "helper.py").write_text(JOINING)
    found = warned(isthmus, folder / "job.yaml")
    if joins:
        assert found == []
    else:
        ((place, told),) = found
        assert place == "4:13"
        assert told.startswith(f"the entrypoint {folder}/train.py never calls isthmus.join()")
        assert "site = isthmus.join(); site.attach(model, optimizer)" in told


@pytest.mark.parametrize(
    ("script", "averages"),
    [
        ("site.average_gradients(optimizer)", True),
        ("site.all_reduce([loss])", True),
        ("run.site.broadcast(model)", True),
        ("getattr(site, 'attach')(model, optimizer)", True),
        ("from isthmus.sites.integrations.transformers import train", True),
        ("import helper", True),
        ("print('evaluating')", False),
        ("import torch\ntorch.cuda.synchronize()", False),
        ("import torch.distributed as dist\ndist.all_reduce(loss)\ndist.broadcast(w, 0)", False),
        ("from torch import distributed as d, cuda\nd.all_reduce(loss); cuda.synchronize()", False),
        ("import other", False),
    ],
)
def test_a_script_that_joins_and_never_averages(
    isthmus: Isthmus, folder: Path, script: str, averages: bool
) -> None:
    (folder / "train.py").write_text(f"import isthmus\nsite = isthmus.join()\n{script}\n")
    (folder / "helper.py").write_text("def train(site, *more):\n    site.attach(*more)\n")
    (folder / "other.py").write_text("import json")
    found = warned(isthmus, folder / "job.yaml")
    if averages:
        assert found == []
    else:
        ((place, told),) = found
        assert place == "4:13"
        assert "train.py joins, and never calls site.attach()" in told
        assert "isthmus.join(averages=False)" in told


def test_a_round_trip_that_is_shorter_than_lights(isthmus: Isthmus, folder: Path) -> None:
    told = (
        "10ms is less than light in fibre takes for the 3622km between 'oregon' and 'virginia', "
        "35.49ms there and back: correct it, or the locations"
    )
    topology = folder / "topology.yaml"
    text = topology.read_text()
    topology.write_text(text.replace("rtt: 62ms", "rtt: 10ms"))
    number, line = next(
        (number, line) for number, line in enumerate(text.splitlines(), 1) if "rtt: 62ms" in line
    )
    at = f"{number}:{line.index('62ms') + 1}"
    assert warned(isthmus, topology) == [(at, told)]  # emulated: physics is no limit
    assert warned(isthmus, folder / "job.yaml") == [(at, told)]
    topology.write_text(topology.read_text().replace("emulate: true", "emulate: false"))
    assert mistakes(isthmus, folder / "job.yaml") == [(at, "links.0.rtt", told)]


def test_a_measured_round_trip_tells_that_the_locations_are_wrong(
    isthmus: Isthmus, folder: Path
) -> None:
    topology = folder / "topology.yaml"
    found = warned(
        isthmus, topology, "--set", "emulate=false", "--set", "links.0.measured={rtt: 9ms}"
    )
    ((_, told),) = found
    assert told.startswith("9ms is less than light")


def test_rounds_of_one_step_with_outer_momentum_are_a_warning(
    isthmus: Isthmus, folder: Path
) -> None:
    job = folder / "job.yaml"
    job.write_text(f"{JOB}regime: {{kind: diloco, sync_every: 1}}\n")
    ((place, message),) = warned(isthmus, job)
    assert place == "5:36"
    assert message == (
        "rounds of one step with outer momentum 0.9 train worse than any longer ones "
        "(arXiv 2503.09799, figure 9): want 10 steps or more, or kind: sync"
    )
    for fine in ("outer.momentum=0", "sync_every=2", "kind=local_sgd"):
        assert warned(isthmus, job, "--set", f"regime.{fine}") == []
    assert warned(isthmus, job, "--set", "regime=delayed") == []


def test_steps_in_no_round_are_a_warning_where_the_trainer_takes_them(
    isthmus: Isthmus, folder: Path
) -> None:
    job = folder / "job.yaml"
    text = f"{JOB}regime: {{kind: diloco, sync_every: 30}}\n"
    job.write_text(text)
    assert warned(isthmus, job, "--set", "trainer.steps=100") == [], "the script decides"
    job.write_text(text.replace("entrypoint: train.py\n", ""))
    assert warned(isthmus, job, "--set", "trainer.steps=120") == []
    ((place, message),) = warned(isthmus, job, "--set", "trainer.steps=100")
    assert place == "4:36"
    assert message == (
        "trainer.steps is 100, and rounds have 30 steps: the last 10 are in no round, so nobody "
        "evaluates or saves them"
    )
