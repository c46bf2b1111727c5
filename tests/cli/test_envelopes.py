"""Every command, with success and with each class of error that it can meet.

One envelope, and the right status.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from isthmus.orchestrator.cli.main import COMMANDS
from isthmus.protos.catalogue import CATALOGUE
from tests.cli.conftest import Isthmus
from tests.cli.runs import EVENTS, LINES, a_failed_run, a_folder, a_run
from tests.fakes.scripted_coordinator import ScriptedCoordinator, serving

NOWHERE = "127.0.0.1:1"


@dataclass(frozen=True)
class Case:
    """One command line, and the code that it ends with; none is success."""

    command: str
    arguments: tuple[str, ...] = ()
    code: str | None = None
    exit_code: int = 0
    answer: str = "well"
    """How the coordinator at {address} is: well, or the status that it refuses everything with."""


def error(command: str, *arguments: str, code: str, answer: str = "well") -> Case:
    return Case(command, arguments, code, int(CATALOGUE[code].exit_code), answer)


AT = ("--coordinator", "{address}")
ABOUT_RUNS = ("status", "logs", "events", "wait", "cancel")
WRITING = ("report", "trace")
OF_ONE = ("coordinator", "--topology", "{files}/topology.yaml", "--state", "{files}/state")
AGENT = ("agent", "--topology", "{files}/topology.yaml", "--state", "{files}/state")

CASES = [
    Case("init", ("{files}/new",)),
    error("init", "{files}", code="FILE_EXISTS"),
    error("init", "{files}/job.yaml/below", code="FILE_ERROR"),
    Case("validate", ("{files}/job.yaml",)),
    Case("validate", ("{files}/topology.yaml",)),
    Case("validate", ("--schema", "job")),
    error("validate", "{files}/absent.yaml", code="INVALID_CONFIG"),
    error("validate", "{files}/topology.yaml", "--set", "links.0.rtt=1", code="INVALID_CONFIG"),
    Case("topology", ("presets",)),
    Case("topology", ("show", "{files}/topology.yaml")),
    error("topology", "show", "{files}/absent.yaml", code="INVALID_CONFIG"),
    Case("checkpoints", ("list", "{files}")),
    error("checkpoints", "list", code="RUN_NOT_FOUND"),
    Case("runs", ("list",)),
    Case("runs", ("prune", "--keep", "3", "-y")),
    error("runs", "prune", code="USAGE"),
    error("runs", "remove", "gone", "-y", code="RUN_NOT_FOUND"),
    Case("doctor", ("{files}/topology.yaml", "--job", "{files}/job.yaml")),
    error("doctor", "{files}/absent.yaml", code="INVALID_CONFIG"),
    error("doctor", "{files}/topology.yaml", "--site", "oregonn", code="USAGE"),
    error("doctor", "{files}/topology.yaml", "--home", "{files}/job.yaml", code="USAGE"),
    error(
        *("doctor", "{files}/topology.yaml", "--home", "{files}/job.yaml/below"),
        code="PREFLIGHT_FAILED",
    ),
    error("probe", "{files}/absent.yaml", code="INVALID_CONFIG"),
    error("probe", "{files}/topology.yaml", "--set", "links.0.rtt=1", code="INVALID_CONFIG"),
    error("probe", "{files}/topology.yaml", "--window", "1h", code="USAGE"),
    error("up", "{files}/absent.yaml", code="INVALID_CONFIG"),
    error("down", "{files}/absent.yaml", code="INVALID_CONFIG"),
    Case(
        "render",
        (
            *("slurm", "{files}/topology.yaml", "--out", "{files}/out"),
            *("--coordinator", "127.0.0.1:7443", "--set", "sites.0.launcher={{kind: slurm}}"),
        ),
    ),
    error("render", "slurm", "{files}/topology.yaml", code="INVALID_CONFIG"),
    error("render", "kubernetes", "{files}/topology.yaml", "--image", "i", code="INVALID_CONFIG"),
    Case("completion", ("bash",)),
    Case("man"),
    Case("explain"),
    Case("explain", ("RANK_KILLED",)),
    Case("explain", ("7",)),
    error("explain", "RANK_KILED", code="USAGE"),
    Case("certs", ("init", "{files}/topology.yaml", "--folder", "{files}/certs")),
    error("certs", "show", "--folder", "{files}/none", code="BAD_CERTIFICATE"),
    error("certs", "issue", "root", "--folder", "{files}/none", code="BAD_CERTIFICATE"),
    Case("emulate", ("--clean",)),
    error("emulate", "--enter", "gone", "oregon", "true", code="EMULATION_NOT_FOUND"),
    error("emulate", "--apply", "gone", "heal: all", code="EMULATION_NOT_FOUND"),
    error("emulate", "{files}/absent.yaml", code="INVALID_CONFIG"),
    error(
        "emulate", "{files}/topology.yaml", "--faults", "{files}/job.yaml", code="INVALID_CONFIG"
    ),
    error("emulate", "--apply", "x", "--clean", code="USAGE"),
    error("emulate", "{files}/topology.yaml", "--serve", "nowhere=127.0.0.1:1", code="USAGE"),
    error(
        *("emulate", "{files}/topology.yaml", "--serve", "oregon=10.0.0.1:1"),
        code="INSECURE_ADDRESS",
    ),
    error("launch", "{files}/job.yaml", "--faults", "{files}/absent.yaml", code="INVALID_CONFIG"),
    error("launch", "{files}/job.yaml", "--seed", "3", code="USAGE"),
    error("launch", "{files}/job.yaml", "--faults", "f.yaml", *AT, code="USAGE"),
    error("launch", "{files}/job.yaml", "--faults", "f.yaml", "--no-emulate", code="USAGE"),
    Case("launch", ("{files}/job.yaml", "--detach", *AT)),
    Case("launch", ("{job}", "--set", "plan.sites=auto", "--detach", *AT)),
    error("launch", "{files}/job.yaml", "--plan", "{files}/absent.yaml", code="INVALID_CONFIG"),
    error("launch", "{files}/job.yaml", "--plan", "{files}/job.yaml", code="INVALID_CONFIG"),
    Case("plan", ("{job}",)),
    Case("plan", ("{job}", "--out", "{files}/plan.yaml")),
    error("plan", "{files}/absent.yaml", code="INVALID_CONFIG"),
    error("plan", "{files}/job.yaml", "--diff", "{files}/job.yaml", code="INVALID_CONFIG"),
    error("plan", "{files}/job.yaml", "--set", "exchange.schedule=off", code="INVALID_CONFIG"),
    error("plan", "{job}", "--out", "{files}/job.yaml/below", code="FILE_ERROR"),
    Case("launch", ("{files}/job.yaml", "--run-id", "r1", *AT)),
    error("launch", "{files}/absent.yaml", code="INVALID_CONFIG"),
    error("run", "{files}/absent.py", code="INVALID_CONFIG"),
    error("launch", "{files}/job.yaml", "--set", "trainer.stepps=1", code="INVALID_CONFIG"),
    error("launch", "{files}/job.yaml", "--coordinator", NOWHERE, code="COORDINATOR_UNREACHABLE"),
    error("launch", "{files}/job.yaml", "--coordinator", "192.0.2.1:1", code="INSECURE_ADDRESS"),
    error("launch", "{files}/job.yaml", *AT, code="REFUSED", answer="ALREADY_EXISTS"),
    error("launch", "{files}/job.yaml", *AT, code="INVALID_CONFIG", answer="INVALID_ARGUMENT"),
    error("launch", "{files}/job.yaml", *AT, code="CONFIG_MISMATCH", answer="FAILED_PRECONDITION"),
    error("launch", "{files}/job.yaml", *AT, code="INTERNAL", answer="UNKNOWN"),
    *(Case(command, ("r1", *AT)) for command in ABOUT_RUNS),
    *(Case(command, tuple(AT)) for command in ABOUT_RUNS),
    Case("status", ("--all", *AT)),
    Case("status", ("--all",)),
    Case("status", ("--watch", *AT)),
    Case("logs", ("-f", *AT)),
    Case("events", ("-f", *AT)),
    Case("queue", (*AT,)),
    error("queue", code="RUN_NOT_FOUND"),
    *(
        error("sites", verb, "oregon", "--coordinator", NOWHERE, code="COORDINATOR_UNREACHABLE")
        for verb in ("add", "drop")
    ),
    error("queue", "--coordinator", NOWHERE, code="COORDINATOR_UNREACHABLE"),
    *(error(command, code="RUN_NOT_FOUND") for command in ABOUT_RUNS),
    *(error(command, "r9", *AT, code="RUN_NOT_FOUND") for command in ABOUT_RUNS),
    *(error(command, "r9", code="RUN_NOT_FOUND") for command in ABOUT_RUNS),
    *(
        error(command, "--coordinator", NOWHERE, code="COORDINATOR_UNREACHABLE")
        for command in ABOUT_RUNS
    ),
    *(
        error(command, "--coordinator", "example.org:1", code="INSECURE_ADDRESS")
        for command in ABOUT_RUNS
    ),
    *(error(command, *AT, code="STALE_GENERATION", answer="ABORTED") for command in ABOUT_RUNS),
    *(error(command, *AT, code="INTERNAL", answer="UNIMPLEMENTED") for command in ABOUT_RUNS),
    *(error(command, "--nonsense", code="USAGE") for command in COMMANDS),
    *(Case(command, ("r1", "--out", "{files}/out", *AT)) for command in WRITING),
    *(error(command, "r1", *AT, code="USAGE") for command in WRITING),
    *(
        error(command, "r1", "--out", "{files}/job.yaml/out", *AT, code="FILE_ERROR")
        for command in WRITING
    ),
    *(error(command, code="RUN_NOT_FOUND") for command in WRITING),
    *(
        error(command, "--coordinator", NOWHERE, code="COORDINATOR_UNREACHABLE")
        for command in WRITING
    ),
    Case("simulate", ("{files}/job.yaml", "--steps", "2", "--out", "{files}/simulated")),
    error("simulate", "{files}/absent.yaml", code="INVALID_CONFIG"),
    error("simulate", "{files}/job.yaml", "--sweep", "links.*.rtt", code="INVALID_CONFIG"),
    error("simulate", "{files}/job.yaml", "--out", "{files}/job.yaml/below", code="FILE_ERROR"),
    error("wait", "--timeout", "10", code="USAGE"),
    error(*OF_ONE, "--bind", "0.0.0.0:0", code="INSECURE_ADDRESS"),
    error(*OF_ONE, "--set", "failure.min_sites=9", code="INVALID_CONFIG"),
    error("coordinator", "--state", "{files}/state", code="USAGE"),
    error("coordinator", "--state", "{files}/state", "--abandon", "r1", code="FILE_ERROR"),
    error(*AGENT, "--site", "oregonn", "--coordinator", NOWHERE, code="USAGE"),
    error(
        *(*AGENT, "--site", "oregon", "--coordinator", NOWHERE, "--bind", "10.0.0.1"),
        code="INSECURE_ADDRESS",
    ),
    error(*AGENT, "--site", "oregon", "--coordinator", "10.0.0.1:1", code="INSECURE_ADDRESS"),
]


PARAMETERS = {
    case: pytest.param(
        case,
        id=" ".join([case.command, *case.arguments, f"-> {case.code or 'ok'}"]),
        marks=pytest.mark.no_cover if "{job}" in case.arguments else (),  # it is planned
    )
    for case in CASES
}


@pytest.fixture
def coordinator() -> Iterator[tuple[ScriptedCoordinator, str]]:
    scripted = ScriptedCoordinator(
        runs=[a_run("ACTIVE")], watched=[a_run("SUCCEEDED")], lines=LINES, events=EVENTS
    )
    with serving(scripted) as address:
        yield scripted, address


@pytest.fixture
def words(
    files: Path,
    job: Path,
    case: Case,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> list[str]:
    """A case's arguments; its coordinator, if it has one, answers as the case has it."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    address = ""
    if "{address}" in case.arguments:
        scripted, address = request.getfixturevalue("coordinator")
        if case.answer != "well":
            scripted.refuses_with = (grpc.StatusCode[case.answer], "why it refuses")
    return [word.format(address=address, files=files, job=job) for word in case.arguments]


@pytest.mark.parametrize("case", PARAMETERS.values())
def test_one_envelope(isthmus: Isthmus, case: Case, words: list[str]) -> None:
    done = isthmus(case.command, *words, "--json")

    assert done.code == case.exit_code, done.err
    streams = not {"-f", "--watch"}.isdisjoint(words)
    envelope = done.lines[-1] if streams else done.envelope
    assert (envelope.get("event") == "terminal") is streams
    assert envelope["schema_version"] == 1
    assert envelope["command"] == case.command
    assert envelope["exit_code"] == case.exit_code
    assert "Traceback" not in done.err
    if case.code is None:
        assert envelope["status"] == "ok"
        assert "data" in envelope
        return
    assert envelope["status"] == "error"
    assert set(envelope["error"]) == {"code", "message", "hint", "page", "where"}
    assert envelope["error"]["code"] == case.code
    assert envelope["error"]["hint"] == CATALOGUE[case.code].hint
    assert envelope["error"]["message"]
    assert done.err


@pytest.mark.parametrize("case", [each for case, each in PARAMETERS.items() if case.code])
def test_to_people_an_error_is_on_stderr_only(
    isthmus: Isthmus, case: Case, words: list[str]
) -> None:
    done = isthmus(case.command, *words)

    assert done.code == case.exit_code
    assert not done.out
    assert "error: " in done.err
    assert "hint: " in done.err
    assert "Traceback" not in done.err


def test_every_command_is_among_the_cases_with_success_and_error() -> None:
    # A coordinator and an agent run until they are stopped: tests/multiprocess sees them succeed.
    # A benchmark is many runs: tests/cli/test_bench.py. A probe is one: tests/cli/test_probe.py.
    # What is up has to be taken down: tests/multiprocess/test_up.py.
    # Sites leave and come where there is a run: tests/multiprocess/test_returning_site.py.
    # A dashboard serves until it is stopped: tests/multiprocess/test_dashboard.py.
    # A script that brings no topology trains here: tests/multiprocess/test_client_page.py.
    elsewhere = {
        "coordinator",
        "agent",
        "bench",
        "dashboard",
        "probe",
        "up",
        "down",
        "sites",
        "run",
    }
    assert {case.command for case in CASES if case.code is None} == set(COMMANDS) - elsewhere
    assert {case.command for case in CASES if case.code} == set(COMMANDS)


@pytest.mark.parametrize("code", sorted(CATALOGUE))
@pytest.mark.parametrize("command", ["wait", "launch"])
def test_each_reason_code_of_a_run_becomes_the_exit_status(
    isthmus: Isthmus,
    files: Path,
    job: Path,
    coordinator: tuple[ScriptedCoordinator, str],
    command: str,
    code: str,
) -> None:
    scripted, address = coordinator
    scripted.watched = [a_run("ACTIVE"), a_failed_run(code)]
    arguments = ("r1",) if command == "wait" else (str(files / "job.yaml"), "--run-id", "r1")

    done = isthmus(command, *arguments, "--coordinator", address, "--json")

    assert done.code == CATALOGUE[code].exit_code
    failed = done.envelope["error"]
    assert failed["code"] == code
    assert failed["message"] == "rank 1 of b ended"
    assert failed["where"]["run_id"] == "r1"
    assert failed["where"]["site"] == "b"
    assert failed["where"]["rank"] == 1
    assert failed["where"]["exit_code"] == -9
    assert failed["where"]["log_path"] == "/logs/b/rank1.log"


def test_a_cancelled_run_and_a_reason_from_the_future(
    isthmus: Isthmus, coordinator: tuple[ScriptedCoordinator, str]
) -> None:
    scripted, address = coordinator
    scripted.watched = [a_run("CANCELLED", reason_code="CANCELLED", reason="by its operator")]
    cancelled = isthmus("wait", "--coordinator", address, "--json")
    assert (cancelled.code, cancelled.envelope["error"]["code"]) == (6, "CANCELLED")
    scripted.watched = [a_failed_run("NOT_YET_KNOWN")]
    unknown = isthmus("wait", "--coordinator", address, "--json")
    assert unknown.code == 1
    assert unknown.envelope["error"]["where"]["code"] == "NOT_YET_KNOWN"


def test_a_run_elsewhere_that_is_silent_is_unreachable_and_not_failed(
    isthmus: Isthmus, home: Path
) -> None:
    a_folder(home).remember_remote(NOWHERE)
    for command in ABOUT_RUNS:
        done = isthmus(command, "--json")
        assert done.code == 4
        assert done.envelope["error"]["code"] == "COORDINATOR_UNREACHABLE"
    (listed,) = isthmus("status", "--all", "--json").envelope["data"]["runs"]
    assert listed["reason_code"] == "COORDINATOR_UNREACHABLE"
