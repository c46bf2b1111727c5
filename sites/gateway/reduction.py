"""The all-reduce of one bucket between sites, as a pure state machine a chunk.

Events in, actions out; no sockets, threads or clocks. Sums are formed in site order whatever the
order of arrival, and what a site applies is decoded from the same bytes as everywhere else, so the
result is bit-identical at all sites by construction. A number is rounded by a codec only where it
travels: what a site adds to its children's sums by itself is added as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from protos.errors import (
    CorruptDataError,
    LayoutMismatchError,
    NoTokensError,
    RemoteProtocolError,
    StaleGenerationError,
)
from protos.frame import ChunkKey, Frame, Kind
from sites.codecs.codec import Codec, Floats
from sites.gateway.grid import Grid
from sites.gateway.residuals import BucketResiduals, Residual
from topology.trees import ReductionPlan

WEIGHT_MAX = float(1 << 53)
"""Tokens behind one bucket: up to here every whole number is a float64."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """What all sites must agree on before a byte of a bucket is summed."""

    generation: int
    round: int
    index: int
    layout: int
    codec: Codec
    grid: Grid
    cpu_s: Callable[[], float] = field(compare=False)
    """CPU time of the calling thread: what encoding and summing cost is measured with it."""


@dataclass(frozen=True, slots=True)
class Own:
    """This site's contribution to a chunk is there.

    `values` (float32, shape (n,)) is lent to the machine until `Finish`, and then holds the result.
    """

    values: Floats
    weight: float
    """Tokens of the whole site behind the bucket; 0 is legal, the values are then zeros."""


@dataclass(frozen=True, slots=True)
class Received:
    """A frame came that `BucketReduction.check` has let through."""

    sender: int
    frame: Frame


@dataclass(frozen=True, slots=True)
class Send:
    """Send a frame to the gateway of `site` that owns its chunk there."""

    site: int
    frame: Frame


@dataclass(frozen=True, slots=True)
class Finish:
    """The chunk's `values` now hold the result."""

    weight: float
    """Tokens of all sites."""


Event = Own | Received
Action = Send | Finish


@dataclass(frozen=True, slots=True)
class Role:
    """What one site does for the chunks of one tree; in a gather, for all chunks."""

    site: int
    tree: int
    members: tuple[int, ...]
    """Whose contributions are summed here, its own among them, in ascending order."""
    audience: tuple[int, ...]
    """Who gets this site's contribution as it is: in a gather, all others."""
    parent: int | None
    """Who gets the sum formed here; None where it is the whole sum."""
    children: tuple[int, ...]
    """Who gets the result from here."""
    root: int | None
    """Who makes the result; None in a gather: everybody for himself."""


def roles(plan: ReductionPlan, site: int) -> tuple[Role, ...]:
    """Return the site's role in each tree, or its one role in a gather."""
    if plan.is_gather:
        everyone = tuple(range(plan.num_sites))
        others = tuple(other for other in everyone if other != site)
        return (Role(site, 0, everyone, others, None, (), None),)
    found = []
    for index, tree in enumerate(plan.trees):
        children = tree.children(site)
        members = tuple(sorted((*children, site)))
        found.append(Role(site, index, members, (), tree.parent.get(site), children, tree.root))
    return tuple(found)


class ChunkReduction:
    """One chunk at one site. Late or repeated events change nothing.

    `encode_s` and `decode_s` are CPU time: of encoding what is sent, and of all else, which is
    decoding and summing.
    """

    def __init__(self, bucket: Bucket, role: Role, chunk: int, residual: Residual | None) -> None:
        self._bucket = bucket
        self._residual = residual
        self._codec = bucket.codec
        self._role = role
        self._chunk = chunk
        self._numel = bucket.grid.span(chunk)[1]
        self._own: Own | None = None
        self._sent: Floats | None = None
        """The own values as the audience decodes them, until they are in the sum."""
        self._waiting: dict[int, Frame] = {}
        self._seen: set[int] = set()
        self._summed = 0
        """How many of the members are in `_sum`."""
        self._sum: Floats | None = None
        self._weight = 0.0
        self._finished = False
        self.encode_s = 0.0
        self.decode_s = 0.0

    def handle(self, event: Event) -> list[Action]:
        """Apply one event. On one thread from beginning to end.

        Raises:
            CorruptDataError: a payload does not hold the chunk.
            NoTokensError: the weights of all sites add up to nothing.
            RemoteProtocolError: a result came before everything that it must contain.
        """
        begun_s, encoded_s = self._bucket.cpu_s(), self.encode_s
        with np.errstate(all="ignore"):  # what overflows is infinite at every site alike
            actions = self._apply(event)
        self.decode_s += self._bucket.cpu_s() - begun_s - (self.encode_s - encoded_s)
        return actions

    def _apply(self, event: Event) -> list[Action]:
        if isinstance(event, Own):
            return self._take_own(event)
        if event.frame.key.kind is Kind.RESULT:
            return self._take_result(event.frame)
        return self._take_contribution(event.sender, event.frame)

    def _take_own(self, own: Own) -> list[Action]:
        if self._own is not None:
            return []
        self._own = own
        if not self._role.audience:
            return self._add_up()
        payload, self._sent = self._encode(own.values)
        frame = self._frame(Kind.CONTRIBUTION, self._role.site, own.weight, payload)
        return [*(Send(site, frame) for site in self._role.audience), *self._add_up()]

    def _take_contribution(self, sender: int, frame: Frame) -> list[Action]:
        if sender in self._seen:
            return []
        self._seen.add(sender)
        self._waiting[sender] = frame
        return self._add_up()

    def _take_result(self, frame: Frame) -> list[Action]:
        if self._finished:
            return []
        if self._own is None or self._summed < len(self._role.members):
            raise RemoteProtocolError(f"a result of {self._name} without this site's part")
        self._decode(frame, self._own.values)
        self._finished = True
        return [
            *(Send(child, frame) for child in self._role.children),
            Finish(frame.weight),
        ]

    def _add_up(self) -> list[Action]:
        """Sum as many members as are there, in site order; act when that was the last."""
        members = self._role.members
        if self._summed == len(members):
            return []
        while self._summed < len(members):
            member = members[self._summed]
            if member == self._role.site:
                if self._own is None:
                    return []
                self._add(self._own_part(self._own), self._own.weight)
            elif member in self._waiting:
                frame = self._waiting.pop(member)
                self._add(self._decode(frame), frame.weight)
            else:
                return []
        assert self._sum is not None
        total, self._sum = self._sum, None
        return self._complete(total)

    def _own_part(self, own: Own) -> Floats:
        """Return the own values as all see them who sum them: after the codec, in a gather.

        What becomes the accumulator, and is added to, is a copy.
        """
        part = own.values if self._sent is None else self._sent
        self._sent = None
        is_added_to = self._summed == 0 and len(self._role.members) > 1
        return part.copy() if is_added_to and part is own.values else part

    def _add(self, part: Floats, weight: float) -> None:
        if self._sum is None:
            self._sum = part
        else:
            self._sum += part
        self._weight += weight
        self._summed += 1

    def _complete(self, total: Floats) -> list[Action]:
        role = self._role
        if role.parent is not None:
            payload, _ = self._encode(total)
            return [
                Send(role.parent, self._frame(Kind.CONTRIBUTION, role.site, self._weight, payload))
            ]
        assert self._own is not None
        divisor = np.float32(self._weight)
        if not divisor > 0:
            raise NoTokensError(f"no site has a token behind {self._name}: nothing to divide by")
        self._finished = True
        if role.root is None:
            np.divide(total, divisor, out=self._own.values)
            return [Finish(self._weight)]
        total /= divisor
        payload, decoded = self._encode(total)
        frame = self._frame(Kind.RESULT, role.site, self._weight, payload)
        self._own.values[:] = decoded
        return [*(Send(child, frame) for child in role.children), Finish(self._weight)]

    def _encode(self, values: Floats) -> tuple[bytes, Floats]:
        """Return the payload and what all decode from it; `values` themselves where that is it."""
        begun_s = self._bucket.cpu_s()
        if self._codec.lossless:
            payload, decoded = self._codec.encode(values), values
        elif self._residual is not None:
            payload, decoded = self._residual.encode(self._codec, values)
        else:
            payload = self._codec.encode(values)
            decoded = self._codec.decode(payload, self._numel)
        self.encode_s += self._bucket.cpu_s() - begun_s
        return payload, decoded

    def _decode(self, frame: Frame, out: Floats | None = None) -> Floats:
        try:
            return self._codec.decode(frame.payload, self._numel, out)
        except CorruptDataError as error:
            raise CorruptDataError(f"{self._name}: {error}") from error

    def _frame(self, kind: Kind, site: int, weight: float, payload: bytes) -> Frame:
        bucket = self._bucket
        return Frame(
            ChunkKey(bucket.round, bucket.index, self._chunk, site, kind),
            bucket.generation,
            self._codec.number,
            self._role.tree,
            bucket.layout,
            bucket.grid.numel,
            weight,
            payload,
        )

    @property
    def _name(self) -> str:
        return f"round {self._bucket.round} bucket {self._bucket.index} chunk {self._chunk}"


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
            plan: the run's.
            own_roles: this site's, from `roles`.
            residuals: of the rounds before; None: what the codec loses is lost.
        """
        self.bucket = bucket
        self._residuals = residuals
        self._plan = plan
        self._roles = own_roles
        # The trees take turns from bucket to bucket: each bucket anew would favour the first ones.
        self._first_turn = bucket.index * bucket.grid.num_chunks
        self._chunks: dict[int, ChunkReduction] = {}

    def chunk(self, index: int) -> ChunkReduction:
        """Return the machine of one chunk."""
        machine = self._chunks.get(index)
        if machine is None:
            role = self._role(index)
            residual = None
            if self._residuals is not None:
                residual = self._residuals.chunk(index, self.bucket.grid.span(index)[1])
            machine = self._chunks[index] = ChunkReduction(self.bucket, role, index, residual)
        return machine

    def _role(self, chunk: int) -> Role:
        return self._roles[self._plan.tree_index(self._first_turn + chunk)]

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
        if frame.codec != bucket.codec.number:
            raise LayoutMismatchError(
                f"{name} came with codec number {frame.codec}; here it is {bucket.codec.name}"
            )
        if key.chunk >= bucket.grid.num_chunks:
            raise RemoteProtocolError(
                f"{name} has {bucket.grid.num_chunks} chunks; number {key.chunk} came"
            )
        self._check_part(sender, frame)

    def _check_part(self, sender: int, frame: Frame) -> None:
        key = frame.key
        name = f"round {key.round} bucket {key.bucket} chunk {key.chunk}"
        role = self._role(key.chunk)
        if key.kind is Kind.CONTRIBUTION:
            allowed = sender != role.site and sender in role.members and key.site == sender
        else:
            allowed = role.parent is not None and sender == role.parent and key.site == role.root
        if not allowed or frame.tree != role.tree:
            raise RemoteProtocolError(f"{name}: this {key.kind.name.lower()} is not its to send")
        if not (math.isfinite(frame.weight) and 0 <= frame.weight <= WEIGHT_MAX):
            raise RemoteProtocolError(f"{name}: a weight of {frame.weight}")
        most_bytes = self.bucket.codec.max_bytes(self.bucket.grid.span(key.chunk)[1])
        if len(frame.payload) > most_bytes:
            raise RemoteProtocolError(f"{name}: {len(frame.payload)} bytes, at most {most_bytes}")
