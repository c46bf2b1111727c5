"""An agent's end of the stream to a node: what does not begin, falls silent, or talks nonsense."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from pathlib import Path

import pytest

from isthmus.orchestrator.packing import pack
from isthmus.protos.failure import Failure
from isthmus.protos.own_processes import own_command
from isthmus.protos.versions import build
from isthmus.sites.agent.node_launch import node_places
from isthmus.sites.agent.remote_node import RemoteNode
from isthmus.sites.gateway.agent_port import Report
from isthmus.sites.local.rank_messages import Metric
from isthmus.sites.node.carried import blobs_of
from isthmus.sites.node.failures import SiteError
from isthmus.sites.node.node import Listener
from isthmus.sites.node.stream import GREETING, NODE_LINES, NodeOrder, Refused
from isthmus.topology.spec.carried_folder import Carried
from isthmus.topology.spec.json_lines import line_of
from isthmus.topology.spec.run_spec import RunSpec
from isthmus.topology.spec.world import Accelerator, Launcher, Site
from tests.fakes.agent_bench import job_yaml, prepare, topology_yaml

ORDER = NodeOrder(
    site="a",
    node=1,
    prepare=b"",
    state="state",
    bind_host=None,
    dialled_host=None,
    inside_host="10.0.0.8",
    cwd="/",
    files={},
    env={},
    build=build(),
    lease_s=1.0,
    heartbeat_s=0.2,
)
SITE = Site(
    name="a",
    index=0,
    nodes=2,
    accelerators_per_node=1,
    accelerator=Accelerator(name="core", peak_flops_per_s={}, memory_bytes=1, mfu=0.5),
)
GREETED = f"import sys, json; print('motd'); print('{GREETING}1', flush=True); sys.stdin.readline()"


class Heard:
    """What an agent is told."""

    def __init__(self) -> None:
        self.failures: list[Failure] = []
        self.said: list[tuple[int, Report]] = []
        self.listener = Listener(lambda *said: self.said.append(said), self.failures.append)


def listen(program: str, folder: Path) -> Heard:
    """Start a supervisor that is this program, and hear it to its end."""
    heard = Heard()

    async def story() -> None:
        command = [sys.executable, "-c", program]
        node = await RemoteNode.start(ORDER, command, heard.listener, folder / "log", 20.0)
        await node.read()

    asyncio.run(story())
    return heard


def test_a_supervisor_that_does_not_begin_is_told_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(SiteError) as told:
        listen("import sys; sys.exit('Host key verification failed.')", tmp_path)
    assert told.value.code == "LAUNCH_FAILED"
    assert str(told.value) == (
        "the supervisor of node 1 of site a (10.0.0.8) exited with status 1: "
        "Host key verification failed."
    )


@pytest.mark.parametrize(
    ("program", "how"),
    [
        (f"{GREETED}; sys.exit('no space left')", "exited with status 1: no space left"),
        (f"{GREETED}; import time; time.sleep(60)", "has said nothing for 1 s"),
        (f"{GREETED}; import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
    ],
)
def test_a_node_that_goes_is_lost_by_name(tmp_path: Path, program: str, how: str) -> None:
    heard = listen(program, tmp_path)
    (failure,) = heard.failures
    assert failure.code == "NODE_LOST"
    assert failure.message == f"the supervisor of node 1 of site a (10.0.0.8) {how}"
    assert (failure.site, failure.node) == ("a", 1)


def test_nonsense_is_a_failure_and_what_comes_after_it_is_heard(tmp_path: Path) -> None:
    metric = '{"op": "from_gateway", "gateway": 2, "message": {"op": "metric", "kind": "step"}}'
    lines = ['{"op": "failed", "failure": 3, "age_s": 0}', "[]x", metric]
    printed = "; ".join(f"print({line!r}, flush=True)" for line in lines)
    heard = listen(f"{GREETED}; {printed}", tmp_path)
    codes = [failure.code for failure in heard.failures]
    assert codes == ["INTERNAL", "INTERNAL", "NODE_LOST"]
    assert "node to agent: failed.failure: want an object, got 3" in heard.failures[0].message
    assert heard.said == [(2, Metric(kind="step"))]


async def test_a_node_is_given_what_it_lacks_of_the_carried_folder(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "small").write_text("x")
    (root / "large").write_bytes(bytes(3 << 20))
    here, there = blobs_of(tmp_path / "here"), blobs_of(tmp_path / "there")
    packed = pack(root)
    digests = [here.put(path.read_bytes()) for path in packed.paths.values()]
    listed = here.put(packed.folder.to_bytes())
    there.put(b"x")
    message = prepare(topology_yaml(), job_yaml())
    spec = RunSpec.from_bytes(message.run_spec)
    carried = Carried(digest=listed, source=str(root))
    message.run_spec = dataclasses.replace(spec, carried=carried).to_bytes()
    order = dataclasses.replace(
        ORDER,
        prepare=message.SerializeToString(),
        state=str(tmp_path / "there"),
        lease_s=30.0,
    )

    command = own_command("isthmus.sites.node")
    node = await RemoteNode.start(order, command, Heard().listener, tmp_path / "log", 60.0)
    reading = asyncio.create_task(node.read())
    await node.carry(here)
    await node.close()
    await reading
    assert there.missing([*digests, listed]) == []


def test_an_error_of_a_call_names_its_node() -> None:
    error = SiteError("GATEWAY_EXITED", "gone", gateway=3, log_path="x")
    message = NODE_LINES.read(line_of(Refused(id=7, failure=error.failure)))
    assert isinstance(message, Refused)
    told = message.error(1)
    assert told.failure == dataclasses.replace(error.failure, node=1)


def test_a_launcher_gives_each_node_a_command() -> None:
    hosts = ("10.0.0.7", "10.0.0.8")
    launcher = Launcher(kind="ssh", python="/opt/python", options=("-p", "2222"))
    site = dataclasses.replace(SITE, hosts=hosts, launcher=launcher)
    assert [place.host for place in node_places(site, "local")] == list(hosts)
    by_ssh = node_places(site, "ssh")[1]
    assert by_ssh.command[-4:] == ("-p", "2222", "10.0.0.8", "/opt/python -P -m isthmus.sites.node")
    assert not by_ssh.shares_files


def test_nodes_that_are_dialled_are_told_to_others_by_the_sites_hosts() -> None:
    site = dataclasses.replace(SITE, hosts=("203.0.113.7", "203.0.113.8"))
    _, other = node_places(site, "local", ("pod-0.eu:7444", "pod-1.eu:7444"))
    assert (other.host, other.dialled) == ("pod-1.eu", "203.0.113.8")
    assert other.command[-4:] == ("isthmus.sites.node.dial", "--site", "a", "pod-1.eu:7444")
    with pytest.raises(SiteError, match="has 2 nodes, and --node 1"):
        node_places(site, "local", ("pod-0.eu:7444",))


async def test_an_answer_that_makes_no_sense_is_an_error_of_its_call(tmp_path: Path) -> None:
    answer = '{"op": "answered", "id": 0, "result": [{"site": "a", "gateway": "x"}]}'
    program = f"{GREETED}; sys.stdin.readline(); print({answer!r}, flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program]
    node = await RemoteNode.start(ORDER, command, Heard().listener, tmp_path / "log", 20.0)
    reading = asyncio.create_task(node.read())
    with pytest.raises(
        SiteError, match=r"node 1 of site a .* start_gateways\.0\.gateway: want 0 to .*, got 'x'"
    ):
        await node.start_gateways()
    await node.close()
    await reading


def test_slurm_without_an_allocation_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    with pytest.raises(SiteError, match="in no allocation"):
        node_places(SITE, "slurm")
