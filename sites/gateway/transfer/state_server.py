"""The sending side of a transfer: serves the training state to rejoining sites."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from isthmus.protos.errors import NotFoundError
from isthmus.protos.exchange.v1 import state_pb2
from isthmus.sites.gateway.links.calls import Serve, ServedCall, answering
from isthmus.sites.local.entry_folder import INDEX, OBJECTS, PIECE_BYTES, TENSORS, entry_folder
from isthmus.sites.local.rank_messages import StateProgress

INDEX_METHOD: Final = "/isthmus.exchange.v1.State/Index"
READ_METHOD: Final = "/isthmus.exchange.v1.State/Read"
_TURN_S: Final = 0.5
"""Longest wait for a turn. Then the caller is told to ask again: it knows that the donor lives, and
callers that have gone take no turn."""


class StateServer:
    """Serves the states in a node's folder; reads on threads, so frames never wait for a disk.

    It keeps to its share of a link, on average over a piece.
    """

    def __init__(
        self,
        node_folder: Path,
        site_of: Callable[[ServedCall], str],
        bytes_per_s: Mapping[str, float],
    ) -> None:
        """Serve states in `node_folder`, at `bytes_per_s` by receiving site.

        `site_of` returns the site of a call, or raises IsthmusError.
        """
        self._node_folder = node_folder
        self._site_of = site_of
        self._bytes_per_s = bytes_per_s
        self._free_s: dict[str, float] = {}
        """When the next piece may leave, by site."""
        self._lock = threading.Lock()
        self._progress: dict[int, StateProgress] = {}
        """Latest progress report of each rank, for the newest epoch."""
        self.methods: Mapping[str, Serve] = {
            INDEX_METHOD: answering(self._index, state_pb2.IndexRequest),
            READ_METHOD: answering(self._piece, state_pb2.ReadRequest),
        }
        """Handlers by path."""

    def note(self, rank: int, progress: StateProgress) -> None:
        """Record a rank's progress or failure in writing its part. From any thread."""
        with self._lock:
            latest = max((each.epoch for each in self._progress.values()), default=0)
            if progress.epoch > latest:
                self._progress.clear()
            if progress.epoch >= latest:
                self._progress[rank] = progress

    async def _index(
        self, request: state_pb2.IndexRequest, call: ServedCall
    ) -> state_pb2.IndexResponse:
        """Answer the index of an epoch's state, or the progress of the ranks that write it."""
        self._site_of(call)
        path = entry_folder(self._node_folder, request.epoch) / INDEX
        try:
            written = await asyncio.to_thread(path.read_bytes)
        except FileNotFoundError:
            with self._lock:
                reports = [each for each in self._progress.values() if each.epoch == request.epoch]
            if not reports:
                raise NotFoundError(f"no state of epoch {request.epoch} is here") from None
            return state_pb2.IndexResponse(
                done_bytes=sum(each.done_bytes for each in reports),
                problem=next((each.problem for each in reports if each.problem), ""),
            )
        return state_pb2.IndexResponse(index=written)

    async def _piece(
        self, request: state_pb2.ReadRequest, call: ServedCall
    ) -> state_pb2.ReadResponse | bytes:
        """Answer one piece of a file, or how long it is until the caller's turn."""
        site = self._site_of(call)
        now_s = time.monotonic()
        turn_s = max(now_s, self._free_s.get(site, 0.0))
        if turn_s > now_s + _TURN_S:
            return state_pb2.ReadResponse(wait_s=turn_s - now_s)
        bytes_per_s = self._bytes_per_s.get(site, math.inf)
        self._free_s[site] = turn_s + PIECE_BYTES / bytes_per_s
        await asyncio.sleep(turn_s - now_s)
        num_bytes, answer = await asyncio.to_thread(self._read, request)
        self._free_s[site] -= (PIECE_BYTES - num_bytes) / bytes_per_s
        return answer

    def _read(self, request: state_pb2.ReadRequest) -> tuple[int, bytes]:
        """Return the length of a piece, and the serialised answer with it.

        Raises:
            NotFoundError: the piece does not exist, or its file is not complete.
        """
        folder = entry_folder(self._node_folder, request.epoch)
        data = b""
        if request.path in (TENSORS, OBJECTS) and (folder / INDEX).exists():
            with (
                contextlib.suppress(OSError, OverflowError),
                (folder / request.path).open("rb") as file,
            ):
                file.seek(request.piece * PIECE_BYTES)
                data = file.read(PIECE_BYTES)
        if not data:
            raise NotFoundError(
                f"epoch {request.epoch}: {request.path!r} has no piece {request.piece} here"
            )
        return len(data), state_pb2.ReadResponse(data=data).SerializeToString()
