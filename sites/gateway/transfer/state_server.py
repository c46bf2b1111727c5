"""The giving side of a transfer: serves a site's checkpoints to other sites' gateways."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import grpc.aio
import xxhash

from protos.checkpoint.manifest import MANIFEST, MANIFEST_BYTES, Manifest
from protos.checkpoint.store import checkpoints_in, newest_good
from protos.errors import BadCheckpointError, IsthmusError, NotFoundError, RemoteProtocolError
from protos.exchange.v1 import state_pb2, state_pb2_grpc
from sites.gateway.links.peer_server import Context, abort

PIECE_BYTES: Final = 4 << 20
"""The most that one answer carries."""

SiteOf = Callable[[Context], Awaitable[str]]
"""Names the site that calls, or aborts."""


class StateServer(state_pb2_grpc.StateServicer):
    """Serves what lies in one folder, reading on threads, so that frames never wait for a disk."""

    def __init__(self, store: Path, site_of: SiteOf) -> None:
        """Serve the checkpoints in `store`, which need not be there yet."""
        self._store = store
        self._site_of = site_of
        self._manifests: dict[str, Manifest] = {}

    def register(self, server: grpc.aio.Server) -> None:
        """Add the methods to a server that has not been started."""
        state_pb2_grpc.add_StateServicer_to_server(self, server)

    async def Manifest(  # noqa: N802 - gRPC fixes the name
        self, request: state_pb2.ManifestRequest, context: Context
    ) -> state_pb2.ManifestResponse:
        """Give a checkpoint's manifest; of the newest good one, unless it is named."""
        await self._site_of(context)
        try:
            name, written = await asyncio.to_thread(self._read_manifest, request.checkpoint)
        except IsthmusError as error:
            await abort(context, error)
        return state_pb2.ManifestResponse(checkpoint=name, manifest=written)

    async def Read(  # noqa: N802 - gRPC fixes the name
        self, request: state_pb2.ReadRequest, context: Context
    ) -> state_pb2.ReadResponse:
        """Give one piece of a file."""
        await self._site_of(context)
        try:
            data = await asyncio.to_thread(self._read_piece, request)
        except IsthmusError as error:
            await abort(context, error)
        return state_pb2.ReadResponse(data=data, checksum=xxhash.xxh3_64_intdigest(data))

    def _read_manifest(self, name: str) -> tuple[str, bytes]:
        """Return a checkpoint's name, and its manifest as it lies there.

        Raises:
            NotFoundError: there is none, or none that is whole.
        """
        stored = checkpoints_in(str(self._store))
        if name:
            stored = [each for each in stored if each.name == name]
        for each, found in newest_good(stored):
            if not isinstance(found, BadCheckpointError):
                self._manifests[each.name] = found
                with (self._store / each.name / MANIFEST).open("rb") as file:
                    return each.name, file.read(MANIFEST_BYTES)
        raise NotFoundError(f"no checkpoint {name!r} is here" if name else "no checkpoint is here")

    def _read_piece(self, request: state_pb2.ReadRequest) -> bytes:
        """Return a piece of a file that a manifest names: no other file can be read.

        Raises:
            NotFoundError: no manifest that was asked for names it, or it is gone.
            RemoteProtocolError: the piece is too large, or ends behind the file.
        """
        manifest = self._manifests.get(request.checkpoint)
        files = {each.path: each for each in manifest.files} if manifest else {}
        if request.path not in files:
            raise NotFoundError(f"{request.checkpoint!r} has no file {request.path!r} here")
        end = request.offset + request.num_bytes
        if request.num_bytes > PIECE_BYTES or end > files[request.path].num_bytes:
            raise RemoteProtocolError(f"{request.path}: no piece from {request.offset} to {end}")
        try:
            with (self._store / request.checkpoint / request.path).open("rb") as file:
                file.seek(request.offset)
                data = file.read(request.num_bytes)
        except OSError as error:  # it was too old to be kept
            raise NotFoundError(
                f"{request.checkpoint}: {request.path}: {error.strerror}"
            ) from error
        if len(data) != request.num_bytes:
            raise NotFoundError(f"{request.checkpoint}: {request.path} was cut short")
        return data
