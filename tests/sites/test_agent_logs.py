"""Reading files that grow, and shipping their lines: bounded, in order, never twice."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from isthmus.protos import disk
from isthmus.protos.control.v1.control_pb2 import ShipLogsRequest
from isthmus.protos.errors import PeerLostError
from isthmus.protos.limits import LOG_BATCH_BYTES, LOG_LINE_BYTES
from isthmus.sites.agent.logs import LogShipper, OwnLines
from isthmus.sites.node.log_files import KEEP_BYTES, LAG_BYTES, Lines, LogFiles, Tail
from isthmus.sites.node.torchrun import rank_files
from tests.fakes.holes import has_holes

PLENTY = 1 << 20


def append(path: Path, data: bytes) -> None:
    """Add to a file."""
    with path.open("ab") as file:
        file.write(data)


def test_lines_come_when_they_are_complete(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = Tail(path)
    assert tail.read(PLENTY) == ([], 0)
    append(path, b"one\ntw")
    assert tail.read(PLENTY) == (["one"], 6)
    append(path, b"o\r\n\nlast")
    assert tail.read(PLENTY)[0] == ["two", ""]
    assert tail.finish() == ["last"]
    assert tail.finish() == []


@pytest.mark.parametrize("seed", range(20))
def test_the_sizes_of_reads_do_not_matter(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    texts = ["é" * rng.randrange(40) for _ in range(100)]
    path = tmp_path / "log"
    append(path, "\n".join(texts).encode())
    tail, lines = Tail(path), []
    for _ in range(200):
        lines += tail.read(rng.randrange(1, 60))[0]
    assert lines + tail.finish() == texts, f"{seed=}"


@pytest.mark.parametrize("budget_bytes", [7, 4096, PLENTY])
def test_of_a_line_that_writes_over_itself_the_end_is_kept(
    tmp_path: Path, budget_bytes: int
) -> None:
    path = tmp_path / "log"
    states = b"".join(b"\rstep %d" % step for step in range(LOG_LINE_BYTES // 4))
    append(path, b"one\n" + states + b"\r\nlong " + b"x" * LOG_LINE_BYTES + b"\r\na\rb\n")
    tail = Tail(path)
    lines: list[str] = []
    while (read := tail.read(budget_bytes))[1]:
        lines += read[0]
    assert lines[:2] == ["one", f"step {LOG_LINE_BYTES // 4 - 1}"]
    assert lines[2].startswith("long xx")
    assert lines[2].endswith("bytes cut]")
    assert lines[3:] == ["a\rb"]


def test_a_long_line_is_cut_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "log"
    append(path, b"x" * (LOG_LINE_BYTES + 5) + b"\nnext\n")
    tail = Tail(path)
    lines: list[str] = []
    for _ in range(20):
        lines += tail.read(1000)[0]
    assert lines == ["x" * LOG_LINE_BYTES + "… [5 bytes cut]", "next"]


def test_a_reader_that_is_behind_leaves_lines_out_and_counts_them(tmp_path: Path) -> None:
    path = tmp_path / "log"
    num_lines = (LAG_BYTES + KEEP_BYTES) // 10
    append(path, b"".join(b"%09d\n" % number for number in range(num_lines)))
    first, *rest = Tail(path).read(2 * KEEP_BYTES)[0]
    assert first == f"… {num_lines - len(rest)} lines dropped"
    assert [int(line) for line in rest] == list(range(num_lines - len(rest), num_lines))


class Receiver:
    """Takes batches, when it feels like it."""

    def __init__(self, refusals: int = 0) -> None:
        self.refusals = refusals
        self.requests: list[ShipLogsRequest] = []
        self.arrived = asyncio.Event()

    async def ship(self, request: ShipLogsRequest) -> None:
        """Take one."""
        if self.refusals:
            self.refusals -= 1
            raise PeerLostError("not now")
        self.requests.append(request)
        self.arrived.set()

    def texts(self, source: str) -> list[str]:
        """Return a source's lines; each sequence number came once and in order."""
        lines = [
            line for request in self.requests for line in request.lines if line.source == source
        ]
        assert [line.sequence for line in lines] == list(range(len(lines)))
        return [line.text for line in lines]


class FilesReader:
    """A node whose log files are these."""

    def __init__(self, files: LogFiles) -> None:
        self.files = files

    async def read_logs(self, budget_bytes: int) -> tuple[Lines, int]:
        return self.files.read(budget_bytes)

    async def read_log_ends(self, first: Sequence[str]) -> Lines:
        return self.files.read_ends(first)


def shipper(receiver: Receiver, files: dict[Path, str], own: OwnLines | None = None) -> LogShipper:
    """Return a shipper of these files."""
    reader = FilesReader(LogFiles(lambda: [(source, path) for path, source in files.items()]))
    return LogShipper(
        receiver.ship,
        run_id="r1",
        generation=1,
        site="a",
        own=own or OwnLines(),
        readers=lambda: [reader],
    )


def test_both_streams_of_a_rank_are_one_source_in_batches(tmp_path: Path) -> None:
    receiver = Receiver(refusals=2)
    out, err = tmp_path / "out", tmp_path / "err"
    append(out, b"x" * 1000 + b"\n" + b"x" * 1000)
    append(out, (b"\n" + b"y" * 2000) * 50)
    append(err, b"Traceback\n")
    asyncio.run(shipper(receiver, {out: "rank0", err: "rank0"}).finish(time.monotonic() + 20))
    assert len(receiver.texts("rank0")) == 53
    assert len(receiver.requests) > 2
    assert all(request.ByteSize() <= LOG_BATCH_BYTES for request in receiver.requests)


def test_what_matters_most_is_shipped_first(tmp_path: Path) -> None:
    receiver = Receiver()
    files = {tmp_path / f"{rank}": f"rank{rank}" for rank in range(4)}
    for path in files:
        append(path, b"line\n")
    own = OwnLines()
    own.emit(logging.makeLogRecord({"msg": "mine\nsecond"}))
    asyncio.run(shipper(receiver, files, own).finish(time.monotonic() + 20, ["rank2"]))
    assert receiver.requests[0].lines[0].source == "rank2"
    assert receiver.texts("agent") == ["mine", "second"]


async def test_the_end_of_a_source_comes_before_a_long_backlog_of_it(tmp_path: Path) -> None:
    """Else a coordinator that takes lines slowly would never hear a rank's last words."""
    receiver = Receiver(refusals=1)
    path = tmp_path / "log"
    append(path, b"talk\n" * 50_000)
    ships = shipper(receiver, {path: "rank0"})

    await ships._collect()  # they wait, for nothing is taken
    append(path, b"the last words\n")
    await ships.finish(time.monotonic() + 20)
    lines = [line for request in receiver.requests for line in request.lines]
    assert lines[0].text.endswith("lines dropped")
    assert lines[-1].text == "the last words"
    sequences = [line.sequence for line in lines]
    assert sequences == sorted(set(sequences))
    assert sum(line.ByteSize() for line in lines) <= KEEP_BYTES + LOG_LINE_BYTES


async def test_the_traceback_of_a_rank_that_printed_much_is_shipped(tmp_path: Path) -> None:
    receiver = Receiver()
    folder = tmp_path / "ranks" / "a_x" / "attempt_0" / "3"
    folder.mkdir(parents=True)
    append(folder / "stderr.log", b"the last words\n")
    append(folder / "stdout.log", b"talk\n" * 50_000)
    sources = list(rank_files(tmp_path, "a", 8))
    assert {source for source, _ in sources} == {"rank11"}
    ships = shipper(receiver, {path: source for source, path in sources})

    await ships._collect()  # both wait when the run ends
    await ships.finish(time.monotonic() + 20)
    lines = [line.text for request in receiver.requests for line in request.lines]
    assert lines[0].endswith("lines dropped")
    assert "the last words" in lines


def test_a_coordinator_that_takes_nothing_is_given_up_on_time(tmp_path: Path) -> None:
    append(tmp_path / "log", b"line\n")
    receiver = Receiver(refusals=10**9)
    began_s = time.monotonic()
    asyncio.run(shipper(receiver, {tmp_path / "log": "rank0"}).finish(time.monotonic() + 0.05))
    assert time.monotonic() - began_s < 10


@pytest.mark.slow
async def test_lines_are_shipped_while_the_run_goes_on(tmp_path: Path) -> None:
    receiver = Receiver(refusals=1)
    path = tmp_path / "log"

    logs = shipper(receiver, {path: "rank0"})
    running = asyncio.create_task(logs.run())
    async with asyncio.timeout(30):
        for number in range(3):
            append(path, b"line %d\n" % number)
            while len(receiver.texts("rank0")) <= number:
                receiver.arrived.clear()
                await receiver.arrived.wait()
    running.cancel()
    await asyncio.wait([running])
    assert receiver.texts("rank0") == ["line 0", "line 1", "line 2"]


def test_the_disk_gets_back_what_was_read_long_ago(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a writer that does not append, as a rank that torchrun redirects."""
    monkeypatch.setattr(disk, "ON_DISK_BYTES", 64 << 10)
    path = tmp_path / "log"
    tail, lines = Tail(path), []
    line = b"x" * 1023 + b"\n"
    with path.open("wb", buffering=0) as writer:
        for _ in range(100):
            for _ in range(10):
                writer.write(line)
            tail.free()
            lines += tail.read(PLENTY)[0]
            writer.flush()
    assert lines == ["x" * 1023] * 1000
    assert path.stat().st_size == 1000 << 10
    assert tail.finish() == []
    if has_holes(tmp_path):
        assert path.stat().st_blocks * 512 <= 3 * (64 << 10)
        assert path.read_bytes().endswith(64 * line)
