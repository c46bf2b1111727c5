"""The all-reduce of one bucket between sites, chunk by chunk, as pure state machines.

Events in, actions out; no sockets, threads or clocks. A chunk's machine takes three events: this
site's own part (`Own`), a peer's frame (`Received`), and, after a site was lost, a result that
another site had finished (`HandedOver`). Its actions are frames to send (`Send`) and, once, the end
(`Finish`).

The own part stays unchanged until the result is written: if a site is lost, a fresh machine repeats
the chunk with the same `Own`.

Every site ends with the same bits. Sums are formed in site order whatever the order of arrival, and
every site decodes the result from the same bytes. A codec rounds only numbers that travel: a site
adds its own part to its children's sums unrounded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from isthmus.protos.errors import (
    CorruptDataError,
    LayoutMismatchError,
    RemoteProtocolError,
)
from isthmus.protos.frame import ChunkKey, Frame, Kind
from isthmus.sites.codecs.codec import Codec, Encoded, FloatPart, Floats, Part, Payload
from isthmus.sites.codecs.kernels import loops
from isthmus.sites.codecs.registry import BY_NUMBER
from isthmus.sites.gateway.reduction.residuals import BucketResiduals
from isthmus.sites.local.chunk_grid import Grid
from isthmus.sites.local.rank_messages import WEIGHT_MAX
from isthmus.topology.spec.reduction_plan import ReductionPlan

_ONE = np.float32(1)


@dataclass(frozen=True, slots=True)
class Role:
    """What one site does for the chunks of one tree. In a gather, one role covers all chunks."""

    site: int
    tree: int
    members: tuple[int, ...]
    """The sites whose contributions are summed here, this one included, in ascending order."""
    audience: tuple[int, ...]
    """Sites that get this site's own contribution: all others in a gather, none in a tree."""
    parent: int | None
    """Site that gets the sum formed here. None at the root, and in a gather."""
    giver: int | None
    """Site that sends the result here. None where it is made here."""
    receivers: tuple[int, ...]
    """Sites to which this site passes the result on."""
    root: int | None
    """Site that makes the result. None in a gather, where every site makes its own."""
    follows: bool = False
    """Whether the site is catching up: it gets results and contributes nothing."""


def roles(plan: ReductionPlan, site: int) -> tuple[Role, ...]:
    """Return the site's role in each tree, or its one role in a gather."""
    if plan.is_gather:
        everyone = plan.members
        others = tuple(other for other in everyone if other != site)
        return (Role(site, 0, everyone, others, None, None, (), None),)
    roles_here = []
    for index, tree in enumerate(plan.trees):
        members = tuple(sorted((*tree.children(site), site)))
        up = members, (), tree.parent.get(site)
        down = tree.giver.get(site), tree.receivers(site), tree.root
        roles_here.append(Role(site, index, *up, *down, site in tree.followers))
    return tuple(roles_here)


@dataclass(frozen=True, slots=True)
class Bucket:
    """What all sites must agree on before a byte of a bucket is summed."""

    epoch: int
    round: int
    index: int
    layout: int
    codecs: tuple[Codec, ...]
    """One codec per tree of the plan, or the only one of a gather. All edges of a tree share it,
    because all sites must decode the same bytes."""
    grid: Grid
    cpu_s: Callable[[], float] = field(compare=False)
    """Clock of the calling thread's CPU time, to measure encoding and summing."""


@dataclass(frozen=True, slots=True)
class OwnEncoded:
    """A part that its rank has encoded."""

    codec: Codec
    """Codec that the rank used: the one offered when it joined, whatever the round's plan."""
    seal: Callable[[], Encoded]
    """Makes the payload."""


@dataclass(frozen=True, slots=True)
class Own:
    """Event: this site's part of a chunk is ready.

    `values` (float32, shape (n,)) is borrowed until `Finish`. It is unchanged until then, and then
    holds the result.
    """

    values: Floats
    weight: float
    """Tokens of the whole site for this bucket. 0 is legal; the values are then zeros."""
    encoded: OwnEncoded | None = None
    """The encoded part, if `values` holds encoded bytes. None: `values` is the plain float32
    part."""


@dataclass(frozen=True, slots=True)
class Received:
    """Event: a frame came that `BucketReduction.check` has accepted."""

    sender: int
    frame: Frame


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Event: another site sent the frames of a finished chunk (result, or all contributions).

    `BucketReduction.check_handover` has accepted each frame.
    """

    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class Send:
    """Action: send a frame to the gateway of `site` that owns the chunk.

    Pack it at once: its payload may be a view of the chunk's `values`, which change later.
    """

    site: int
    frame: Frame


@dataclass(frozen=True, slots=True)
class Finish:
    """Action: the chunk is finished, and its `values` hold the result."""

    weight: float
    """Tokens of all sites that took part."""
    squares: float
    """Sum of squares of the result, bitwise equal at all sites."""
    frames: tuple[Frame, ...]
    """Frames for sites that may lack the chunk: the result, or in a gather all contributions. Empty
    if no other site takes part."""


Event = Own | Received | HandedOver
Action = Send | Finish


class ChunkReduction:
    """One chunk at one site. Late or repeated events change nothing.

    Everything is summed at once when the last part is there, so each number is read and written
    once. Until then frames stay encoded, which takes less memory than sums.

    `encode_s` is CPU time for encoding what is sent; `decode_s` is CPU time for decoding and
    summing.
    """

    def __init__(
        self, bucket: Bucket, role: Role, chunk: int, residuals: BucketResiduals | None
    ) -> None:
        self._bucket = bucket
        self._residuals = residuals
        self._codec = bucket.codecs[role.tree]
        self._role = role
        self._chunk = chunk
        self._numel = bucket.grid.span(chunk)[1]
        self._own: Own | None = None
        self._contribution: Frame | None = None
        """The own contribution as sent to all others, in a gather."""
        self._residual: Floats | None = None
        """Copy of the residual before encoding; None: no residual was changed."""
        self._encoded: Encoded | None = None
        """The own part as encoded by its rank, until it is sent."""
        self._part: Part | None = None
        """The own part as the others decode it. None: no site decodes it, so `values` is used."""
        self._frames: dict[int, Frame] = {}
        """Frames of the other members, until they are summed."""
        self._early: Frame | None = None
        """A result that came before this site's part."""
        self._is_summed = False
        self._is_finished = False
        self.encode_s = 0.0
        self.decode_s = 0.0

    def handle(self, event: Event) -> Iterator[Action]:
        """Apply one event, and yield actions; carry out an action before taking the next.

        One thread takes all actions of an event.

        Raises:
            CorruptDataError: a payload has the wrong length or content.
            RemoteProtocolError: a result came before this site sent its part.
        """
        if isinstance(event, Own):
            if self._own is None:
                self._own = event
                if self._role.follows:
                    yield from self._take_early_result()
                    return
                if event.encoded is not None:
                    self._encoded = self._own_encoded(event.encoded)
                    self._part = self._encoded.part
                yield from self._contribute(event)
                yield from self._sum()
                self._encoded = None
        elif isinstance(event, HandedOver):
            yield from self._take_over(event.frames)
        elif event.frame.key.kind is Kind.RESULT:
            yield from self._take_result(event.frame)
        elif not self._is_summed and event.sender not in self._frames:
            self._frames[event.sender] = event.frame
            yield from self._sum()

    def _contribute(self, own: Own) -> Iterator[Action]:
        """In a gather, send the own part; from now on use its decoded form, as the others do."""
        role = self._role
        if role.audience:
            encoded = self._encode_part(own)
            self._part = encoded.part
            frame = self._frame(Kind.CONTRIBUTION, own.weight, encoded.payload)
            self._contribution = frame
            yield from (Send(site, frame) for site in role.audience)

    def put_back(self) -> None:
        """Restore the residual from before: another machine will repeat the chunk."""
        if self._residual is not None and self._residuals is not None:
            self._residuals.restore(self._chunk, Kind.CONTRIBUTION, self._residual)
            self._residual = None

    def _sum(self) -> Iterator[Action]:
        """Sum all members in site order once all have come, and pass the sum on."""
        own, role = self._own, self._role
        if own is None or self._is_summed or len(self._frames) < len(role.members) - 1:
            return
        self._is_summed = True
        weight = 0.0  # summed in site order, too
        for member in role.members:
            weight += own.weight if member == role.site else self._frames[member].weight
        if role.parent is not None:
            if len(role.members) > 1:
                meant = np.empty(self._numel, dtype=np.float32)
                self._add_up(own, meant, None)
                encoded = self._encode(Kind.CONTRIBUTION, meant)
            else:
                encoded = self._encode_part(own)
                self._part = None  # free it: the result takes a while
            yield Send(role.parent, self._frame(Kind.CONTRIBUTION, weight, encoded.payload))
            return
        frames = self._frames
        self._add_up(own, own.values, _divisor(weight))
        if role.receivers:
            encoded = self._encode(Kind.RESULT, own.values)
            frame = self._frame(Kind.RESULT, weight, encoded.payload)
            with self._decoding():
                encoded.part.write(own.values)
            yield from (Send(receiver, frame) for receiver in role.receivers)
            yield self._finish(weight, (frame,))
        elif self._contribution is not None:
            frames[role.site] = self._contribution
            yield self._finish(weight, tuple(frames[member] for member in role.members))
        else:
            yield self._finish(weight, ())

    def _take_early_result(self) -> Iterator[Action]:
        """While catching up, take a result that came before the ranks' own part."""
        frame, self._early = self._early, None
        if frame is not None:
            yield from self._take_result(frame)

    def _take_result(self, frame: Frame) -> Iterator[Action]:
        if self._is_finished:
            return
        if self._role.follows and self._own is None:
            self._early = frame
            return
        if self._own is None or not (self._is_summed or self._role.follows):
            raise RemoteProtocolError(f"a result of {self._name} without this site's part")
        with self._decoding():
            self._codec.decode(frame.payload, self._numel, self._own.values)
        yield from (Send(receiver, frame) for receiver in self._role.receivers)
        yield self._finish(frame.weight, (frame,))

    def _take_over(self, frames: tuple[Frame, ...]) -> Iterator[Action]:
        """Apply a chunk finished by another site, from the same bytes and in the same order."""
        if self._is_finished:
            return
        if self._own is None:
            raise RemoteProtocolError(f"{self._name} handed over without this site's part")
        frames = tuple(sorted(frames, key=lambda frame: frame.key.site))
        weight = 0.0
        for frame in frames:
            weight += frame.weight
        is_result = frames[0].key.kind is Kind.RESULT
        with self._decoding():
            parts = [BY_NUMBER[each.codec].part(each.payload, self._numel) for each in frames]
            add_up(parts, self._own.values, None if is_result else _divisor(weight))
        yield self._finish(weight, frames)

    def _finish(self, weight: float, frames: tuple[Frame, ...]) -> Finish:
        assert self._own is not None
        self._is_finished = True
        self._residual = None
        with self._decoding():
            squares = loops.sum_of_squares(self._own.values)
        return Finish(weight, squares, frames)

    def _add_up(self, own: Own, out: Floats, divisor: np.float32 | None) -> None:
        """Write the sum of all parts in site order to `out`, divided by `divisor` if given."""
        role = self._role
        frames, self._frames = self._frames, {}
        with self._decoding():
            parts = [
                (FloatPart(own.values) if self._part is None else self._part)
                if member == role.site
                else self._codec.part(frames[member].payload, self._numel)
                for member in role.members
            ]
            self._part = None
            add_up(parts, out, divisor)

    @contextlib.contextmanager
    def _decoding(self) -> Iterator[None]:
        """Count CPU time; name the chunk in errors."""
        begun_s = self._bucket.cpu_s()
        try:
            yield
        except CorruptDataError as error:
            raise CorruptDataError(f"{self._name}: {error}") from error
        self.decode_s += self._bucket.cpu_s() - begun_s

    def _own_encoded(self, own: OwnEncoded) -> Encoded:
        """Return the rank's encoding, re-encoded if the plan has another codec by now."""
        encoded = self._timed(own.seal)
        if own.codec is self._codec:
            return encoded
        values = np.empty(self._numel, dtype=np.float32)
        encoded.part.write(values)
        return self._timed(lambda: self._codec.encode_with_residual(values, None))

    def _encode_part(self, own: Own) -> Encoded:
        """Encode this site's own part."""
        if self._encoded is not None:
            return self._encoded
        return self._encode(Kind.CONTRIBUTION, own.values)

    def _encode(self, kind: Kind, values: Floats) -> Encoded:
        residuals, codec = self._residuals, self._codec
        if residuals is None or (codec.lossless and residuals.of(self._chunk, kind) is None):
            return self._timed(lambda: codec.encode_with_residual(values, None))
        if kind is Kind.CONTRIBUTION:
            residual = residuals.of(self._chunk, kind)
            self._residual = (
                np.zeros(len(values), dtype=np.float32) if residual is None else residual.copy()
            )
        return self._timed(lambda: residuals.encode(self._chunk, kind, codec, values))

    def _timed(self, encode: Callable[[], Encoded]) -> Encoded:
        begun_s = self._bucket.cpu_s()
        encoded = encode()
        self.encode_s += self._bucket.cpu_s() - begun_s
        return encoded

    def _frame(self, kind: Kind, weight: float, payload: Payload) -> Frame:
        bucket = self._bucket
        return Frame(
            ChunkKey(bucket.round, bucket.index, self._chunk, self._role.site, kind),
            bucket.epoch,
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
    """One bucket at one site: makes its chunks' machines, and checks frames for them."""

    def __init__(
        self,
        bucket: Bucket,
        plan: ReductionPlan,
        own_roles: tuple[Role, ...],
        residuals: BucketResiduals | None,
    ) -> None:
        """`residuals` are the bucket's error-feedback residuals; None: no error feedback."""
        self.bucket = bucket
        self._residuals = residuals
        self._plan = plan
        self._roles = own_roles
        self._chunks: dict[int, ChunkReduction] = {}

    def chunk(self, index: int) -> ChunkReduction:
        """Return the machine of one chunk."""
        machine = self._chunks.get(index)
        if machine is None:
            machine = ChunkReduction(self.bucket, self._role(index), index, self._residuals)
            self._chunks[index] = machine
        return machine

    @property
    def is_gather(self) -> bool:
        """Whether every site sends its part to every other."""
        return self._plan.is_gather

    def peers(self, chunk: int) -> tuple[int, ...]:
        """Return the sites at which an unfinished chunk takes credit (credit.py).

        They get this site's part, or the sum formed here, or send the result here.
        """
        role = self._role(chunk)
        if role.follows:
            return ()
        if role.parent is None or role.giver is None:
            return role.audience
        return tuple(dict.fromkeys((role.parent, role.giver)))

    def codec(self, chunk: int) -> Codec:
        """Return the codec of a chunk's tree."""
        return self.bucket.codecs[self._role(chunk).tree]

    def _role(self, chunk: int) -> Role:
        turn = self.bucket.grid.turn(self.bucket.index, chunk)
        return self._roles[self._plan.tree_index(turn)]

    def check(self, sender: int, frame: Frame) -> None:
        """Check a frame of this bucket against this site's plan, before it is decoded.

        Raises:
            LayoutMismatchError: the bucket has another layout at the sender.
            RemoteProtocolError: `sender` may not send this frame.
        """
        key, bucket = frame.key, self.bucket
        if frame.epoch != bucket.epoch:
            raise RemoteProtocolError(
                f"round {key.round} bucket {key.bucket} of epoch {frame.epoch}; this is "
                f"{bucket.epoch}"
            )
        self._check_place(frame)
        self._check_part(sender, frame)

    def check_handover(self, given: Frame, frame: Frame) -> None:
        """Check a handed-over frame against its header and this bucket.

        Raises:
            LayoutMismatchError: the bucket has another layout at the sender.
            RemoteProtocolError: the frame is no part of a finished chunk.
        """
        key, name = frame.key, f"round {given.key.round} bucket {given.key.bucket}"
        self._check_place(frame)
        if (
            dataclasses.replace(key, kind=Kind.HANDOVER) != given.key
            or key.kind not in (Kind.CONTRIBUTION, Kind.RESULT)
            or (key.kind is Kind.RESULT and given.tree != 1)
            or frame.codec not in BY_NUMBER
        ):
            raise RemoteProtocolError(f"{name} chunk {given.key.chunk}: not what was handed over")
        self._check_sizes(frame, BY_NUMBER[frame.codec])

    def _check_place(self, frame: Frame) -> None:
        key, bucket = frame.key, self.bucket
        name = f"round {key.round} bucket {key.bucket}"
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
            allowed = role.giver is not None and sender == role.giver and key.site == role.root
        if not allowed or frame.tree != role.tree:
            raise RemoteProtocolError(f"{name}: this {key.kind.name.lower()} is not its to send")
        self._check_sizes(frame, codec)

    def _check_sizes(self, frame: Frame, codec: Codec) -> None:
        key = frame.key
        name = f"round {key.round} bucket {key.bucket} chunk {key.chunk}"
        if not (math.isfinite(frame.weight) and 0 <= frame.weight <= WEIGHT_MAX):
            raise RemoteProtocolError(f"{name}: a weight of {frame.weight}")
        most_bytes = codec.max_bytes(self.bucket.grid.span(key.chunk)[1])
        if len(frame.payload) > most_bytes:
            raise RemoteProtocolError(f"{name}: {len(frame.payload)} bytes, at most {most_bytes}")


def _divisor(weight: float) -> np.float32:
    """Return what a sum of such a weight is divided by; infinity makes zeros of no tokens."""
    return np.float32(weight) if weight > 0 else np.float32(np.inf)


def add_up(parts: Sequence[Part], out: Floats, divisor: np.float32 | None) -> None:
    """Write the sum of all parts to `out`, divided if there is a divisor, which is above 0.

    A NaN in a sum is 0x7FC00000; a NaN of a single part keeps its bits. `out` may hold a part.
    """
    first, *others = parts
    last_divisor = _ONE if divisor is None else divisor
    if not others:
        if not first.fills(out):
            first.apart_from(out).write(out)
        if divisor is not None:
            loops.divide(out, divisor)
        return
    if others[0].fills(out):  # with two parts the order changes no bit, so no copy is needed
        first, others[0] = others[0], first
    others = [part.apart_from(out) for part in others]
    divisors = [_ONE] * (len(others) - 1) + [last_divisor]
    if first.fills(out):
        others[0].add(out, divisors[0])
    else:
        others[0].write_sum(first.apart_from(out), out, divisors[0])
    for part, each in zip(others[1:], divisors[1:], strict=True):
        part.add(out, each)
