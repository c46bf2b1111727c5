"""Messages of the two planes, taken as far as the coordinator and gateways take them.

What a mutation makes of run and generation would be refused at once, so those are made right again:
what a peer of another build, or a hostile one that has got in, could send.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from isthmus.orchestrator.certificates import (
    change_authority,
    issue,
    make_authority,
    make_token,
    revoke,
)
from isthmus.orchestrator.coordinator.control import Control
from isthmus.orchestrator.coordinator.journal import Journal
from isthmus.orchestrator.coordinator.sessions import Session
from isthmus.protos.control.v1 import control_pb2 as pb
from isthmus.protos.errors import IsthmusError
from isthmus.protos.exchange.v1.exchange_pb2 import End, HelloRequest, LeaveRequest
from isthmus.protos.join_tokens import BadTokenError, JoinToken
from isthmus.protos.revocation import RevocationError, RevocationList
from isthmus.protos.versions import (
    CONTROL_PROTOCOL_MAX,
    CONTROL_PROTOCOL_MIN,
    EXCHANGE_PROTOCOL_MAX,
    EXCHANGE_PROTOCOL_MIN,
)
from isthmus.sites.gateway.links.peer_server import ExchangeServer
from isthmus.sites.gateway.links.reversed_calls import unwrapped
from isthmus.sites.gateway.links.status import CallError
from isthmus.sites.gateway.links.transport import HELLO_METHOD, LEAVE_METHOD
from isthmus.topology.documents.load import load_topology
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.hashing import topology_hash
from tests.fakes.gateway_sites import GATHER_2, gateway_config
from tests.fakes.told_calls import ToldCall
from tests.fakes.worlds import JOB, topology_text
from tests.fuzz.target import KIB, MIB, Target

_TOPOLOGY = topology_text()
_HASH = topology_hash(load_topology(_TOPOLOGY, "t.yaml"))
_RUN = "run-1"
_REFUSALS = (DecodeError, IsthmusError, ConfigError)


def _hello(site: str) -> pb.Hello:
    return pb.Hello(
        protocol_min=CONTROL_PROTOCOL_MIN,
        protocol_max=CONTROL_PROTOCOL_MAX,
        topology_hash=_HASH,
        site=site,
        incarnation=f"{site}-1",
    )


def _submit() -> pb.SubmitRequest:
    return pb.SubmitRequest(
        run_id=_RUN,
        job=pb.Document(source="job.yaml", text=JOB),
        topology=pb.Document(source="topology.yaml", text=_TOPOLOGY),
    )


@contextmanager
def _controlled(*, runs: bool = True) -> Iterator[tuple[Control, Session]]:
    """Give a coordinator, with a run if so asked, and the session of site a."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder))
        try:
            control = Control(load_topology(_TOPOLOGY, "t.yaml"), journal, Path(folder) / "runs")
            session = control.join(_hello("a")).session
            control.join(_hello("b"))
            if runs:
                control.runs.submit(control.runs.decide(_submit(), {}))
            yield control, session
        finally:
            journal.close()


def _in_a_loop(work: Callable[[], object]) -> None:
    async def run() -> None:
        work()

    asyncio.run(run())


def _take_agent_message(data: bytes) -> None:
    message = pb.AgentMessage.FromString(data)

    def take() -> None:
        with _controlled() as (control, session):
            assert control.runs.latest is not None
            content: Any = getattr(message, message.WhichOneof("kind") or "leave")
            if "generation" in content.DESCRIPTOR.fields_by_name:
                content.run_id, content.generation = _RUN, control.runs.latest.generation
            control.receive(session, message)

    _in_a_loop(take)


def _take_hello(data: bytes) -> None:
    hello = pb.Hello.FromString(data)

    def take() -> None:
        with _controlled() as (control, _):
            control.join(hello)

    _in_a_loop(take)


def _take_logs(data: bytes) -> None:
    request = pb.ShipLogsRequest.FromString(data)

    def take() -> None:
        with _controlled() as (control, _):
            assert control.runs.latest is not None
            run = control.runs.fenced(_RUN, control.runs.latest.generation)
            run.add_logs("a", request.lines)

    _in_a_loop(take)


def _take_submission(data: bytes) -> None:
    request = pb.SubmitRequest.FromString(data)

    def take() -> None:
        with _controlled(runs=False) as (control, _):
            if not control.runs.is_known(request.run_id):
                control.runs.submit(control.runs.decide(request, {}))

    _in_a_loop(take)


def _agent_samples() -> list[bytes]:
    failure = pb.Failure(code="RANK_KILLED", message="m", site="a", rank=1, age_s=0.5)
    kinds: list[dict[str, Any]] = [
        {"heartbeat": pb.Heartbeat(sequence=3)},
        {
            "prepared": pb.SitePrepared(
                endpoints=[pb.GatewayEndpoint(site="a", host="127.0.0.1", port=9)]
            )
        },
        {"running": pb.SiteRunning()},
        {"ended": pb.SiteEnded(failures=[failure])},
        {"metrics": pb.MetricBatch(metrics=[pb.Metric(kind="step", step=1, values={"loss": 2.5})])},
        {"digest": pb.Digest(step=1, combined=7, tensors=[1, 2], names=["x", "y"])},
        {"settled": pb.Settled(epoch=1, round=4, finished=b"[]", chain=5, chain_round=3)},
        {"resumed": pb.Resumed(epoch=1, round=4)},
        {"suspect": pb.Suspect(site="b", is_gone=True, why="silent")},
        {"reached": pb.Reached(site="b")},
        {"stall": pb.Stall(absent=[pb.AbsentRank(rank=0, for_s=9.5, doing="x")])},
        {"leave": pb.Leave()},
    ]
    return [pb.AgentMessage(sequence=1, **kind).SerializeToString() for kind in kinds]


def _log_samples() -> list[bytes]:
    lines = [
        pb.LogLine(site="a", source="rank0", sequence=at, wall_s=1.5, text=f"line {at}")
        for at in range(3)
    ]
    return [pb.ShipLogsRequest(site="a", lines=lines).SerializeToString()]


# ---------------------------------------------------------------- between gateways


class _Nobody:
    """A receiver that takes everything."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


def _take_exchange_hello(data: bytes) -> None:
    hello = HelloRequest.FromString(data)
    hello.run_id, hello.generation, hello.config_hash = "run-1", 1, "a" * 64
    server = ExchangeServer(gateway_config(Path("/nowhere"), GATHER_2, 0), _Nobody())
    asyncio.run(server.methods[HELLO_METHOD](ToldCall(hello.SerializeToString())))


def _take_leave(data: bytes) -> None:
    leave = LeaveRequest.FromString(data)
    server = ExchangeServer(gateway_config(Path("/nowhere"), GATHER_2, 0), _Nobody())
    leave.session = server.session_of((1, 0))
    asyncio.run(server.methods[LEAVE_METHOD](ToldCall(leave.SerializeToString())))


def _reversed_samples() -> list[bytes]:
    return [b"\0answer", b"\1" + End(details="all of it").SerializeToString()]


def _exchange_hello() -> HelloRequest:
    return HelloRequest(
        protocol_min=EXCHANGE_PROTOCOL_MIN,
        protocol_max=EXCHANGE_PROTOCOL_MAX,
        build="1",
        site="birch",
    )


def _leaves() -> list[bytes]:
    return [
        LeaveRequest(rank=-1).SerializeToString(),
        LeaveRequest(code="NON_FINITE", message="m", site="birch", rank=2).SerializeToString(),
        LeaveRequest(code="RANK_LOST", message="m").SerializeToString(),
    ]


# ---------------------------------------------------------------- joining


def _take_revocations(data: bytes) -> None:
    try:
        RevocationList.read(data.decode("utf-8", errors="replace"), ())
    except RevocationError as error:
        if "has signed it" not in str(error):  # that is asked last
            raise


def _revocations() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        make_authority(path, "test.internal")
        for site in ("a", "b"):
            issue(path, f"{site}.agent", 1.0)
        revoke(path, "a")
        change_authority(path)  # the list has an entry with another issuer
        revoke(path, "b")
        return [(path / "ca.crl").read_bytes()]


def _token() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        make_authority(Path(folder), "test.internal")
        return [make_token(Path(folder), "a", 0.01).text().encode()]


def _control_target(
    name: str, decode: Callable[[bytes], None], samples: Callable[[], list[bytes]]
) -> Target:
    return Target(
        name=name,
        decode=decode,
        refusals=_REFUSALS,
        samples=samples,
        # A coordinator with its run, and what it keeps of the message.
        most_bytes=lambda data: 4 * MIB + 64 * len(data),
        mutations=60,
    )


MESSAGE_TARGETS = (
    _control_target("agent-message", _take_agent_message, _agent_samples),
    _control_target("agent-hello", _take_hello, lambda: [_hello("a").SerializeToString()]),
    _control_target("ship-logs", _take_logs, _log_samples),
    _control_target("submit", _take_submission, lambda: [_submit().SerializeToString()]),
    Target(
        name="exchange-hello",
        decode=_take_exchange_hello,
        refusals=(DecodeError, IsthmusError),
        samples=lambda: [_exchange_hello().SerializeToString()],
        most_bytes=lambda data: 512 * KIB + 64 * len(data),
    ),
    Target(
        name="exchange-leave",
        decode=_take_leave,
        refusals=(DecodeError, IsthmusError),
        samples=_leaves,
        most_bytes=lambda data: 512 * KIB + 64 * len(data),
    ),
    Target(
        name="reversed-message",
        decode=lambda data: unwrapped(memoryview(data)),
        refusals=(CallError,),
        samples=_reversed_samples,
        most_bytes=lambda data: 64 * KIB + 64 * len(data),
    ),
    Target(
        name="join-token",
        decode=lambda data: JoinToken.of_text(data.decode("utf-8", errors="replace")),
        refusals=(BadTokenError,),
        samples=_token,
        most_bytes=lambda data: 512 * KIB + 64 * len(data),
    ),
    Target(
        name="revocation-list",
        decode=_take_revocations,
        refusals=(RevocationError,),
        samples=_revocations,
        most_bytes=lambda data: 512 * KIB + 64 * len(data),
    ),
)
