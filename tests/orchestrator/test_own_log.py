"""What a coordinator itself logs.

Among its run's logs, in parts; and the end of its file stays on the disk.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from isthmus.orchestrator.coordinator.own_log import OwnLines, bound
from isthmus.orchestrator.run_folder import log_files
from isthmus.orchestrator.run_folder.log_files import LogReader, LogWriter, last_line
from isthmus.orchestrator.run_folder.rotated_lines import Limits
from isthmus.protos import disk
from isthmus.protos.control.v1 import control_pb2
from tests.fakes.holes import has_holes


def texts(folder: Path, site: str = "", rank: int = -1) -> list[tuple[str, str, str]]:
    """Return site, source and text of all lines."""
    lines = LogReader(folder, site=site, rank=rank).read()
    return [(line.site, line.source, line.text) for line in lines]


def record(message: str) -> logging.LogRecord:
    return logging.LogRecord("test", logging.INFO, __file__, 1, message, (), None)


def test_it_is_one_of_the_logs_and_at_no_site(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path)
    writer.append_own(["one", "two\nlines"])
    writer.append("a", [control_pb2.LogLine(site="a", source="rank0", sequence=0, text="hello")])
    own = [("", "coordinator", "one"), ("", "coordinator", "two lines")]
    assert texts(tmp_path) == [("a", "rank0", "hello"), *own]
    assert texts(tmp_path, site="a") == [("a", "rank0", "hello")]
    assert texts(tmp_path, rank=0) == [("a", "rank0", "hello")]


def test_its_oldest_lines_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "LIMITS", Limits(part_bytes=1000, num_parts=3))
    writer = LogWriter(tmp_path)
    for index in range(1000):
        writer.append_own([f"line {index}"])
    files = list((tmp_path / "logs").iterdir())
    assert len(files) == 3
    assert sum(each.stat().st_size for each in files) <= 3 * 1010
    lines = list(LogReader(tmp_path, site="", rank=-1).read())
    assert lines[-1].text == "line 999"
    assert [line.text for line in lines] == [f"line {line.sequence}" for line in lines]


def test_lines_are_kept_while_a_run_goes_on(tmp_path: Path) -> None:
    run = SimpleNamespace(has_ended=False, logs=LogWriter(tmp_path))
    latest: list[SimpleNamespace | None] = [None]
    handler = OwnLines(lambda: latest[0])  # type: ignore[arg-type,return-value]
    handler.handle(record("before any"))
    latest[0] = run
    handler.handle(record("a traceback\nof two lines"))
    run.has_ended = True
    handler.handle(record("after it"))
    assert [text for _, _, text in texts(tmp_path)] == ["a traceback", "of two lines"]


def test_a_disk_that_refuses_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("in the way")
    run = SimpleNamespace(has_ended=False, logs=LogWriter(tmp_path))
    OwnLines(lambda: run).handle(record("lost"))  # type: ignore[arg-type,return-value]


async def test_the_end_of_its_file_stays_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "ON_DISK_BYTES", 64 << 10)
    path = tmp_path / "coordinator.log"

    bounding = asyncio.create_task(bound(tmp_path / "none"))
    await asyncio.sleep(0)
    assert not bounding.done(), "it is not there yet"
    bounding.cancel()
    with path.open("ab", buffering=0) as log:
        for _ in range(1000):
            log.write(b"x" * 1023 + b"\n")
        log.write(b"error: why it ended\nhint: do not\n")
        bounding = asyncio.create_task(bound(path))
        await asyncio.sleep(0)
        bounding.cancel()
        log.write(b"and on it goes\n")
    assert path.stat().st_size > 1000 << 10
    assert last_line(path) == "and on it goes"
    assert path.read_bytes().endswith(63 * (b"x" * 1023 + b"\n") + path.read_bytes()[-48:])
    if has_holes(tmp_path):
        assert path.stat().st_blocks * 512 <= 3 * (64 << 10)
