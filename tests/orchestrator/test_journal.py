"""The journal: what it keeps, who may write it, and what is left after SIGKILL."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from isthmus.orchestrator.coordinator.journal import FILE, Journal, JournalError, JournalReader
from isthmus.orchestrator.core.run_events import RunState, SiteState
from isthmus.orchestrator.run_folder.state_lock import StateLockedError

SUBMITTED = {
    "name": "small",
    "folder": "/tmp/run",
    "sites": ["a", "b"],
    "links": [{"source": "a", "target": "b", "bytes_per_s": 1.0, "rtt_s": 0.1}],
}
WRITER = """
import sys, time
from pathlib import Path
from isthmus.orchestrator.coordinator.journal import Journal
journal = Journal(Path(sys.argv[1]))
generation = journal.raise_generation()
submitted = {"name": "n", "folder": "f", "sites": ["a"], "links": []}
journal.append("run.submitted", wall_s=1.0, generation=generation, run_id="r", detail=submitted)
number = 0
while True:
    number += 1
    event = journal.append("noted", wall_s=1.0, generation=generation, run_id="r", detail={"n": number})
    journal.save_progress("r", {"n": number})
    print(number, flush=True)
"""


def submit(journal: Journal, run_id: str = "r") -> None:
    generation = journal.raise_generation()
    journal.append(
        "run.submitted", wall_s=5.0, generation=generation, run_id=run_id, detail=SUBMITTED
    )


def note(journal: Journal, kind: str, site: str = "", **detail: object) -> None:
    journal.append(kind, wall_s=6.0, generation=1, run_id="r", site=site, detail=detail)


def test_a_replayed_journal_gives_the_same_view(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        submit(journal)
        note(journal, "site.joined", "a", host="h")
        note(journal, "site.lost", "a", message="gone")
        note(journal, "site.joined", "b", host="g")
        note(journal, "run.stopping", reason="because")
        journal.save_progress("r", {"totals": {"loss": 1.5}})
        live = journal.view("r")
    with JournalReader(tmp_path) as reader:
        assert reader.view("r") == live
        assert reader.progress("r") == {"totals": {"loss": 1.5}}
    assert live.state is RunState.STOPPING
    assert live.sites["a"].state is SiteState.LOST
    assert (live.sites["b"].state, live.sites["b"].host) == (SiteState.JOINED, "g")


def test_the_generation_rises_across_starts(tmp_path: Path) -> None:
    seen = []
    for _ in range(3):
        with Journal(tmp_path) as journal:
            seen += [journal.raise_generation(), journal.raise_generation()]
    assert seen == [1, 2, 3, 4, 5, 6]


def test_an_unfinished_run_is_lost_with_its_coordinator(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        submit(journal)
        with JournalReader(tmp_path) as reader:
            assert reader.final_view("r").state is RunState.FORMING
    with JournalReader(tmp_path) as reader:
        told = reader.final_view("r")
        assert (told.state, told.reason_code) == (RunState.FAILED, "COORDINATOR_LOST")
        assert reader.view("r").state is RunState.FORMING
    with Journal(tmp_path) as journal:
        assert journal.unfinished() == ["r"]
        journal.end_abandoned("r", 9.0)
        assert journal.unfinished() == []
        assert journal.view("r").reason_code == "COORDINATOR_LOST"


def test_a_state_folder_that_is_replaced_or_removed_is_named(tmp_path: Path) -> None:
    with Journal(tmp_path / "state") as journal:
        journal.check_place()
        (tmp_path / "state" / "lock").unlink()
        with pytest.raises(JournalError, match="lock: removed or replaced"):
            journal.check_place()
        (tmp_path / "state" / "lock").touch()
        with pytest.raises(JournalError, match="lock: removed or replaced"):
            journal.check_place()


def test_runs_are_listed_newest_first_and_events_from_any_place(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        for run_id in ("z", "a", "m"):
            submit(journal, run_id)
        assert journal.run_ids() == ["m", "a", "z"]
        (first,) = journal.events("z")
        assert journal.events("z", after=first.sequence) == []
        with pytest.raises(KeyError):
            journal.view("none")


def test_events_cannot_be_changed(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        submit(journal)
    connection = sqlite3.connect(tmp_path / FILE)
    try:
        for statement in ("DELETE FROM events", "UPDATE events SET kind = 'x'"):
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                connection.execute(statement)
    finally:
        connection.close()


def test_a_second_writer_is_refused_and_the_lock_ends_with_the_first(tmp_path: Path) -> None:
    with Journal(tmp_path), pytest.raises(StateLockedError, match="another coordinator uses"):
        Journal(tmp_path)
    Journal(tmp_path).close()


@pytest.mark.parametrize("damage", ["no database", "another's database"])
def test_what_is_no_journal_is_refused_in_one_line(tmp_path: Path, damage: str) -> None:
    if damage == "no database":
        (tmp_path / FILE).write_bytes(b"long enough to be one, but it is not" * 100)
    else:
        connection = sqlite3.connect(tmp_path / FILE)
        connection.execute("CREATE TABLE t (x)")
        connection.close()
    for opened in (Journal, JournalReader):
        with pytest.raises(JournalError, match=FILE) as caught:
            opened(tmp_path)
        assert "\n" not in str(caught.value)
    (tmp_path / FILE).unlink()
    Journal(tmp_path).close()


def test_a_journal_of_another_version_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path).close()
    connection = sqlite3.connect(tmp_path / FILE)
    connection.execute("PRAGMA user_version = 9")
    connection.close()
    with pytest.raises(JournalError, match="version 9, this build reads 1"):
        Journal(tmp_path)


def test_reading_creates_nothing(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="there is no journal"):
        JournalReader(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("written", [1, 7, 40])
def test_what_was_confirmed_is_there_after_sigkill(tmp_path: Path, written: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as writer:
        try:
            assert writer.stdout is not None
            confirmed = [int(writer.stdout.readline()) for _ in range(written)]
        finally:
            os.kill(writer.pid, signal.SIGKILL)
    with JournalReader(tmp_path) as reader:
        assert reader.is_abandoned()
        numbers = [event.detail["n"] for event in reader.events("r") if event.kind == "noted"]
        assert numbers[:written] == confirmed == list(range(1, written + 1))
        assert numbers == list(range(1, len(numbers) + 1))
        assert reader.final_view("r").reason_code == "COORDINATOR_LOST"
        assert json.dumps(reader.progress("r"))
    with Journal(tmp_path) as journal:
        assert journal.raise_generation() == 2


@pytest.mark.parametrize("left", ["nothing", "half", "zeros"])
def test_a_journal_that_was_cut_off_is_refused_and_not_begun_anew(
    tmp_path: Path, left: str
) -> None:
    Journal(tmp_path).close()
    path = tmp_path / FILE
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate({"nothing": 0, "half": size // 2, "zeros": 0}[left])
        if left == "zeros":
            file.truncate(size)
    before = path.read_bytes()
    for opened in (Journal, JournalReader):
        with pytest.raises(JournalError, match=FILE) as caught, opened(tmp_path) as journal:
            journal.run_ids()
        if left == "nothing":
            assert "empty, which no journal ever is" in str(caught.value)
            assert "Put a copy of it there" in str(caught.value)
        assert "\n" not in str(caught.value)
    assert path.read_bytes() == before, "it may yet be mended"


def test_a_coordinator_that_died_while_it_made_its_journal_begins_again(tmp_path: Path) -> None:
    (tmp_path / "journal.new").write_bytes(b"half of one")
    with Journal(tmp_path) as journal:
        assert journal.run_ids() == []


def test_what_is_left_beside_a_journal_that_was_removed_does_not_become_part_of_the_next(
    tmp_path: Path,
) -> None:
    with Journal(tmp_path) as journal:
        submit(journal, "run-1")
        kept = {
            path.name: path.read_bytes()
            for path in tmp_path.iterdir()
            if path.name.endswith(("-wal", "-shm"))
        }
    assert kept
    (tmp_path / FILE).unlink()
    for name, data in kept.items():
        (tmp_path / name).write_bytes(data)
    with Journal(tmp_path) as journal:
        assert journal.run_ids() == []


def test_of_runs_that_have_ended_nothing_is_read_at_a_start(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        for run_id in ("old", "older", "r"):
            submit(journal, run_id)
        for run_id in ("old", "older"):
            detail = {"state": "SUCCEEDED", "reason_code": "", "reason": "", "failure": None}
            journal.append(
                "run.ended",
                wall_s=7.0,
                generation=1,
                run_id=run_id,
                detail={**detail, "active_s": 1},
            )
    with sqlite3.connect(tmp_path / FILE) as connection:
        columns = "(wall_s, run_id, generation, kind, site, detail)"
        unreadable = (8.0, "old", 1, "noted", "", "cut o")
        connection.execute(f"INSERT INTO events {columns} VALUES (?, ?, ?, ?, ?, ?)", unreadable)
    connection.close()
    with Journal(tmp_path) as journal:
        assert journal.unfinished() == ["r"]
        with pytest.raises(JournalError, match="damaged"):
            journal.view("old")


def test_a_sequence_beyond_all_events_is_no_damage(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        submit(journal)
        assert [each.sequence for each in journal.events("r", 0)] == [1]
        assert journal.events("r", 2**64 - 1) == []
