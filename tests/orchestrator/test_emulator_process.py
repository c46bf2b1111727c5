"""The relay as a process: its lines, its exits, its accuracy."""

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from isthmus.orchestrator.emulator.emulator_child import running_emulator
from isthmus.orchestrator.emulator.emulator_config import Counted, RelayConfig
from isthmus.orchestrator.emulator.owner_pipes import MessageWriter
from isthmus.topology.faults.script import Change
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.json_lines import line_of
from tests.fakes.emulator_configs import relay_config
from tests.fakes.sockets import receive, round_trip_s

COMMAND = [sys.executable, "-m", "isthmus.orchestrator.emulator.relay"]
DEADLINE_S = 60.0


@pytest.mark.slow
@pytest.mark.multiprocess
def test_it_says_where_it_listens_then_counts_and_ends_with_its_stdin() -> None:
    with subprocess.Popen(
        COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        stop = threading.Timer(DEADLINE_S, child.kill)
        stop.start()
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            assert child.stderr is not None
            child.stdin.write(line_of(relay_config(9)).decode())
            child.stdin.flush()
            listening = json.loads(child.stdout.readline())
            counters = json.loads(child.stdout.readline())
            child.stdin.close()
            assert child.stderr.read() == ""
            assert child.wait(DEADLINE_S) == 0
        finally:
            stop.cancel()
            child.kill()
    assert listening["op"] == "up"
    [endpoint] = listening["endpoints"]
    assert {**endpoint, "port": 0} == {
        "source": "eu",
        "target": "us",
        "gateway": 1,
        "host": "127.0.0.1",
        "port": 0,
    }
    names = ("sent_bytes", "delivered_bytes", "dropped_packets", "lost_packets", "queued_bytes")
    idle = dict.fromkeys(names, 0)
    assert counters == {
        "op": "counted",
        "links": [
            {"source": "eu", "target": "us", **idle},
            {"source": "us", "target": "eu", **idle},
        ],
    }


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("stdin", "message"),
    [
        ("", "the line is not JSON"),
        ('{"op": "relay_config"}\n', "owner to relay: relay_config.links is missing"),
        ("x" * (1 << 23) + "\n", "longer than"),
    ],
)
def test_a_wrong_line_is_answered_in_one_line(stdin: str, message: str) -> None:
    done = subprocess.run(
        COMMAND, input=stdin, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("relay: configuration: ")
    assert message in line


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_stdin_that_is_no_pipe_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(line_of(relay_config(9)))
    with (tmp_path / "config.json").open() as stdin:
        done = subprocess.run(
            COMMAND, stdin=stdin, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
    assert done.returncode == 2
    assert done.stderr == (
        "relay: configuration: stdin must be a pipe; the relay ends when it is closed\n"
    )


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_refusal_reaches_who_started_it() -> None:
    made = relay_config(9)
    wrong = RelayConfig(links=made.links, endpoints=made.endpoints, bind_host="203.0.113.7")
    with pytest.raises(ConfigError, match=r"bind_host: 203\.0\.113\.7"), running_emulator(wrong):
        pass


@pytest.mark.slow
@pytest.mark.multiprocess
def test_it_comes_before_other_processes_where_it_may() -> None:
    may = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os; os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))",
        ],
        capture_output=True,
        timeout=DEADLINE_S,
        check=False,
    )
    with running_emulator(relay_config(9)) as relay:
        policy = os.sched_getscheduler(relay.pid)
    assert policy == (os.SCHED_RR if may.returncode == 0 else os.SCHED_OTHER)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_its_links_are_changed_and_counted_while_it_runs() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        running_emulator(relay_config(server.getsockname()[1])) as relay,
    ):
        dial = relay.endpoints[0]
        with socket.create_connection((dial.host, dial.port), DEADLINE_S) as near:
            server.settimeout(DEADLINE_S)
            far, _ = server.accept()
            with far:
                far.settimeout(DEADLINE_S)
                wrong = Change(kind="cut", source="eu", target="mars")
                with pytest.raises(ConfigError, match=r"changes\.0: there is no link from eu"):
                    relay.apply([wrong])
                relay.apply([Change(kind="cut", source="eu", target="us")])
                near.sendall(b"x")
                far.setblocking(False)
                with pytest.raises(BlockingIOError):
                    far.recv(1)
                assert relay.counters()["eu", "us"]["sent_bytes"] == 0
                relay.apply([Change(kind="heal", source="eu", target="us")])
                far.settimeout(DEADLINE_S)
                assert far.recv(1) == b"x"
                counters = relay.counters()
    assert counters["eu", "us"] == {
        "sent_bytes": 1,
        "delivered_bytes": 1,
        "dropped_packets": 0,
        "lost_packets": 0,
        "queued_bytes": 0,
    }
    assert set(counters) == {("eu", "us"), ("us", "eu")}


@pytest.mark.slow
@pytest.mark.multiprocess
def test_an_emulator_that_has_gone_is_told_in_its_last_words() -> None:
    with running_emulator(relay_config(9)) as relay:
        os.kill(relay.pid, signal.SIGKILL)
        with pytest.raises(ConfigError, match="it has ended"):
            relay.counters()


def test_a_reader_that_has_stopped_costs_messages_and_never_waits() -> None:
    read_end, write_end = os.pipe()
    try:
        writer = MessageWriter(write_end)
        message = Counted(links=({"x": "x" * 5000},))
        for _ in range(100):
            writer.offer(message)
        os.set_blocking(read_end, False)
        text = b""
        for _ in range(3):
            text += os.read(read_end, 1 << 20)
            writer.offer(message)
        *lines, rest = text.split(b"\n")
        assert 10 < len(lines) < 30
        assert set(lines) == {line_of(message).rstrip()}
        assert len(rest) < 5100
        os.close(read_end)
        read_end = -1
        with pytest.raises(BrokenPipeError):
            writer.offer(message)
    finally:
        for end in (read_end, write_end):
            if end >= 0:
                os.close(end)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.exhaustive
def test_round_trip_and_throughput_are_what_was_configured() -> None:
    """Loose above, where a busy machine may be late; tight below, where only a bug gets.

    Exact figures of a quiet machine: `python -m tests.tools.emulation_check`.
    """
    rate, rtt_s, num_bytes = 6.25e6, 0.06, 4 << 20
    with socket.create_server(("127.0.0.1", 0)) as server:
        made = relay_config(server.getsockname()[1], rate, rtt_s / 2)
        with running_emulator(made) as relay:
            dial = relay.endpoints[0]
            with socket.create_connection((dial.host, dial.port), DEADLINE_S) as near:
                server.settimeout(DEADLINE_S)
                far, _ = server.accept()
                with far:
                    far.settimeout(DEADLINE_S)
                    rtts_s = [round_trip_s(near, far) for _ in range(5)]
                    began_s = time.monotonic()
                    sender = threading.Thread(target=near.sendall, args=(bytes(num_bytes),))
                    sender.start()
                    receive(far, num_bytes)
                    took_s = time.monotonic() - began_s
                    sender.join(DEADLINE_S)
    assert min(rtts_s) >= rtt_s - 0.002
    assert statistics.median(rtts_s) <= rtt_s + 0.2
    assert took_s >= num_bytes / rate + rtt_s / 2 - 0.002
    assert took_s <= 3 * (num_bytes / rate + rtt_s)
