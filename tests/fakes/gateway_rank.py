"""A rank without torch: speaks the local protocol to a real gateway over its Unix socket."""

from __future__ import annotations

import json
import mmap
import os
import socket
import threading
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

DEADLINE_S = 30.0
"""By then a gateway has answered, even on a busy machine."""


def flat(message: dict[str, Any]) -> dict[str, Any]:
    """Return a gateway's message; a failure's fields are the message's own."""
    return {**message, **message.get("failure", {})}


class Heard:
    """What a gateway has said to its agent, as JSON has it."""

    def __init__(self) -> None:
        self.messages: list[Mapping[str, Any]] = []
        self.changed = threading.Condition()

    def hear(self, message: dict[str, Any]) -> None:
        """Keep a message."""
        with self.changed:
            self.messages.append(flat(message))
            self.changed.notify_all()

    def wait(self, op: str, deadline_s: float = DEADLINE_S, **wanted: object) -> Mapping[str, Any]:
        """Return the first message of that kind and with these fields, waiting for it."""
        looked_for = {"op": op, **wanted}.items()

        def found() -> Mapping[str, Any] | None:
            return next((each for each in self.messages if looked_for <= each.items()), None)

        with self.changed:
            assert self.changed.wait_for(found, deadline_s), (op, wanted, self.messages)
            message = found()
        assert message is not None
        return message


class GatewayRank:
    """One rank's connection. Every wait has a deadline; `close` without `leave` is a death."""

    def __init__(self, path: str, rank: int, generation: int = 1, *, encodes: bool = False) -> None:
        self.rank = rank
        self.regions: dict[int, Floats] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(DEADLINE_S)
        self._socket.connect(path)
        fields = {"local_rank": rank, "pid": os.getpid(), "encodes": encodes}
        self.send(op="join", rank=rank, generation=generation, **fields)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, **message: object) -> None:
        """Send one message."""
        self._socket.send(json.dumps(message).encode())

    def send_raw(self, data: bytes) -> None:
        """Send anything."""
        self._socket.send(data)

    def receive(self) -> dict[str, Any]:
        """Return the next message but those about members; {} at the end of the connection."""
        while data := self._socket.recv(128 << 10):
            message = flat(json.loads(data))
            if message["op"] != "members":
                return message
        return {}

    def share(self, region: int, numel: int) -> Floats:
        """Share a new region and return it."""
        fd = os.memfd_create(f"region-{region}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, 4 * numel)
            view = np.frombuffer(mmap.mmap(fd, 4 * numel), dtype=np.float32)
            message = json.dumps({"op": "region", "region": region, "numel": numel}).encode()
            socket.send_fds(self._socket, [message], [fd])
        finally:
            os.close(fd)
        self.regions[region] = view
        return view

    def reduce(
        self, round_: int, bucket: int, numel: int, weight: float, **changes: object
    ) -> None:
        """Hand over what lies at the start of region `bucket`."""
        message = {
            "op": "reduce", "round": round_, "bucket": bucket, "region": bucket, "offset": 0,
            "numel": numel, "layout": 77, "weight": weight, "exact": False,
        }  # fmt: skip
        self.send(**{**message, **changes})

    def leave(self, **told: object) -> None:
        """End cleanly."""
        self.send(op="leave", **told)
        self.close()

    def close(self) -> None:
        """Close."""
        self._socket.close()
