"""A node's launcher: which rank failed first, and what is said of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from isthmus.protos.errors import RemoteProtocolError
from isthmus.protos.failure import MESSAGE_CHARS, Failure, one_line
from isthmus.sites.agent.site_processes import reserved_port
from isthmus.sites.local.rank_messages import Failed
from isthmus.sites.node.launcher import Watch
from isthmus.sites.node.rank_failures import (
    COLLATERAL_EXIT_CODE,
    FAULTY_EXIT_CODE,
    LAUNCHER_LINES,
    PID_FILE,
    cause_first,
    describe_failure,
    explain_crash,
    write_error_file,
)
from isthmus.topology.spec.json_lines import line_of

WAIT_S = 90.0

SCRIPT = """
import errno, os, pathlib, signal, sys, threading, time
rank, action = int(os.environ["RANK"]), sys.argv[1]
here = pathlib.Path(sys.argv[2])
print("argv", sys.argv[0], *sys.argv[1:2], __name__, flush=True)
(here / f"up{rank}").touch()
deadline_s = time.monotonic() + 60
while len(list(here.glob("up*"))) < int(os.environ["WORLD_SIZE"]):  # all are there
    assert time.monotonic() < deadline_s
    time.sleep(0.01)
import beside
if action == "listen":
    import psutil
    node = psutil.Process().parent()
    below = [node, *node.children(recursive=True)]
    listening = set()
    for p in below:
        try:
            listening |= {c.laddr.ip for c in p.net_connections() if c.status == "LISTEN"}
        except psutil.NoSuchProcess:
            pass  # the other rank is done already
    (here / f"listening{rank}").write_text(" ".join(listening))
    sys.exit(0)
if rank != 1:
    threading.Event().wait(60)
if action == "exit":
    sys.exit(17)
if action == "text":
    sys.exit("a reason")
if action == "raise":
    raise ValueError("two\\nlines")
if action == "fill":
    node = pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[4]
    with (node / "filler").open("wb", buffering=0) as filler:
        for size in (1 << 16, 1 << 10, 1):
            try:
                while filler.write(bytes(size)) == size:
                    pass
            except OSError as error:
                assert error.errno == errno.ENOSPC
if action in ("kill", "fill"):
    os.kill(os.getpid(), signal.SIGKILL)
if action == "term":
    os.kill(os.getpid(), signal.SIGTERM)
if action == "lost":
    from isthmus.protos.errors import PeerLostError
    try:
        raise PeerLostError("site b is gone", "b")
    except PeerLostError as error:
        raise RuntimeError("the step failed") from error
if action == "lost_caught":
    from isthmus.protos.errors import PeerLostError
    try:
        raise PeerLostError("site b is gone", "b")
    except PeerLostError:
        sys.exit(3)
if action == "caught":
    try:
        raise ValueError("a bug")
    except Exception:
        sys.exit(3)
if action == "disk":
    try:
        raise OSError(28, "No space left on device")
    except OSError as error:
        raise RuntimeError("not saved") from error
if action == "handler":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.kill(os.getpid(), signal.SIGTERM)
if action == "future":
    raise RuntimeError("Got an error in a callback: PeerLostError: site b is gone")
if action == "segv":
    import ctypes
    ctypes.string_at(0)
if action == "abort":
    os.abort()
if action in ("worker_raises", "worker_exits"):
    import torch
    class Shards:
        def __len__(self):
            return 4
        def __getitem__(self, index):
            if action == "worker_raises":
                raise ValueError("sample 9 of shard 3 is bad")
            sys.stderr.write("libshard: shard 3 has no index\\n")
            os._exit(3)
    list(torch.utils.data.DataLoader(Shards(), num_workers=1))
if action == "corrupt":
    from isthmus.protos.errors import GradientsDifferError
    raise GradientsDifferError("after step 4, rank 1 of site a computed wrong gradients")
if action == "misuse":
    from isthmus.protos.errors import LocalProtocolError
    raise LocalProtocolError("leave was called before join")
"""


def failure(rank: int, exit_code: int, at_s: float, **fields: object) -> Failure:
    """Return one with the fields that matter."""
    defaults = {"code": "RANK_EXITED", "message": ""}
    return Failure(
        rank=rank,
        exit_code=exit_code,
        at_s=at_s,
        **{**defaults, **fields},  # type: ignore[arg-type]
    )


SMALL_DISK = ("unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=1m none "$0" && exec "$@"')
"""In front of a folder and a command: the folder is a disk of 1 MiB, for that command alone."""


def run_node(
    folder: Path, *command: str, prefix: Sequence[str] = ()
) -> tuple[int, list[Failure], str]:
    """Run two ranks; return the launcher's status, what it says and rank 1's stderr."""
    with reserved_port("127.0.0.1") as port:
        ended = subprocess.run(
            [
                *prefix,
                *(
                    sys.executable,
                    "-m",
                    "isthmus.sites.node.launcher",
                    "--nodes",
                    "1",
                    "--node",
                    "0",
                ),
                *("--ranks", "2", "--name", "r-1"),
                *("--folder", str(folder), "--start-within", "60", "--grace", "2"),
                *("--working-folder", str(folder), "--", *command),
            ],
            input=f"127.0.0.1:{port}\n",
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
    logs = "\n".join(path.read_text() for path in folder.glob("ranks/r-1_*/attempt_0/1/std*.log"))
    failures = [LAUNCHER_LINES.read(line.encode()).failure for line in ended.stdout.splitlines()]
    return ended.returncode, failures, f"{logs}\n{ended.stderr}"


def write_script(folder: Path) -> Path:
    """Write SCRIPT and a module beside it."""
    (folder / "user").mkdir()
    (folder / "user" / "beside.py").write_text("")
    script = folder / "user" / "script.py"
    script.write_text(SCRIPT)
    return script


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "code", "exit_code", "collateral", "message"),
    [
        ("exit", "SCRIPT_FAILED", 17, False, ""),
        ("text", "SCRIPT_FAILED", 1, False, "a reason"),
        ("raise", "SCRIPT_FAILED", 1, False, "ValueError: two lines"),
        ("worker_raises", "SCRIPT_FAILED", 1, False, "ValueError: Caught ValueError in DataLoader"),
        ("caught", "SCRIPT_FAILED", 3, False, "ValueError: a bug"),
        ("disk", "NODE_FAULTY", FAULTY_EXIT_CODE, False, "RuntimeError: not saved"),
        ("handler", "RANK_EXITED", 143, False, ""),
        ("kill", "RANK_KILLED", -9, False, ""),
        ("term", "RANK_KILLED", -15, False, ""),
        ("lost", "RANK_EXITED", COLLATERAL_EXIT_CODE, True, "RuntimeError: the step failed"),
        (
            *("future", "RANK_EXITED", COLLATERAL_EXIT_CODE, True),
            "RuntimeError: Got an error in a callback",
        ),
        ("lost_caught", "RANK_EXITED", 3, True, "PeerLostError: site b is gone"),
        ("corrupt", "GRADIENTS_DIFFER", 1, False, "GradientsDifferError: after step 4, rank 1 of"),
        (
            *("misuse", "SCRIPT_FAILED", 1, False),
            "LocalProtocolError: leave was called before join",
        ),
    ],
)
def test_how_a_rank_ended_is_told(
    tmp_path: Path, action: str, code: str, exit_code: int, collateral: bool, message: str
) -> None:
    script = write_script(tmp_path)
    command = [
        sys.executable,
        "-m",
        "isthmus.sites.node.rank",
        str(os.getpid()),
        "/",
        str(script),
    ]
    error_file = str(tmp_path / "error.json")
    ended = subprocess.run(
        [*command, action, str(tmp_path)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, "RANK": "1", "WORLD_SIZE": "1", "TORCHELASTIC_ERROR_FILE": error_file},
        timeout=WAIT_S,
        check=False,
    )
    assert ended.returncode == exit_code, ended.stderr
    told = describe_failure(tmp_path, rank=1, exit_code=exit_code, at_s=9.0)
    assert (told.code, told.is_collateral) == (code, collateral)
    assert told.message.startswith(message) if message else not told.message
    assert ("a reason" in ended.stderr) == (action == "text")
    assert ("ValueError: sample 9 of shard 3 is bad" in told.message) == (action == "worker_raises")


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("action", ["raise", pytest.param("term", marks=pytest.mark.exhaustive)])
def test_the_rank_that_failed_is_first(tmp_path: Path, action: str) -> None:
    """And the other one, which torchrun ended, is not taken for a cause."""
    script = write_script(tmp_path)
    status, failures, log = run_node(tmp_path, str(script), action, str(tmp_path))
    assert status == 1, log
    first = failures[0]
    exit_code = 1 if action == "raise" else -signal.SIGTERM
    assert (first.rank, first.exit_code, first.is_collateral) == (1, exit_code, False), log
    assert [each.is_collateral for each in failures[1:]] == [True], failures
    assert f"argv {script} {action} __main__" in log
    if action == "raise":
        assert first.message == "ValueError: two lines"
        assert f'File "{script}"' in log, "the traceback is in the rank's own log"


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_rank_that_is_killed_while_the_disk_is_full_is_told_as_that(tmp_path: Path) -> None:
    script = write_script(tmp_path)
    (tmp_path / "node").mkdir()
    prefix = [*SMALL_DISK, str(tmp_path / "node")]
    command = (str(script), "fill", str(tmp_path))
    status, failures, log = run_node(tmp_path / "node", *command, prefix=prefix)
    assert status == 1, log
    assert (failures[0].rank, failures[0].exit_code) == (1, -signal.SIGKILL), log
    assert not failures[0].is_collateral


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_launcher_without_room_says_why_its_ranks_cannot_be_started(tmp_path: Path) -> None:
    script = write_script(tmp_path)
    full = tmp_path / "node"
    full.mkdir()
    fill = 'mount -t tmpfs -o size=8k,nr_inodes=3 none "$0" && touch "$0/a" "$0/b"; exec "$@"'
    prefix = ["unshare", "-rm", "sh", "-c", fill, str(full)]
    status, failures, log = run_node(full, str(script), "exit", str(tmp_path), prefix=prefix)
    assert status == 1, log
    (told,) = failures
    assert (told.code, told.rank) == ("LAUNCH_FAILED", -1)
    assert "No space left on device" in told.message
    assert str(full) in told.message


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_module_ends_well(tmp_path: Path) -> None:
    status, failures, log = run_node(tmp_path, "-m", "platform")
    assert (status, failures) == (0, []), log
    assert "Linux" in log


@pytest.mark.multiprocess
@pytest.mark.slow
def test_the_store_listens_on_the_sites_address_only(tmp_path: Path) -> None:
    script = write_script(tmp_path)
    status, _, stderr = run_node(tmp_path, str(script), "listen", str(tmp_path))
    assert status == 0, stderr
    for rank in range(2):
        assert (tmp_path / f"listening{rank}").read_text() == "127.0.0.1"


def test_a_failure_survives_the_line() -> None:
    victim = failure(0, 1, 5.0, message="RuntimeError: closed", is_collateral=True)
    said = Failed(failure=victim)
    assert LAUNCHER_LINES.read(line_of(said)) == said


def test_a_rank_that_torchrun_ends_is_not_taken_for_the_first(tmp_path: Path) -> None:
    """torchrun has reaped the one that was killed before the watch could see it."""
    ranks = tmp_path / "ranks" / "r-1_x" / "attempt_0"
    for local_rank in range(2):
        (ranks / str(local_rank)).mkdir(parents=True)
    said: list[Failure] = []
    watch = Watch(tmp_path, "r-1", 0, said.append)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        (ranks / "0" / PID_FILE).write_text(str(other.pid))
        other.send_signal(signal.SIGTERM)
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        watch.look()
        assert not said
        watch.start()
        watch.finish({1: -signal.SIGKILL})
    found = [(each.rank, each.exit_code, each.is_collateral) for each in said]
    assert found == [(1, -signal.SIGKILL, False), (0, -signal.SIGTERM, True)]


@pytest.mark.parametrize("text", ["", "[1]", '{"rank": 1}', "{", "null", "some print"])
def test_a_line_that_is_no_failure_is_refused(text: str) -> None:
    with pytest.raises(RemoteProtocolError, match=r"not JSON|want an object"):
        LAUNCHER_LINES.read(text.encode())


def test_signals_come_before_exits_before_exceptions() -> None:
    killed, exited, raised = (
        failure(2, -9, 3.0),
        failure(1, 17, 2.0),
        failure(0, 1, 1.0, message="x"),
    )
    assert sorted([raised, exited, killed], key=cause_first) == [killed, exited, raised]


def test_torchelastic_reads_our_error_file(tmp_path: Path) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    path = tmp_path / "error.json"
    details = {"message": "ValueError: x", "code": "", "time_s": 3.5, "wall_s": 12.9}
    write_error_file(str(path), details, "Traceback ...")
    theirs = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path))
    assert theirs.timestamp == 12
    assert "ValueError: x" in str(theirs.message)
    ours = describe_failure(tmp_path, rank=3, exit_code=1, at_s=9.0)
    assert (ours.message, ours.at_s, ours.rank) == ("ValueError: x", 3.5, 3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, ""),
        ("", ""),
        ('{"message": {"message": "KeyError: 1", "extraInfo": {}}}', "KeyError: 1"),
        ('{"message": "plain"}', "plain"),
        ("{}", ""),
    ],
)
def test_whatever_a_rank_left_is_understood(
    tmp_path: Path, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "error.json").write_text(content)
    told = describe_failure(tmp_path, rank=0, exit_code=1, at_s=9.0)
    assert (told.message, told.at_s, told.is_collateral) == (message, 9.0, False)


def test_messages_are_one_bounded_line() -> None:
    assert one_line("a\n  b\tc") == "a b c"
    assert len(one_line("x" * 10_000)) == MESSAGE_CHARS


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(
    ("last", "status"),
    [
        ("sys.exit(17)", 17),
        ("raise PeerLostError('site b is gone', 'b')", COLLATERAL_EXIT_CODE),
    ],
)
def test_a_full_disk_does_not_take_the_status_of_a_rank(
    tmp_path: Path, last: str, status: int
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom isthmus.protos.errors import PeerLostError\nprint('something')\n" + last
    )
    command = [
        sys.executable,
        "-m",
        "isthmus.sites.node.rank",
        str(os.getpid()),
        "/",
        str(script),
    ]
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=full,
            env={**os.environ, "PYTHONUNBUFFERED": ""},  # its end writes, not the script
            timeout=WAIT_S,
            check=False,
        )
    assert ended.returncode == status


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "code", "exit_code", "text"),
    [
        ("segv", "RANK_KILLED", -11, "a bug of native code"),
        *(
            pytest.param(*each, marks=pytest.mark.exhaustive)
            for each in [
                ("abort", "RANK_KILLED", -6, "native code gave up"),
                # By the rank alone: test_how_a_rank_ended_is_told.
                ("worker_raises", "SCRIPT_FAILED", 1, "ValueError: sample 9 of shard 3 is bad"),
                (
                    *("worker_exits", "SCRIPT_FAILED", 1),
                    "exited unexpectedly: libshard: shard 3 has no index",
                ),
            ]
        ),
    ],
)
def test_the_report_says_what_else_stands_in_the_log(
    tmp_path: Path, action: str, code: str, exit_code: int, text: str
) -> None:
    _, failures, logs = run_node(tmp_path, str(write_script(tmp_path)), action, str(tmp_path))
    first = failures[0]
    assert (first.rank, first.code, first.exit_code) == (1, code, exit_code), logs
    assert text in first.message, logs
    if exit_code < 0:
        assert "Fatal Python error" in logs
        assert "script.py" in logs


@pytest.mark.parametrize("exit_code", [0, 1, -9, -15, -99])
def test_ends_that_are_no_crash_are_not_explained(exit_code: int) -> None:
    assert explain_crash(exit_code) == ""
