"""All gateways of a run in one: the ranks' socket protocol, with real shared memory, and no WAN.

Ranks are real processes; every site has its own socket. A bucket is reduced when all ranks of all
sites have handed it over: summed in site order in float32, and divided by the weights' sum.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from isthmus.protos.limits import LOCAL_MESSAGE_BYTES
from isthmus.sites.local.squares import total_of, units_of

Floats = npt.NDArray[np.float32]


@dataclass
class RankConnection:
    """One rank's socket and regions."""

    socket: socket.socket
    site: int
    rank: int = -1
    left: bool = False
    regions: dict[int, Floats] = field(default_factory=dict)
    requests: list[dict[str, Any]] = field(default_factory=list)

    def send(self, **message: object) -> None:
        self.socket.send(json.dumps(message).encode())


class FakeGateways:
    """Serves until closed. What ranks sent stands in `metrics`, `digests`, `rounds` and `left`."""

    def __init__(
        self,
        folder: Path,
        ranks_per_site: Sequence[int],
        *,
        verify_every: int = 1,
        swap_from_round: int | None = None,
        fail_at: tuple[int, int, dict[str, str] | None] | None = None,
    ) -> None:
        """Listen.

        Args:
            swap_from_round: from then on, bucket 0 is answered after bucket 1.
            fail_at: at (round, bucket) send this `failed` message, or with None close.
        """
        self.folder = folder
        self.names = [f"site{index}" for index in range(len(ranks_per_site))]
        self.ranks_per_site = list(ranks_per_site)
        self.verify_every = verify_every
        self.metrics: list[tuple[str, int, dict[str, Any]]] = []
        self.digests: list[tuple[str, int, dict[str, Any]]] = []
        self.reduced: list[dict[str, Any]] = []
        self.left: list[tuple[str, int]] = []
        self.problems: list[str] = []
        self._swap_from_round = swap_from_round
        self._fail_at = fail_at
        self._waiting: dict[tuple[int, int], list[tuple[RankConnection, dict[str, Any]]]] = {}
        self._lock = threading.Lock()
        self._closing = False
        self._connections: list[RankConnection] = []
        self._listeners = [self._listen(index) for index in range(len(self.names))]
        self._threads = [
            threading.Thread(target=self._accept, args=(index,)) for index in range(len(self.names))
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def path(self, site: int) -> Path:
        """The socket that ranks of a site dial."""
        return self.folder / f"gateway{site}"

    @property
    def paths(self) -> list[Path]:
        """The sockets of all sites."""
        return [self.path(site) for site in range(len(self.names))]

    def close(self) -> None:
        """End all threads and close all sockets."""
        with self._lock:
            self._closing = True
            sockets = [*self._listeners, *(each.socket for each in self._connections)]
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        while self._threads:
            self._threads.pop(0).join(timeout=10)
        for each in sockets:
            each.close()

    def _listen(self, site: int) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(self.path(site)))
        listener.listen(64)
        return listener

    def _accept(self, site: int) -> None:
        while True:
            try:
                accepted, _ = self._listeners[site].accept()
            except OSError:
                return
            connection = RankConnection(accepted, site)
            with self._lock:
                self._connections.append(connection)
                thread = threading.Thread(target=self._serve, args=(connection,))
                self._threads.append(thread)
                thread.start()

    def _serve(self, connection: RankConnection) -> None:
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(connection.socket, LOCAL_MESSAGE_BYTES, 1)
            except OSError:
                data, descriptors = b"", []
            if not data:
                with self._lock:
                    self._lose(connection)
                return
            message = json.loads(data)
            try:
                with self._lock:
                    self._handle(connection, message, descriptors)
            except (OSError, AssertionError, KeyError) as error:
                if self._closing and isinstance(error, OSError):
                    return  # the other end was told that all is over before it had joined
                self.problems.append(f"{message['op']}: {error!r}")
                self._fail({"code": "INTERNAL", "message": repr(error), "site": ""})
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)

    def _handle(
        self, connection: RankConnection, message: dict[str, Any], descriptors: list[int]
    ) -> None:
        source = (self.names[connection.site], connection.rank)
        match message["op"]:
            case "join":
                connection.rank = message["rank"]
                if message["generation"] != 1:
                    failure = {"code": "STALE_GENERATION", "message": "old"}
                    connection.send(op="failed", failure=failure)
                    return
                connection.send(
                    op="welcome",
                    site=source[0],
                    site_index=connection.site,
                    sites=self.names,
                    ranks_per_site=self.ranks_per_site,
                    verify_every=self.verify_every,
                    config_hash="hash",
                )
            case "region":
                memory = mmap.mmap(descriptors[0], message["numel"] * 4)
                connection.regions[message["region"]] = np.frombuffer(memory, dtype=np.float32)
            case "reduce":
                self._reduce(connection, message)
            case "round_ends":
                for other in self._connections:
                    if (other.site == connection.site) == message["is_passed_over"]:
                        other.send(**message)
            case "handed":
                pass  # nobody here watches for ranks that do not come
            case "metric":
                self.metrics.append((*source, message))
            case "moved" | "state_progress":
                pass  # the rank waits for its disk; nobody here takes it for one that hangs
            case "digest":
                self.digests.append((*source, message))
            case "leave":
                connection.left = True
                self.left.append(source)
            case other:
                raise AssertionError(other)

    def _reduce(self, connection: RankConnection, message: dict[str, Any]) -> None:
        key = (message["round"], message["bucket"])
        waiting = self._waiting.setdefault(key, [])
        waiting.append((connection, message))
        if len(waiting) < sum(map(len, self._sharing(message))):
            return
        if self._fail_at is not None and key == self._fail_at[:2]:
            self._fail(self._fail_at[2])
            return
        swaps = self._swap_from_round is not None and key[0] >= self._swap_from_round
        if swaps and key[1] == 0:
            return  # Until bucket 1 has been answered.
        self._finish(key)
        if swaps and key[1] == 1:
            self._finish((key[0], 0))

    def _sharing(self, message: dict[str, Any]) -> list[list[int]]:
        """Return the ranks that share a bucket, by site."""
        named = message["participants"] or [[] for _ in self.ranks_per_site]
        return [
            ranks or [*range(most)] for ranks, most in zip(named, self.ranks_per_site, strict=True)
        ]

    def _lose(self, connection: RankConnection) -> None:
        """A rank closed: unless it has said that it leaves, it has died."""
        if not connection.left and not self._closing:
            name = f"rank {connection.rank} of {self.names[connection.site]}"
            self._fail({"code": "RANK_EXITED", "message": f"{name} ended", "site": ""})

    def _fail(self, message: dict[str, str] | None) -> None:
        """Tell every rank, or with None close without a word."""
        self._closing = True
        for each in self._connections:
            with contextlib.suppress(OSError):  # It may be the one that died.
                if message is not None:
                    each.send(op="failed", failure=message)
                each.socket.shutdown(socket.SHUT_RDWR)

    def _finish(self, key: tuple[int, int]) -> None:
        requests = self._waiting.pop(key)
        requests.sort(key=lambda item: (item[0].site, item[0].rank))
        numel = requests[0][1]["numel"]
        plans = {(each["numel"], each["layout"], each["exact"]) for _, each in requests}
        if len(plans) != 1:
            message = f"round {key[0]} bucket {key[1]} differs between sites"
            self._fail({"code": "LAYOUT_MISMATCH", "message": message, "site": ""})
            return
        total = np.zeros(numel, dtype=np.float32)
        weights = []
        sharing = self._sharing(requests[0][1])
        for site, ranks_of_site in enumerate(sharing):
            ranks = len(ranks_of_site)
            own = [item for item in requests if item[0].site == site]
            assert [each.rank for each, _ in own] == ranks_of_site, "who shares the bucket"
            weights.append({each["weight"] for _, each in own})
            shard_numel = -(-numel // ranks)
            shards = [connection.regions[each["region"]][:shard_numel] for connection, each in own]
            assert {len(shard) for shard in shards} == {shard_numel}, "shard size"
            total += np.concatenate(shards)[:numel]
        assert all(len(each) == 1 for each in weights), "ranks of a site name different weights"
        weight = sum(each.pop() for each in weights)
        with np.errstate(invalid="ignore", divide="ignore"):
            total /= np.float32(weight)
        for connection, each in requests:
            shard = connection.regions[each["region"]]
            ranks_of_site = sharing[connection.site]
            shard_numel = -(-numel // len(ranks_of_site))
            start = ranks_of_site.index(connection.rank) * shard_numel
            part = total[start : start + shard_numel]
            shard[: len(part)] = part
            with contextlib.suppress(BrokenPipeError):  # it has left while this round crossed
                connection.send(
                    op="reduced",
                    round=key[0],
                    bucket=key[1],
                    weight=weight,
                    times={"inter_s": 0.0, "wait_s": 0.0, "encode_s": 0.0, "decode_s": 0.0},
                    wire_bytes=4 * len(part),
                    squares=total_of(units_of(each * each) for each in part.tolist()),
                )
        self.reduced.append(requests[0][1])
