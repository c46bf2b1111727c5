"""What processes of one machine say to each other through sockets, and leave for the next one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from isthmus.orchestrator.emulator.backend import EmulatorError
from isthmus.orchestrator.emulator.emulations import named_emulator
from isthmus.orchestrator.emulator.standing import Answer, Fault, answer_to, read_answer
from isthmus.protos.errors import IsthmusError
from isthmus.sites.worker.exchange.gateway_link import GatewayLink
from isthmus.topology.documents.load import load_job, load_topology
from isthmus.topology.faults.loading import load_faults
from isthmus.topology.faults.script import Change, Kill, Pause
from isthmus.topology.spec.carried_folder import CarriedFile, CarriedFolder, CarriedLink
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.json_lines import line_of
from isthmus.topology.spec.plan_wishes import Replan
from isthmus.topology.spec.run_spec import RunSpec
from tests.fakes.run_specs import spec_of
from tests.fakes.worlds import JOB, topology
from tests.fuzz.line_targets import json_bytes, line
from tests.fuzz.target import KIB, Target
from tests.topology import fault_documents

_CHAIN = load_topology(fault_documents.TOPOLOGY, "chain.yaml")
_DEADLINE_S = 10.0
_PLANNED = (
    "entrypoint: train.py\n"
    "reduction: {trees: [{root: a, parents: {b: a, c: a}}, {root: b, parents: {a: b, c: b}}]}\n"
)


# ---------------------------------------------------------------- a rank hears its gateway


def _heard_samples() -> list[bytes]:
    welcome: dict[str, Any] = {
        "op": "welcome",
        "site": "ash",
        "site_index": 0,
        "sites": ["ash", "birch"],
        "ranks_per_site": [1, 2],
        "verify_every": 10,
        "config_hash": "abc",
        "encoding": {
            "codecs": ["int8"],
            "turns": [0],
            "chunk_numel": 4096,
            "error_feedback": True,
        },
    }
    times = {"inter_s": 0.1, "wait_s": 0.0, "encode_s": 0.01, "decode_s": 0.01}
    reduced: dict[str, Any] = {
        "op": "reduced",
        "round": 0,
        "bucket": 1,
        "weight": 512.0,
        "wire_bytes": 99,
    }
    failed: dict[str, Any] = {
        "op": "failed",
        "failure": {"code": "PEER_LOST", "message": "birch is gone", "site": "birch"},
    }
    whole = [welcome, {**reduced, "times": times}, failed]
    return [b"".join(map(line, whole)), line({**welcome, "encoding": None})]


@contextlib.contextmanager
def _gateway_saying(messages: Sequence[bytes]) -> Iterator[Path]:
    """Give the socket of a gateway that takes one rank, says this, and ends."""
    with tempfile.TemporaryDirectory(prefix="isthmus-fuzz-") as folder:
        path = Path(folder) / "gateway.sock"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.settimeout(_DEADLINE_S)
            listener.bind(str(path))
            listener.listen()

            def serve() -> None:
                with listener.accept()[0] as rank, contextlib.suppress(OSError):
                    rank.settimeout(_DEADLINE_S)
                    rank.recv(KIB)
                    for message in messages:
                        rank.send(message)

            thread = threading.Thread(target=serve)
            thread.start()
            try:
                yield path
            finally:
                thread.join(_DEADLINE_S)
                assert not thread.is_alive(), "the gateway never ended"


def _hear(data: bytes) -> None:
    """Let a rank join a gateway that says each line as a message, and hear it to its end."""
    told: list[object] = []
    ended = threading.Event()

    def on_failed(error: IsthmusError) -> None:
        told.append(error)
        ended.set()

    messages = [each for each in data.split(b"\n") if each]
    with _gateway_saying(messages) as path:
        link = GatewayLink(path, _DEADLINE_S)
        try:
            link.join(rank=0, local_rank=0, generation=1, timeout_s=_DEADLINE_S)
            link.start(told.append, on_failed)
            assert ended.wait(_DEADLINE_S), "the link never ended"
        finally:
            link.close()


# ---------------------------------------------------------------- emulations


def _request_samples() -> list[bytes]:
    texts = ("link: [east, middle], rate: 10Mbit/s", "{heal: all}")
    return [line_of(Fault(text=text)) for text in texts]


def _answer_request(data: bytes) -> None:
    """Let an emulation answer one request, and whoever asked read the answer."""

    async def apply(script: str) -> Sequence[Change | Pause | Kill]:
        faults = load_faults(script, "request", _CHAIN)
        assert faults.faults
        return ()

    async def answer() -> bytes:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return line_of(await answer_to(reader, apply))

    read_answer(asyncio.run(answer()))


def _state(data: bytes) -> None:
    with contextlib.suppress(ValueError, RecursionError):
        state = json.loads(data)
        if isinstance(state, dict):
            named = named_emulator(state)
            assert named is None or (named[0] > 0 and named[1] >= 0)


_CARRIED = CarriedFolder(
    files=(CarriedFile(path="sub/train.py", mode=0o644, num_bytes=3, digest="0f" * 32),),
    links=(CarriedLink(path="link", target="sub/train.py"),),
    empty_folders=("out",),
)


def _target(
    name: str,
    decode: object,
    refusals: tuple[type[Exception], ...],
    samples: list[bytes],
    mutations: int,
) -> Target:
    assert callable(decode)
    return Target(
        name=name,
        decode=decode,
        refusals=refusals,
        samples=lambda: samples,
        most_bytes=lambda data: 512 * KIB + json_bytes(data),
        mutations=mutations,
    )


LOCAL_TARGETS = (
    _target("rank-hears", _hear, (IsthmusError,), _heard_samples(), 100),
    _target(
        "emulation-request", _answer_request, (ConfigError, EmulatorError), _request_samples(), 60
    ),
    _target(
        "emulation-answer",
        read_answer,
        (ConfigError, EmulatorError),
        [line_of(Answer(changes=("a to b: cut", "b to a: cut")))],
        200,
    ),
    _target(
        "emulation-state",
        _state,
        (),
        [line({"emulator": {"pid": 77, "created_s": 1e9}, "sites": {}})],
        200,
    ),
    _target("carried-folder", CarriedFolder.from_bytes, (ConfigError,), [_CARRIED.to_bytes()], 200),
    _target(
        "run-spec",
        RunSpec.from_bytes,
        (ConfigError,),
        [spec_of(load_job(JOB + _PLANNED, "job.yaml"), topology(3), Replan()).to_bytes()],
        200,
    ),
)
