"""A rank without torch: speaks the local protocol to a real gateway over its Unix socket."""

from __future__ import annotations

import json
import mmap
import os
import socket
from typing import Any, Self

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

DEADLINE_S = 30.0
"""By then a gateway has answered, even on a busy machine."""


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
            message: dict[str, Any] = json.loads(data)
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
