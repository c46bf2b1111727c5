"""All chunks of one bucket at one site: their machines, and which frames may come for them.

Pure.
"""

from __future__ import annotations

import math

from protos.errors import LayoutMismatchError, RemoteProtocolError, StaleGenerationError
from protos.frame import Frame, Kind
from sites.codecs.codec import Codec
from sites.gateway.reduction.chunk_reduction import ChunkReduction
from sites.gateway.reduction.events import WEIGHT_MAX, Bucket
from sites.gateway.reduction.residuals import BucketResiduals
from sites.gateway.reduction.roles import Role
from topology.trees.trees import ReductionPlan


class BucketReduction:
    """All chunks of one bucket at one site."""

    def __init__(
        self,
        bucket: Bucket,
        plan: ReductionPlan,
        own_roles: tuple[Role, ...],
        residuals: BucketResiduals | None,
    ) -> None:
        """Begin with no chunk.

        Args:
            bucket: which one, and how it is cut.
            plan: of its round.
            own_roles: this site's, from `roles`.
            residuals: of the rounds before, for trees whose codec loses something; None: that is
                lost.
        """
        self.bucket = bucket
        self._residuals = residuals
        self._plan = plan
        self._roles = own_roles
        self._chunks: dict[int, ChunkReduction] = {}

    def chunk(self, index: int) -> ChunkReduction:
        """Return the machine of one chunk."""
        machine = self._chunks.get(index)
        if machine is None:
            role = self._role(index)
            residual = None
            if self._residuals is not None and not self.bucket.codecs[role.tree].lossless:
                residual = self._residuals.chunk(index, self.bucket.grid.span(index)[1])
            machine = self._chunks[index] = ChunkReduction(self.bucket, role, index, residual)
        return machine

    @property
    def is_gather(self) -> bool:
        """Whether every site sends its part to every other."""
        return self._plan.is_gather

    def readers(self, chunk: int) -> tuple[int, ...]:
        """Return the sites that get this site's part of a chunk, or the sum that is formed here."""
        role = self._role(chunk)
        return role.audience if role.parent is None else (role.parent,)

    def codec(self, chunk: int) -> Codec:
        """Return the codec of a chunk's tree."""
        return self.bucket.codecs[self._role(chunk).tree]

    def _role(self, chunk: int) -> Role:
        turn = self.bucket.grid.turn(self.bucket.index, chunk)
        return self._roles[self._plan.tree_index(turn)]

    def check(self, sender: int, frame: Frame) -> None:
        """Compare a frame of this bucket with this site's own plan, before anything is decoded.

        Raises:
            StaleGenerationError: it belongs to another generation.
            LayoutMismatchError: its bucket is not what the same bucket is here.
            RemoteProtocolError: `sender` may not send this.
        """
        key, bucket = frame.key, self.bucket
        name = f"round {key.round} bucket {key.bucket}"
        if frame.generation != bucket.generation:
            raise StaleGenerationError(
                f"{name} of generation {frame.generation}; this is {bucket.generation}"
            )
        if frame.numel != bucket.grid.numel:
            raise LayoutMismatchError(
                f"{name} has {frame.numel} elements there and {bucket.grid.numel} here"
            )
        if frame.layout != bucket.layout:
            raise LayoutMismatchError(f"{name} holds other parameters there than here")
        if key.chunk >= bucket.grid.num_chunks:
            raise RemoteProtocolError(
                f"{name} has {bucket.grid.num_chunks} chunks; number {key.chunk} came"
            )
        self._check_part(sender, frame)

    def _check_part(self, sender: int, frame: Frame) -> None:
        key = frame.key
        name = f"round {key.round} bucket {key.bucket} chunk {key.chunk}"
        role = self._role(key.chunk)
        codec = self.bucket.codecs[role.tree]
        if frame.codec != codec.number:
            raise LayoutMismatchError(
                f"{name} came with codec number {frame.codec}; here it is {codec.name}"
            )
        if key.kind is Kind.CONTRIBUTION:
            allowed = sender != role.site and sender in role.members and key.site == sender
        else:
            allowed = role.parent is not None and sender == role.parent and key.site == role.root
        if not allowed or frame.tree != role.tree:
            raise RemoteProtocolError(f"{name}: this {key.kind.name.lower()} is not its to send")
        if not (math.isfinite(frame.weight) and 0 <= frame.weight <= WEIGHT_MAX):
            raise RemoteProtocolError(f"{name}: a weight of {frame.weight}")
        most_bytes = codec.max_bytes(self.bucket.grid.span(key.chunk)[1])
        if len(frame.payload) > most_bytes:
            raise RemoteProtocolError(f"{name}: {len(frame.payload)} bytes, at most {most_bytes}")
