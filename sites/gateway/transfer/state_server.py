"""The sending side of a transfer: serves the training state to rejoining sites."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

import grpc.aio

from isthmus.protos.errors import IsthmusError, NotFoundError
from isthmus.protos.exchange.v1 import state_pb2, state_pb2_grpc
from isthmus.sites.gateway.links.peer_server import Context, abort
from isthmus.sites.local.entry_folder import INDEX, OBJECTS, PIECE_BYTES, TENSORS, entry_folder
from isthmus.sites.local.rank_messages import StateProgress

_TURN_S: Final = 0.5
"""Longest wait for a turn. Then the caller is told to ask again: it knows that the donor lives, and
callers that have gone take no turn."""
EARLY: Final = "its turn comes in"
"""Prefix of the message to a site that has to ask again."""

SiteOf = Callable[[Context], Awaitable[str]]
"""Returns the site of a call, or aborts it."""


class StateServer(state_pb2_grpc.StateServicer):
    """Serves the states in a node's folder; reads on threads, so frames never wait for a disk.

    It keeps to its share of a link, on average over a piece.
    """

    def __init__(
        self, node_folder: Path, site_of: SiteOf, bytes_per_s: Mapping[str, float]
    ) -> None:
        """Serve states in `node_folder`, at `bytes_per_s` by receiving site."""
        self._node_folder = node_folder
        self._site_of = site_of
        self._bytes_per_s = bytes_per_s
        self._free_s: dict[str, float] = {}
        """When the next piece may leave, by site."""
        self._lock = threading.Lock()
        self._progress: dict[int, StateProgress] = {}
        """Latest progress report of each rank, for the newest epoch."""

    def register(self, server: grpc.aio.Server) -> None:
        """Add the methods to a server that has not been started."""
        state_pb2_grpc.add_StateServicer_to_server(self, server)

    def note(self, rank: int, progress: StateProgress) -> None:
        """Record a rank's progress or failure in writing its part. From any thread."""
        with self._lock:
            latest = max((each.epoch for each in self._progress.values()), default=0)
            if progress.epoch > latest:
                self._progress.clear()
            if progress.epoch >= latest:
                self._progress[rank] = progress

    @property
    def methods(self) -> tuple[tuple[str, Callable[..., Any], Callable[[bytes], Any]], ...]:
        """The methods: (name, handler, parser of the request)."""
        return (
            ("Index", self.Index, state_pb2.IndexRequest.FromString),
            ("Read", self.Read, state_pb2.ReadRequest.FromString),
        )

    async def Index(  # noqa: N802 - gRPC fixes the name
        self, request: state_pb2.IndexRequest, context: Context
    ) -> state_pb2.IndexResponse:
        """Answer the index of an epoch's state, or the progress of the ranks that write it."""
        await self._site_of(context)
        path = entry_folder(self._node_folder, request.epoch) / INDEX
        try:
            written = await asyncio.to_thread(path.read_bytes)
        except FileNotFoundError:
            with self._lock:
                reports = [each for each in self._progress.values() if each.epoch == request.epoch]
            if not reports:
                await abort(context, NotFoundError(f"no state of epoch {request.epoch} is here"))
            return state_pb2.IndexResponse(
                done_bytes=sum(each.done_bytes for each in reports),
                problem=next((each.problem for each in reports if each.problem), ""),
            )
        return state_pb2.IndexResponse(index=written)

    async def Read(  # noqa: N802 - gRPC fixes the name
        self, request: state_pb2.ReadRequest, context: Context
    ) -> state_pb2.ReadResponse:
        """Return one piece of a file."""
        site = await self._site_of(context)
        now_s = time.monotonic()
        turn_s = max(now_s, self._free_s.get(site, 0.0))
        if turn_s > now_s + _TURN_S:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{EARLY} {turn_s - now_s:.1f} s"
            )
        bytes_per_s = self._bytes_per_s.get(site, math.inf)
        self._free_s[site] = turn_s + PIECE_BYTES / bytes_per_s
        await asyncio.sleep(turn_s - now_s)
        try:
            data = await asyncio.to_thread(self._read, request)
        except IsthmusError as error:
            await abort(context, error)
        self._free_s[site] -= (PIECE_BYTES - len(data)) / bytes_per_s
        return state_pb2.ReadResponse(data=data)

    def _read(self, request: state_pb2.ReadRequest) -> bytes:
        """Return a piece.

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
        return data
