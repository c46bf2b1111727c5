"""JSON between processes of one machine: ranks, gateways, agents, emulators; and small files."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from isthmus.orchestrator.core.run_events import SiteNamespace
from isthmus.orchestrator.emulator.emulator_config import (
    Apply,
    NetnsConfig,
    RelayConfig,
    RelayEndpoint,
    Up,
)
from isthmus.orchestrator.emulator.link_shape import LinkShape
from isthmus.orchestrator.run_folder.home import ANNOUNCED, RunFolder
from isthmus.protos.errors import LocalProtocolError, RemoteProtocolError
from isthmus.protos.failure import Failure
from isthmus.sites.gateway.agent_port import (
    Connected,
    Joined,
    Listening,
    Said,
    read_commands,
    read_configuration,
)
from isthmus.sites.local.rank_messages import FROM_RANK, Failed, Metric
from isthmus.sites.node.gateway_process import Gateway
from isthmus.sites.node.node import Listener
from isthmus.sites.node.rank_failures import (
    LAUNCHER_LINES,
    cause_first,
    describe_failure,
    write_error_file,
)
from isthmus.topology.faults.script import Change
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.json_fields import Message, to_json
from isthmus.topology.spec.json_lines import Kinds, line_of
from isthmus.topology.spec.reduction_plan import ReductionPlan, Tree, star
from isthmus.topology.spec.run_spec import CodedPlan
from tests.fakes.gateway_sites import gateway_config
from tests.fuzz.target import KIB, Target


@contextlib.contextmanager
def file_with(data: bytes, name: str) -> Iterator[Path]:
    """Give the path of a file for decoders that read one; it is alone in its folder."""
    with tempfile.TemporaryDirectory(prefix="isthmus-fuzz-") as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        yield path


def json_bytes(data: bytes) -> int:
    """Return what JSON may take: an empty object is 64 bytes of memory for 3 of text."""
    return 64 * KIB + 120 * len(data)


def line(fields: Mapping[str, Any]) -> bytes:
    """Return one message as a line."""
    return json.dumps(fields).encode() + b"\n"


def _target(
    name: str,
    decode: Callable[[bytes], object],
    refusals: tuple[type[Exception], ...],
    samples: Callable[[], list[bytes]],
) -> Target:
    return Target(
        name=name, decode=decode, refusals=refusals, samples=samples, most_bytes=json_bytes
    )


def _emulator_target(name: str, kind: object, samples: Callable[[], list[bytes]]) -> Target:
    kinds: Kinds[Message] = Kinds(name, kind)
    return _target(name, kinds.read, (ConfigError,), samples)


# ---------------------------------------------------------------- ranks and gateways


def _rank_samples() -> list[bytes]:
    reduce = {"round": 3, "bucket": 0, "region": 1, "offset": 0, "numel": 900, "layout": 77}
    metric = {"kind": "step", "step": 4, "values": {"loss": 2.5}, "labels": {"a": "b"}}
    digest = {"step": 4, "combined": 15, "tensors": [10, 11], "names": ["w", "b"]}
    messages: list[dict[str, Any]] = [
        {"op": "join", "rank": 1, "local_rank": 1, "pid": 99, "generation": 2},
        {"op": "region", "region": 1, "numel": 4096},
        {"op": "reduce", **reduce, "weight": 8192.0, "exact": False},
        {"op": "metric", **metric},
        {"op": "digest", **digest},
        {"op": "leave"},
    ]
    return [line(each).rstrip() for each in messages]


def _configuration_samples() -> list[bytes]:
    trees = (star(3, 1), Tree(0, {1: 0, 2: 1}, 2))
    plans = (ReductionPlan(2, (), "gather"), ReductionPlan(3, trees, "trees"))
    configs = [gateway_config(Path("/run"), plan, plan.num_sites - 1) for plan in plans]
    return [line_of(config) for config in configs]


def _command_samples() -> list[bytes]:
    peer = {"site": "ash", "gateway": 0, "host": "127.0.0.1", "port": 4000}
    plan = ReductionPlan(3, (star(3, 1), Tree(0, {1: 0, 2: 1}, 2)), "trees")
    wanted = to_json(CodedPlan(plan, ("int8", "fp32")))
    return [
        line({"op": "connect", "peers": [peer, peer]}),
        line({"op": "connect", "peers": []}),
        line({"op": "settle", "epoch": 2, "stops": False, "reduction": wanted}),
        line({"op": "cancel", "epoch": 2}),
    ]


def _gateway_samples() -> list[bytes]:
    values = {"sent_bytes": 12.0, "rtt_s": 0.01}
    said: list[Said] = [
        Listening(host="127.0.0.1", port=4000),
        Connected(),
        Joined(ranks=(0, 1)),
        Metric(kind="link", values=values),
        Failed(failure=Failure(code="PEER_LOST", message="gone", site="ash")),
    ]
    return [b"".join(map(line_of, said)), *map(line_of, said)]


def _hear_gateway(data: bytes) -> None:
    """Let an agent read what its gateway wrote until its end."""

    async def hear() -> None:
        stdout = asyncio.StreamReader()
        stdout.feed_data(data)
        stdout.feed_eof()
        process = SimpleNamespace(stdout=stdout, stdin=None, wait=_status_0)
        config = gateway_config(Path("/run"), ReductionPlan(2, (), ""), 0)
        gateway = Gateway(config, 0, cast("asyncio.subprocess.Process", process), Path("/run/log"))
        told: list[object] = []
        note = told.append
        await gateway.read(Listener(lambda *_: None, note))

    asyncio.run(hear())


async def _status_0() -> int:
    return 0


# ---------------------------------------------------------------- emulators

_SHAPES = (
    LinkShape(source="ash", target="birch", bytes_per_s=1e6, delay_s=0.01),
    LinkShape(source="birch", target="ash", bytes_per_s=1e6, delay_s=0.01, jitter_s=0.001),
)
_ENDPOINT = RelayEndpoint(source="ash", target="birch", gateway=0, host="127.0.0.1", port=4000)


def _relay_samples() -> list[bytes]:
    return [line_of(RelayConfig(links=_SHAPES, endpoints=(_ENDPOINT,), seed=3))]


def _netns_samples() -> list[bytes]:
    return [line_of(NetnsConfig(sites=("ash", "birch"), links=_SHAPES, seed=3))]


def _apply_samples() -> list[bytes]:
    changes = (
        Change(kind="shape", source="ash", target="birch", bytes_per_s=1e5, loss=0.01),
        Change(kind="cut", source="birch", target="ash"),
    )
    asked = (Apply(changes=changes), Apply(), Apply(endpoints=(_ENDPOINT,)))
    return [line_of(request) for request in asked]


def _up_samples() -> list[bytes]:
    site = SiteNamespace(site="ash", address="10.0.0.1", net="/proc/7/fd/3", user="")
    return [line_of(Up(sites=(site,))), line_of(Up(endpoints=(_ENDPOINT,)))]


# ---------------------------------------------------------------- small files


def _failures_of(data: bytes) -> None:
    assert cause_first(LAUNCHER_LINES.read(data).failure)


def _failures_samples() -> list[bytes]:
    failure = Failure(
        code="RANK_KILLED",
        message="",
        at_s=12.5,
        rank=1,
        exit_code=-9,
        log_path="/run/stderr.log",
    )
    return [line_of(Failed(failure=failure))]


def _describe(data: bytes) -> None:
    with file_with(data, "error.json") as path:
        said = describe_failure(path.parent, rank=0, exit_code=1, at_s=3.0)
    assert cause_first(said)


def _error_samples() -> list[bytes]:
    details = {"message": "boom", "code": "", "collateral": False, "time_s": 9.5, "wall_s": 1e9}
    with file_with(b"", "error.json") as path:
        write_error_file(str(path), details, "Traceback: boom")
        return [path.read_bytes(), b'{"message": "boom"}', b'{"message": {"message": "boom"}}']


def _announced(data: bytes) -> None:
    with file_with(data, ANNOUNCED) as path:
        RunFolder(path.parent).living_coordinator()


LINE_TARGETS = (
    _target("rank-message", FROM_RANK.read, (LocalProtocolError,), _rank_samples),
    _target(
        "gateway-configuration",
        lambda data: read_configuration(io.BytesIO(data)),
        (LocalProtocolError,),
        _configuration_samples,
    ),
    _target(
        "gateway-command",
        lambda data: list(read_commands(io.BytesIO(data))),
        (LocalProtocolError,),
        _command_samples,
    ),
    _target("gateway-output", _hear_gateway, (), _gateway_samples),
    _emulator_target("relay-configuration", RelayConfig, _relay_samples),
    _emulator_target("netns-configuration", NetnsConfig, _netns_samples),
    _emulator_target("emulator-change", Apply, _apply_samples),
    _emulator_target("emulator-up", Up, _up_samples),
    _target("failures-file", _failures_of, (RemoteProtocolError,), _failures_samples),
    _target("error-file", _describe, (), _error_samples),
    _target(
        "coordinator-file",
        _announced,
        (),
        lambda: [line({"address": "127.0.0.1:4000", "pid": 7, "generation": 2})],
    ),
)
