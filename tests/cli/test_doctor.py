"""`isthmus doctor`, and what `launch` refuses of what it finds."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

from tests.cli.conftest import Isthmus
from tests.fakes.machines import WAN


def test_nothing_to_mend(isthmus: Isthmus, files: Path) -> None:
    done = isthmus("doctor", files / "topology.yaml", "--job", files / "job.yaml")
    assert done.code == 0
    assert "not fail" in done.out or "no problems found" in done.out


def test_a_finding_with_its_cure(isthmus: Isthmus, files: Path) -> None:
    job = files / "job.yaml"
    job.write_text("version: 1\nname: j\ntopology: topology.yaml\nentrypoint: train.py\n")
    done = isthmus("doctor", files / "topology.yaml", "--job", job)
    assert done.code == 3
    assert not done.out
    first = done.err.splitlines()[:3]
    assert first == [
        f"error: the entrypoint {files}/train.py: No such file or directory  [script-unreadable]",
        "    why: each rank runs it",
        f"    cure: ls -l {files}/train.py, then correct `entrypoint`, which begins at the job file's "
        "folder",
    ]
    told = isthmus("doctor", files / "topology.yaml", "--job", job, "--json").envelope["error"]
    assert told["code"] == "PREFLIGHT_FAILED"
    assert told["where"]["findings"][0]["kind"] == "script-unreadable"


def test_launch_refuses_what_would_fail_with_the_cure(isthmus: Isthmus, files: Path) -> None:
    home = files / "home"
    home.mkdir()
    (home / "runs").write_text("no folder")
    done = isthmus("launch", files / "job.yaml", "--home", home, "--json")
    assert done.code == 3
    error = done.envelope["error"]
    assert error["code"] == "PREFLIGHT_FAILED"
    assert "is a file, and no folder" in error["message"]
    assert "name a folder in --home" in done.err


def test_a_site_that_is_elsewhere_is_said_to_be(isthmus: Isthmus, files: Path) -> None:
    topology = files / "wan.yaml"
    topology.write_text(WAN)
    one = isthmus("doctor", topology, "--site", "a", "--json")
    assert one.code == 0
    assert {each["site"] for each in one.envelope["data"]["findings"]} <= {"a"}


def test_a_command_that_leads_to_a_site(isthmus: Isthmus, files: Path) -> None:
    topology = files / "wan.yaml"
    topology.write_text(WAN)
    well = isthmus("doctor", topology, "--at", f"b={sys.executable}", "--json")
    assert well.code == 0
    lost = isthmus("doctor", topology, "--at", "b=/no/python", "--json")
    (told,) = [
        each for each in lost.envelope["error"]["where"]["findings"] if each["severity"] == "error"
    ]
    assert (told["kind"], told["site"]) == ("no-answer", "b")
    for wrong in ("b", "b=", "b='", "bb=python"):
        assert isthmus("doctor", topology, "--at", wrong).code == 2


def test_a_link_that_is_quicker_than_light(isthmus: Isthmus, files: Path) -> None:
    (files / "topology.yaml").write_text(
        (files / "topology.yaml").read_text().replace("rtt: 62ms", "rtt: 6ms")
    )
    done = isthmus("doctor", files / "topology.yaml", "--set", "emulate=false", "--json")
    assert done.code == 3
    first = done.envelope["error"]["where"]["findings"][0]
    assert first["kind"] == "quicker-than-light"
    assert "6ms is less than light" in first["found"]


def test_facts_are_one_json_object() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "isthmus.sites.facts"], capture_output=True, text=True, check=True
    )
    facts = json.loads(done.stdout)["result"]
    assert {"host", "build", "torch", "limits", "tcp", "clock_s"} <= facts.keys()


def test_a_question_that_is_none_is_refused_and_the_next_one_answered() -> None:
    asked = (
        'not json\n{"op": "ask_nothing"}\n{"op": "ask_clock"}\n[]\n'
        '{"op": "ask_listen", "host": "10.9.9.9"}'
    )
    command = f"printf %s {shlex.quote(asked)} | {sys.executable} -m isthmus.sites.facts --serve"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [bool(each["problem"]) for each in answers] == [True, True, False, True, True]
    assert "doctor to machine: the line is not JSON" in answers[0]["problem"]
    assert isinstance(answers[2]["result"], float)


def test_a_burn_in_says_what_each_device_has_computed(isthmus: Isthmus, files: Path) -> None:
    done = isthmus("doctor", files / "topology.yaml", "--burn-in", "100ms", "--json")
    assert done.code == 0
    (told,) = [each for each in done.envelope["data"]["findings"] if each["kind"] == "device-right"]
    assert "products of matrices had the same bits in 100ms" in told["found"]
