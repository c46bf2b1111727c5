"""`isthmus logs`: merged by time, stamped, filtered, and as it would stand on a terminal."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from isthmus.orchestrator.cli.log_text import shown
from isthmus.orchestrator.cli.log_tracebacks import BEGIN, told_once
from isthmus.orchestrator.evidence.view import formats
from isthmus.orchestrator.run_folder.log_files import LogReader, LogWriter
from isthmus.protos.control.v1 import control_pb2
from tests.cli.conftest import Isthmus
from tests.cli.runs import a_run
from tests.fakes.scripted_coordinator import ScriptedCoordinator, serving

WALL_S = 1_700_000_000.0


def line(source: str, wall_s: float, text: str, sequence: int = 0) -> control_pb2.LogLine:
    return control_pb2.LogLine(site="a", source=source, sequence=sequence, wall_s=wall_s, text=text)


def test_what_is_kept_comes_back_by_time_with_its_stamps(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path)
    for source, times in (("rank0", (1.0, 4.0, 5.5)), ("rank1", (2.0, 3.0, 6.0))):
        lines = [line(source, WALL_S + at, f"{at}", place) for place, at in enumerate(times)]
        writer.append("a", lines)
    reader = LogReader(tmp_path, site="", rank=-1)
    read = list(reader.read())
    assert [each.text for each in read] == ["1.0", "2.0", "3.0", "4.0", "5.5", "6.0"]
    assert [each.wall_s - WALL_S for each in read] == [1.0, 2.0, 3.0, 4.0, 5.5, 6.0]
    assert [each.sequence for each in read if each.source == "rank1"] == [0, 1, 2]
    writer.append("a", [line("rank0", WALL_S + 9, "more", 3)])
    assert [each.text for each in reader.read()] == ["more"]


def test_a_source_whose_clock_is_set_back_stays_in_order(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path)
    writer.append("a", [line("rank0", WALL_S + at, f"{at}", n) for n, at in enumerate((9, 1, 2))])
    writer.append("a", [line("rank1", WALL_S + 5, "5")])
    read = [each.text for each in LogReader(tmp_path, site="", rank=-1).read()]
    assert read == ["5", "9", "1", "2"]


@pytest.mark.parametrize("text", ["2026-13-41T99:00:00.000Z no day", "no stamp", ""])
def test_a_line_without_a_stamp_is_what_it_says(tmp_path: Path, text: str) -> None:
    LogWriter(tmp_path).append("a", [line("rank0", 0.0, text)])
    (read,) = LogReader(tmp_path, site="", rank=-1).read()
    assert (read.text, read.wall_s) == (text, 0.0)


def test_a_line_has_its_time_before_it(isthmus: Isthmus) -> None:
    scripted = ScriptedCoordinator(runs=[a_run("ACTIVE")], lines=[line("rank0", WALL_S, "hi")])
    with serving(scripted) as address:
        done = isthmus("logs", "--coordinator", address)
    assert done.out == f"{formats.clock(WALL_S)} a/rank0 | hi\n"


def test_only_late_lines_with_a_text(isthmus: Isthmus) -> None:
    now_s = time.time()
    lines = [
        line("rank0", now_s - 600, "old step"),
        line("rank0", now_s - 60, "late step"),
        line("rank0", 0.0, "and its traceback, step"),
        line("rank1", 0.0, "nobody knows when"),
        line("rank0", now_s - 1, "late, too"),
    ]
    with serving(ScriptedCoordinator(runs=[a_run("ACTIVE")], lines=lines)) as address:

        def told(*options: str) -> list[str]:
            out = isthmus("logs", "--coordinator", address, *options).out
            return [each.partition(" | ")[2] for each in out.splitlines()]

        assert told("--since", "5min") == ["late step", "and its traceback, step", "late, too"]
        assert told("--grep", "step") == ["old step", "late step", "and its traceback, step"]
        assert told("--since", "5min", "--grep", "late s") == ["late step"]
        nothing = isthmus("logs", "--coordinator", address, "--since", "10ms")
        wrong = isthmus("logs", "--coordinator", address, "--since", "5")
    assert not nothing.out
    assert f"the last line is of {formats.clock(now_s - 1)}" in nothing.err
    assert wrong.code == 2
    assert "without a unit" in wrong.err


@pytest.mark.parametrize(
    ("text", "coloured", "plain"),
    [
        ("plain", "plain", "plain"),
        ("\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m\x1b[0m", "red"),
        ("  1%|a\r 50%|b\r100%|c\r", "100%|c", "100%|c"),
        ("\x1b[2K\r\x1b[1A\x1b[32m100%\x1b[0m|\r\x1b[K", "\x1b[32m100%\x1b[0m|\x1b[0m", "100%|"),
        (
            "a\x07b\x1b]0;owned\x07c\x1b(B",
            "a\N{REPLACEMENT CHARACTER}bc",
            "a\N{REPLACEMENT CHARACTER}bc",
        ),
        ("\r\r", "", ""),
        ("cut off \x1b[", "cut off ", "cut off "),
    ],
)
def test_a_line_is_as_it_would_stand_on_a_terminal(text: str, coloured: str, plain: str) -> None:
    assert shown(text, has_colour=True) == coloured
    assert shown(text, has_colour=False) == plain


def traceback(source: str, rank: int, error: str = "ValueError: no") -> list[control_pb2.LogLine]:
    texts = [
        BEGIN,
        '  File "train.py", line 7, in step',
        f"    model(batch, at=0x7f{rank}a)",
        f"{error} at rank {rank}",
        "",
        "During handling of the above exception, another exception occurred:",
        "",
        BEGIN,
        '  File "train.py", line 9, in main',
        "RuntimeError: gave up",
        f"rank {rank} ends",
    ]
    return [line(source, WALL_S, text, at) for at, text in enumerate(texts)]


def test_a_traceback_that_many_ranks_print_is_told_once_and_whole() -> None:
    ranks = [traceback(f"rank{rank}", rank) for rank in range(7)]
    mixed = [each for at in zip(*ranks, strict=True) for each in at]
    told = [f"{each.source} {each.text}" for each in told_once(mixed)]
    first = [f"rank0 {each.text}" for each in ranks[0]]
    assert told[:4] == first[:4]
    assert sum(BEGIN in each for each in told) == 2
    assert sum("another exception" in each for each in told) == 1
    assert [each for each in told if each.endswith("ends")] == [
        f"rank{rank} rank {rank} ends" for rank in range(7)
    ]
    others = "(and 6 others: a/rank1, a/rank2, a/rank3, a/rank4 and 2 more)"
    assert told[-2:] == [
        f"rank0 ValueError: no at rank 0 {others}",
        f"rank0 RuntimeError: gave up {others}",
    ]


def test_other_tracebacks_those_of_one_source_and_cut_ones_stay() -> None:
    lines = [
        *traceback("rank0", 0),
        *traceback("rank1", 1, "KeyError: x"),
        *traceback("rank0", 0),
        *traceback("rank2", 2, "OSError: y")[:3],
    ]
    told = list(told_once(lines))
    assert sum(each.text.startswith("ValueError") for each in told) == 2
    assert sum(each.text.startswith("KeyError") for each in told) == 1
    assert told[-2].text.startswith("    model")
    assert told[-1].text == "RuntimeError: gave up (and 1 other: a/rank1)"


def test_programs_get_every_line(isthmus: Isthmus) -> None:
    lines = [*traceback("rank0", 0), *traceback("rank1", 1)]
    with serving(ScriptedCoordinator(runs=[a_run("ACTIVE")], lines=lines)) as address:
        people = isthmus("logs", "--coordinator", address).out
        programs = isthmus("logs", "--coordinator", address, "--json").envelope
        found = isthmus("logs", "--coordinator", address, "--grep", "ValueError").out
    assert people.count(BEGIN) == 2
    assert "ValueError: no at rank 0 (and 1 other: a/rank1)" in people
    assert len(programs["data"]["lines"]) == len(lines)
    assert len(found.splitlines()) == 2


def test_where_there_is_no_terminal_there_are_no_codes(isthmus: Isthmus) -> None:
    bars = line("rank0", WALL_S, "\x1b[31m 1%\x1b[0m\r\x1b[32m99%\x1b[0m")
    with serving(ScriptedCoordinator(runs=[a_run("ACTIVE")], lines=[bars])) as address:
        done = isthmus("logs", "--coordinator", address)
        told = isthmus("logs", "--coordinator", address, "--json").envelope
    assert done.out.endswith("a/rank0 | 99%\n")
    assert told["data"]["lines"][0]["text"] == bars.text


@pytest.mark.parametrize(("options", "is_shown"), [((), False), (("--logs",), True)])
def test_launch_prints_what_rank_0_prints(
    isthmus: Isthmus, files: Path, options: tuple[str, ...], is_shown: bool
) -> None:
    scripted = ScriptedCoordinator(
        watched=[a_run("ACTIVE", ""), a_run("SUCCEEDED", "")],
        lines=[line("rank0", WALL_S, "\x1b[1mepoch 1\x1b[0m")],
    )
    with serving(scripted) as address:
        done = isthmus("launch", files / "job.yaml", "--coordinator", address, *options)
    assert done.code == 0
    assert ("\nepoch 1\n" in f"\n{done.err}") is is_shown
    assert "epoch 1" not in done.out
    if is_shown:
        (asked,) = [
            each for each in scripted.asked if isinstance(each, control_pb2.ReadLogsRequest)
        ]
        assert (asked.follow, asked.site, asked.rank) == (True, "oregon", 0)
