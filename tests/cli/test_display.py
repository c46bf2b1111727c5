"""What people see while a run goes on, and in which words everything is told."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from isthmus.orchestrator.cli.display import PLAIN_EVERY_S, NoteLines, PlainProgress
from isthmus.orchestrator.cli.output import Output
from isthmus.orchestrator.cli.views import event_line, log_line, run_lines, run_view
from isthmus.orchestrator.coordinator.control_messages import event_from
from isthmus.orchestrator.core.first_failure import detail_of
from isthmus.orchestrator.evidence.view import formats
from isthmus.orchestrator.evidence.view.live import MOST_LINKS
from isthmus.protos.catalogue import ExitCode
from isthmus.protos.control.v1 import control_pb2
from isthmus.protos.failure import Failure
from tests.cli.conftest import Isthmus
from tests.cli.runs import a_failed_run, a_run
from tests.fakes.scripted_coordinator import ScriptedCoordinator, serving


def test_plain_progress_is_a_line_a_change_of_state_and_else_now_and_then(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now_s = 100.0
    show = PlainProgress(lambda: now_s)
    for second in range(int(2 * PLAIN_EVERY_S) + 1):
        now_s = 100.0 + second
        run = a_run("ACTIVE")
        run.active_s = float(second)
        show(run)
    assert len(capsys.readouterr().err.splitlines()) == 3
    show(a_run("SUCCEEDED"))
    show(a_run("SUCCEEDED"))
    out, err = capsys.readouterr()
    assert len(err.splitlines()) == 1
    assert not out


def test_what_is_noted_is_a_line_at_once_and_once(capsys: pytest.CaptureFixture[str]) -> None:
    now_s = 100.0
    show = PlainProgress(lambda: now_s)
    show(a_run("ACTIVE"))
    lost = control_pb2.Note(sequence=7, wall_s=1_700_000_000.5, kind="site.lost", text="b is\nlost")
    back = control_pb2.Note(
        sequence=9, wall_s=1_700_000_002.5, kind="site.returned", text="b is back"
    )
    for noted in ([lost], [lost], [lost, back], [back]):
        show(a_run("ACTIVE", noted=noted))
    lines = [line for line in capsys.readouterr().err.splitlines() if "note: " in line]
    assert lines == [
        f"{formats.clock(1_700_000_000.5)} note: b is lost",
        f"{formats.clock(1_700_000_002.5)} note: b is back",
    ]


def test_without_a_terminal_each_phase_of_a_start_is_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show = PlainProgress(lambda: 100.0)
    for states in (
        *("ABSENT ABSENT", "JOINED ABSENT", "JOINED JOINED", "PREPARED JOINED"),
        *("PREPARED PREPARED", "STARTING STARTING", "RUNNING RUNNING"),
    ):
        run = a_run("FORMING")
        run.active_s = 0
        for site, state in zip(run.sites, states.split(), strict=True):
            site.state = control_pb2.SiteState.Value(f"SITE_STATE_{state}")
            site.ClearField("latest")
        show(run)
    assert capsys.readouterr().err.splitlines() == [
        "FORMING  agents 0 of 2 (waits for a, b)",
        "FORMING  agents 2 of 2, gateways 0 of 2 (waits for a, b)",
        "FORMING  agents 2 of 2, gateways 2 of 2, script starts (import torch) at a, b",
        "FORMING  agents 2 of 2, gateways 2 of 2, joined 2 of 2, first step",
    ]


@pytest.mark.parametrize(
    ("others", "shown"),
    [
        ([("b", 1)], ""),
        ([("b", 1), ("b", 2)], "(and 1 other)"),
        ([("b", 1), ("a", 0), ("a", 1)], "(and 2 others)"),
    ],
)
def test_a_mistake_that_several_ranks_report_is_told_once(
    isthmus: Isthmus, others: list[tuple[str, int]], shown: str
) -> None:
    run = a_failed_run("SCRIPT_FAILED")
    run.failure.message = run.reason = "rank 1 of b: ValueError: no"
    reported = [
        Failure(
            code="SCRIPT_FAILED",
            message=f"rank {rank} of {site}: ValueError: no",
            site=site,
            rank=rank,
        )
        for site, rank in others
    ]
    reported += [
        Failure(code="SCRIPT_FAILED", message="rank 7 of a: KeyError: x", site="a", rank=7),
        Failure(code="PEER_LOST", message="rank 8 of a: ValueError: no", site="a", rank=8),
    ]
    events = [
        control_pb2.Event(
            sequence=at, kind="failure.reported", detail_json=json.dumps(detail_of(each))
        )
        for at, each in enumerate(reported, start=1)
    ]
    scripted = ScriptedCoordinator(runs=[run], watched=[control_pb2.Run()], events=events)
    with serving(scripted) as address:
        told = isthmus("wait", "r1", "--coordinator", address)
        where = isthmus("wait", "r1", "--coordinator", address, "--json").envelope["error"]["where"]
    assert told.err.count("ValueError: no") == 1
    assert f"ValueError: no {shown}".rstrip() + "\n" in told.err
    assert where["others"] == len(others) - 1


def test_status_has_the_slow_site_for_programs_too(isthmus: Isthmus) -> None:
    run = a_run("ACTIVE", "mine")
    run.slow.site, run.slow.since_step, run.slow.cost_s = "b", 4, 0.5
    with serving(ScriptedCoordinator(runs=[run, a_run("ACTIVE", "other")])) as address:
        at = ("--coordinator", address)
        told = isthmus("status", "mine", *at).out
        data = isthmus("status", "mine", *at, "--json").envelope["data"]
        other = isthmus("status", "other", *at, "--json").envelope["data"]
    assert "slow, not hung: site b costs the others 500ms a step" in told
    assert (data["slow"]["site"], data["slow"]["since_step"]) == ("b", 4)
    assert other["slow"] is None


def test_all_links_of_a_run_are_shown_when_asked_for(isthmus: Isthmus) -> None:
    run = a_run("ACTIVE", "mine")
    for at in range(20):
        run.links.add(source="b", target=f"s{at}", latest={"sent_bytes": 1e6 + at})
    with serving(ScriptedCoordinator(runs=[run])) as address:
        few = isthmus("status", "mine", "--coordinator", address)
        every = isthmus("status", "mine", "--all", "--coordinator", address)
    assert few.out.count("→") == MOST_LINKS
    assert "and 15 more links: isthmus status mine --all" in few.out
    assert every.out.count("→") == 21
    assert "more links" not in every.out


@pytest.mark.parametrize("command", ["wait", "status"])
def test_a_success_with_losses_is_said_and_has_its_exit_status(
    isthmus: Isthmus, home: Path, command: str
) -> None:
    reason = "site b was lost and did not come back: it was killed"
    run = a_run("SUCCEEDED", "mine", reason_code="WITH_LOSSES", reason=reason)
    run.noted.add(sequence=7, wall_s=1_700_000_000.5, kind="site.lost", text="b is lost")
    exit_code = ExitCode.WITH_LOSSES if command == "wait" else ExitCode.OK
    with serving(ScriptedCoordinator(runs=[run], watched=[control_pb2.Run()])) as address:
        at = ("mine", "--coordinator", address)
        told = isthmus(command, *at)
        envelope = isthmus(command, *at, "--json").envelope
    assert told.code == envelope["exit_code"] == exit_code
    assert envelope["status"] == "ok"
    data = envelope["data"]
    assert (data["state"], data["reason_code"], data["reason"]) == (
        *("SUCCEEDED", "WITH_LOSSES"),
        reason,
    )
    assert data["noted"] == [
        {"wall_s": 1_700_000_000.5, "kind": "site.lost", "site": "", "text": "b is lost"}
    ]
    assert "SUCCEEDED WITH LOSSES" in told.out
    assert f"WITH_LOSSES: {reason}" in told.out
    assert ("failure.allow_losses" in told.err) == (command == "wait")
    assert f"{formats.clock(1_700_000_000.5)} note: b is lost" in told.out
    assert "SUCCEEDED WITH LOSSES" in run_lines([run])


def test_a_failure_is_told_once_and_its_cause_comes_last(isthmus: Isthmus, home: Path) -> None:
    run = a_failed_run("RANK_KILLED", "mine")
    with serving(ScriptedCoordinator(runs=[run], watched=[control_pb2.Run()])) as address:
        told = isthmus("wait", "mine", "--coordinator", address)
    assert (told.out + told.err).count("rank 1 of b ended") == 1
    assert (told.out + told.err).count("/logs/b/rank1.log") == 1
    error, log, hint = told.err.splitlines()[-3:]
    assert (error, log) == ("error: rank 1 of b ended", "log: /logs/b/rank1.log")
    assert hint.startswith("hint: ")


def test_numbers_that_json_does_not_have_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output.of(["--json"])
    output.result({"loss": math.nan, "losses": [[1, math.inf]], "kept": 1.5})
    out = capsys.readouterr().out
    assert '"data": {"loss": null, "losses": [[1, null]], "kept": 1.5}' in out


def test_a_state_from_the_future_is_shown_as_its_number() -> None:
    run = control_pb2.Run.FromString(b"\x18\x2a")  # field 3, state, 42
    assert run_view(run)["state"] == "42"


def test_a_failure_without_rank_or_site_says_null() -> None:
    run = a_failed_run("SITE_LOST")
    run.failure.rank = run.failure.node = -1
    run.failure.log_path = ""
    failure = run_view(run)["failure"]
    assert failure["rank"] is failure["node"] is failure["log_path"] is None
    assert run_view(a_run("ACTIVE"))["failure"] is None


def test_on_a_terminal_the_latest_checkpoint_alone_stays() -> None:
    run, notes = a_run("ACTIVE"), NoteLines(stays_in_table="checkpoint.written")
    run.noted.add(sequence=1, wall_s=1.0, kind="site.lost", text="b is lost")
    run.noted.add(sequence=2, wall_s=2.0, kind="checkpoint.written", text="step 5 is written")
    assert [line.partition("note: ")[2] for line in notes.new(run)] == ["b is lost"]
    assert [each.text for each in notes.without_told(run).noted] == ["step 5 is written"]
    assert len(run.noted) == 2


def test_a_line_of_a_log_has_one_time() -> None:
    line = control_pb2.LogLine(site="b", source="agent", wall_s=1_700_000_000.0)
    line.text = "2026-11-28 23:02:21,233 agent b: joined, generation 2"
    stamp = formats.clock(1_700_000_000.0)
    assert log_line(line, has_colour=False) == f"{stamp} b/agent | agent b: joined, generation 2"


def test_the_list_of_runs_has_a_heading() -> None:
    heading, line = run_lines([a_run("ACTIVE")], ["160KiB"]).splitlines()
    assert heading.split() == ["size", "run", "state", "submitted", "name"]
    assert heading.index("state") == line.index("ACTIVE")
    assert "".join(line).split()[0] == "160KiB"


def test_the_line_of_a_run_says_why_it_ended() -> None:
    assert "RANK_KILLED: rank 1 of b ended" in run_lines([a_failed_run("RANK_KILLED")])
    assert run_lines([a_run("ACTIVE")]).endswith("test")


@pytest.mark.parametrize(
    ("detail", "shown"),
    [
        ('{"host": "here"}', "the agent of site a joined from here"),
        ('{"note": "a\\u001b[2Jb"}', "a [2Jb"),
        ("", "the agent of site a joined from"),
        ("not json", "the agent of site a joined from"),
    ],
)
def test_events(detail: str, shown: str) -> None:
    message = control_pb2.Event(sequence=2, kind="site.joined", site="a", detail_json=detail)
    assert event_line(event_from(message)).endswith(f"  site.joined         {shown}")
