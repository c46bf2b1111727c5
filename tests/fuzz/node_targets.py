"""The stream between a site's agent and a node's supervisor, both ends (sites/node/stream.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from isthmus.protos.errors import RemoteProtocolError
from isthmus.protos.failure import Failure
from isthmus.sites.agent.remote_node import RemoteNode
from isthmus.sites.gateway.agent_port import Address, Cancel
from isthmus.sites.local.rank_messages import Metric
from isthmus.sites.node.failures import SiteError
from isthmus.sites.node.node import Listener
from isthmus.sites.node.rank_stacks import RankStack
from isthmus.sites.node.stream import (
    AGENT_LINES,
    ORDERS,
    Alive,
    Answered,
    Failed,
    ForGateways,
    FromGateway,
    Leave,
    Look,
    NodeOrder,
    ReadLogEnds,
    Refused,
    StartGateways,
    WaitJoined,
)
from isthmus.topology.spec.json_fields import Message, to_json
from isthmus.topology.spec.json_lines import line_of
from tests.fuzz.line_targets import json_bytes
from tests.fuzz.target import Target

T = TypeVar("T")

ORDER = NodeOrder(
    site="a",
    node=1,
    prepare=b"\x0a\x01r",
    state="/state",
    bind_host=None,
    dialled_host="10.0.0.8",
    inside_host="10.0.0.8",
    cwd="/",
    files={"token": b"secret"},
    env={"ISTHMUS_TOKEN_FILE": "{folder}/token"},
    build="0.1.0",
    lease_s=1.0,
    heartbeat_s=0.2,
)


def _calls() -> list[bytes]:
    messages: list[Message] = [
        Alive(),
        ForGateways(command=Cancel(epoch=2)),
        StartGateways(id=0),
        WaitJoined(id=1),
        Leave(id=2),
        ReadLogEnds(id=3, first=("rank1",)),
        Look(id=9, rank=1, only_stopped=True),
    ]
    return [line_of(message) for message in messages]


class _Here(ThreadPoolExecutor):
    """Does at once what others would do in a thread: a fuzzer traces threads slowly."""

    def submit(self, work: Callable[..., T], /, *given: Any, **named: Any) -> Future[T]:  # noqa: ANN401
        """Return the result of a call, which has been made."""
        done: Future[T] = Future()
        done.set_result(work(*given, **named))
        return done


async def _hear(data: bytes) -> None:
    """Let an agent read what its node wrote until its end: perhaps answers to its calls."""
    asyncio.get_running_loop().set_default_executor(_Here())
    asked = asyncio.Semaphore(0)
    stdout = asyncio.StreamReader()
    stdin = SimpleNamespace(
        write=lambda sent: asked.release() if b'"id"' in sent else None,
        is_closing=lambda: False,
    )
    process = SimpleNamespace(stdin=stdin, stdout=stdout, wait=_status_0, returncode=0)
    told: list[object] = []
    listener = Listener(lambda *said: told.append(said), told.append)
    node = RemoteNode(
        ORDER, cast("asyncio.subprocess.Process", process), listener, Path("/run/log")
    )
    calls = (node.start_gateways(), node.look(1, only_stopped=True), node.read_logs(1000))
    waits: list[asyncio.Task[object]] = []
    for call in calls:
        waits.append(asyncio.create_task(call))
        await asked.acquire()
    stdout.feed_data(data)
    stdout.feed_eof()
    await node.read()
    await asyncio.sleep(0)
    for each in waits:
        each.cancel()
    for result in await asyncio.gather(*waits, return_exceptions=True):
        if isinstance(result, Exception) and not isinstance(result, SiteError):
            raise result


async def _status_0() -> int:
    return 0


def _said() -> list[bytes]:
    failure = Failure(code="RANK_KILLED", message="gone", at_s=0.0, site="a", rank=1)
    endpoint = Address(site="a", gateway=1, host="10.0.0.8", port=4000)
    stack = RankStack(False, ("train.py:3",), "/state/stacks")
    messages: list[Message] = [
        Alive(),
        Failed.of(failure),
        FromGateway(gateway=2, message=Metric(kind="step")),
        Answered(id=0, result=to_json((endpoint,))),
        Refused(id=0, failure=Failure(code="GATEWAY_EXITED", message="gone", gateway=1)),
        Answered(id=1, result=to_json(stack)),
        Answered(id=2, result=[[["rank1", ["a line"]]], 7]),
    ]
    return [line_of(message) for message in messages]


NODE_TARGETS = (
    Target(
        name="node-order",
        decode=ORDERS.read,
        refusals=(RemoteProtocolError,),
        samples=lambda: [line_of(ORDER)],
        most_bytes=json_bytes,
    ),
    Target(
        name="node-calls",
        decode=AGENT_LINES.read,
        refusals=(RemoteProtocolError,),
        samples=_calls,
        most_bytes=json_bytes,
    ),
    Target(
        name="node-answers",
        decode=lambda data: asyncio.run(_hear(data)),
        refusals=(),
        samples=_said,
        most_bytes=lambda data: (1 << 20) + json_bytes(data),
        mutations=100,
    ),
)
