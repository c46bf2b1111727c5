"""Gateways as processes of their own: the agent's pipe, clean ends, and sudden ones."""

import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from isthmus.topology.spec.reduction_plan import ReductionPlan
from tests.fakes.gateway_process import GatewayProcess
from tests.fakes.gateway_rank import DEADLINE_S, GatewayRank
from tests.fakes.gateway_sites import SITES, gateway_config, reduce_once

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.timeout(120)]

PLAN = ReductionPlan(2, (), "")


def start_pair(
    stack: ExitStack,
    folder: Path,
    **changes: Any,  # noqa: ANN401 - any field
) -> tuple[list[GatewayProcess], list[list[GatewayRank]]]:
    """Start two gateways, connect them, and join a rank to each."""
    processes = [
        stack.enter_context(GatewayProcess(folder / f"gateway{site}.log")) for site in range(2)
    ]
    configs = [gateway_config(folder, PLAN, site, **changes) for site in range(2)]
    for process, config in zip(processes, configs, strict=True):
        process.configure(config)
    processes[0].connect(processes[1])
    processes[1].connect(processes[0])
    ranks = [stack.enter_context(GatewayRank(config.socket_path, 0)) for config in configs]
    for process, rank in zip(processes, ranks, strict=True):
        assert rank.receive()["op"] == "welcome"
        process.wait("connected")
        assert process.wait("joined")["ranks"] == [0]
    return processes, [[rank] for rank in ranks]


def test_a_run_from_configure_to_end_of_file(tmp_path: Path) -> None:
    with ExitStack() as stack:
        processes, ranks = start_pair(stack, tmp_path, codec="split", chunk_bytes=1 << 18)
        for round_ in range(3):
            reduce_once(ranks, round_, 1 << 20, [2.0, 1.0], seed=round_)
        digest = {"step": 2, "combined": 5, "tensors": [1, 2], "names": ["a", "b"]}
        ranks[0][0].send(op="digest", **digest)
        for each in ranks:
            each[0].leave()
        assert digest.items() <= processes[0].wait("digest").items()
        for process, site in zip(processes, SITES, strict=False):
            assert process.end() == 0
            totals = [line for line in process.messages if line["op"] == "metric"][-1]
            assert totals["labels"]["source"] == site
            raw_bytes = 3 * 4 << 20
            assert totals["values"]["raw_bytes"] == raw_bytes
            assert 0 < totals["values"]["sent_bytes"] < raw_bytes
            assert not any(line["op"] == "failed" for line in process.messages)
    assert not list(tmp_path.glob("*.sock"))


@pytest.mark.parametrize(
    "how", [pytest.param(signal.SIGKILL, marks=pytest.mark.exhaustive), signal.SIGSTOP]
)
def test_a_dead_or_frozen_gateway_is_suspected(tmp_path: Path, how: signal.Signals) -> None:
    """Of a frozen one, the kernel still accepts connections, and nothing answers."""
    with ExitStack() as stack:
        processes, ranks = start_pair(stack, tmp_path, peer_lost_s=1.5, keepalive_time_s=0.5)
        reduce_once(ranks, 0, 1000, [2.0, 1.0], seed=0)
        processes[1].process.send_signal(how)
        ranks[0][0].reduce(1, 0, 1000, 1.0)
        suspect = processes[0].wait("suspect")
        assert (suspect["site"], suspect["is_gone"]) == (SITES[1], how is signal.SIGKILL)
        if how is signal.SIGKILL:
            assert ranks[1][0].receive() == {}
            return
        processes[1].process.send_signal(signal.SIGCONT)
        assert processes[0].wait("reached")["site"] == SITES[1]
        ranks[1][0].reduce(1, 0, 1000, 2.0)
        assert [ranks[site][0].receive()["op"] for site in range(2)] == ["reduced"] * 2


def test_sigterm_is_a_stop(tmp_path: Path) -> None:
    with ExitStack() as stack:
        processes, _ = start_pair(stack, tmp_path)
        processes[0].process.terminate()
        assert processes[0].process.wait(DEADLINE_S) == 0
        suspect = processes[1].wait("suspect")
        assert (suspect["site"], suspect["is_gone"]) == (SITES[0], True)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"nonsense", "agent to gateway: the line is not JSON"),
        pytest.param(
            b"[1]",
            "agent to gateway: the message: want an object with one of the ops",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            b'{"op": "connect"}',
            "want an object with one of the ops gateway_config",
            marks=pytest.mark.exhaustive,
        ),
        (
            b'{"op": "gateway_config", "site": "ash"}',
            "agent to gateway: gateway_config.run_id is missing",
        ),
    ],
)
def test_a_bad_first_line_is_named(line: bytes, message: str, tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "gateway.log") as process:
        process.say(line)
        assert message in process.wait("failed")["message"]
        assert process.process.wait(DEADLINE_S) == 1
    assert "Traceback" not in (tmp_path / "gateway.log").read_text()


@pytest.mark.parametrize(
    ("changes", "line", "message"),
    [
        (
            {},
            b'{"op": "connect", "peers": [{"site": "birch"}]}',
            "connect.peers.0.gateway is missing",
        ),
        pytest.param(
            *({}, b'{"op": "connect", "peers": []}', "no address of site birch gateway 0"),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            {}, b'{"op": "what"}', "one of the ops connect, settle", marks=pytest.mark.exhaustive
        ),
        pytest.param(
            *({"socket_path": "/" + "x" * 200}, b"{}", "at most 107"), marks=pytest.mark.exhaustive
        ),
        ({"bind_host": "192.0.2.1"}, b"{}", "cannot listen on"),
    ],
)
def test_bad_later_lines_and_addresses_are_named(
    tmp_path: Path, changes: dict[str, Any], line: bytes, message: str
) -> None:
    with GatewayProcess(tmp_path / "gateway.log") as process:
        process.configure(gateway_config(tmp_path, PLAN, 0, **changes))
        process.say(line)
        assert message in process.wait("failed")["message"]
        assert process.process.wait(DEADLINE_S) == 1


def test_end_of_file_before_anything(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "gateway.log") as process:
        assert process.end() == 0


def test_neither_torch_nor_pydantic_is_imported() -> None:
    import subprocess
    import sys

    unwanted = "bool({'torch', 'pydantic'} & set(sys.modules))"
    code = f"import sys, isthmus.sites.gateway.main; sys.exit({unwanted})"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
