"""init, validate, completion: the commands that need no run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import Isthmus


def test_init_writes_files_that_are_valid(isthmus: Isthmus, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    done = isthmus("init", folder)
    assert done.code == 0
    assert done.out.splitlines() == [str(folder / "topology.yaml"), str(folder / "job.yaml")]
    assert isthmus("validate", folder / "topology.yaml", folder / "job.yaml").code == 0


def test_init_overwrites_only_when_told(isthmus: Isthmus, files: Path) -> None:
    (files / "job.yaml").write_text("mine")
    refused = isthmus("init", files, "--json")
    assert refused.code == 8
    assert refused.envelope["error"]["code"] == "FILE_EXISTS"
    assert refused.envelope["error"]["where"]["files"]
    assert (files / "job.yaml").read_text() == "mine"
    assert isthmus("init", files, "--force", "--json").code == 0
    assert (files / "job.yaml").read_text() != "mine"


def test_validate_tells_the_kinds_apart(isthmus: Isthmus, files: Path) -> None:
    done = isthmus("validate", files / "job.yaml", files / "topology.yaml", "--json")
    assert done.code == 0
    job, topology = done.envelope["data"]["files"]
    assert (job["kind"], topology["kind"]) == ("job", "topology")
    assert job["topology"] == str(files / "topology.yaml")
    assert (topology["sites"], topology["ranks"], topology["links"]) == (3, 6, 6)


def test_validate_checks_a_fault_script_with_the_topology_beside_it(
    isthmus: Isthmus, files: Path
) -> None:
    faults, topology = files / "faults.yaml", files / "topology.yaml"
    faults.write_text("version: 1\nfaults:\n  - {at: 5s, cut: [oregon, virginai]}\n")
    alone = isthmus("validate", faults, "--json")
    assert alone.code == 0
    assert alone.envelope["data"]["files"] == [
        {"file": str(faults), "kind": "faults", "faults": 1, "topology": None}
    ]
    for other in (topology, files / "job.yaml"):
        done = isthmus("validate", faults, other, "--json")
        assert done.code == 2
        [where] = done.envelope["error"]["where"]
        assert (where["line"], where["path"]) == (3, "faults.0.cut.1")
        assert "did you mean 'virginia'?" in where["message"]
    faults.write_text(faults.read_text().replace("virginai", "virginia"))
    done = isthmus("validate", faults, topology, "--json")
    assert done.envelope["data"]["files"][0]["topology"] == "three-coasts"


def test_validate_gives_every_mistake_of_every_file_once(isthmus: Isthmus, files: Path) -> None:
    topology, job = files / "topology.yaml", files / "job.yaml"
    topology.write_text(topology.read_text().replace("rtt: 62ms", "rtt: 62"))
    job.write_text(job.read_text().replace("micro_batch", "micro_bach"))
    done = isthmus("validate", topology, job, files / "absent.yaml", "--json")
    assert done.code == 2
    error = done.envelope["error"]
    assert error["code"] == "INVALID_CONFIG"
    places = [(Path(each["file"]).name, each["path"]) for each in error["where"]]
    assert places.count(("topology.yaml", "links.0.rtt")) == 1
    assert ("job.yaml", "trainer.micro_bach") in places
    assert ("absent.yaml", "") in places
    rtt = next(each for each in error["where"] if each["path"] == "links.0.rtt")
    line = topology.read_text().splitlines()[rtt["line"] - 1]
    assert line[rtt["column"] - 1 :].startswith("62")
    assert set(rtt) == {"file", "line", "column", "path", "message"}


def test_validate_shows_people_the_line_and_a_caret(isthmus: Isthmus, files: Path) -> None:
    topology = files / "topology.yaml"
    topology.write_text(topology.read_text().replace("rtt: 62ms", "rttt: 62ms"))
    done = isthmus("validate", topology)
    assert done.code == 2
    assert not done.out
    assert f"{topology}:" in done.err
    assert "rttt: 62ms" in done.err
    assert "did you mean 'rtt'?" in done.err
    assert "^" in done.err


def test_validate_with_overrides(isthmus: Isthmus, files: Path) -> None:
    both = (files / "topology.yaml", files / "job.yaml")
    assert isthmus("validate", *both, "--set", "trainer.steps=3").code == 0
    done = isthmus("validate", *both, "--set", "trainer.steps=three", "--json")
    assert done.code == 2
    (where,) = done.envelope["error"]["where"]
    assert where["file"] == "--set trainer.steps"
    assert where["line"] == 0


@pytest.mark.parametrize("kind", ["topology", "job", "faults"])
def test_validate_prints_the_schema(isthmus: Isthmus, kind: str) -> None:
    plain = isthmus("validate", "--schema", kind)
    told = isthmus("validate", "--schema", kind, "--json")
    assert json.loads(plain.out) == told.envelope["data"]["schema"]
    assert told.envelope["data"]["schema"]["properties"]["version"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(isthmus: Isthmus, shell: str) -> None:
    plain = isthmus("completion", shell)
    told = isthmus("completion", shell, "--json")
    assert "_ISTHMUS_COMPLETE" in plain.out
    assert told.envelope["data"] == {"shell": shell, "script": plain.out.rstrip("\n") + "\n"}


@pytest.mark.multiprocess
def test_the_completion_script_is_good_bash(isthmus: Isthmus) -> None:
    script = isthmus("completion", "bash").out
    done = subprocess.run(
        ["bash", "-n"], input=script, text=True, capture_output=True, timeout=30, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
