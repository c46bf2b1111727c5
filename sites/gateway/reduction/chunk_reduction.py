"""The all-reduce of one chunk between sites, as a pure state machine.

Events in, actions out; no sockets, threads or clocks. Sums are formed in site order whatever the
order of arrival, and what a site applies is decoded from the same bytes as everywhere else, so the
result is bit-identical at all sites by construction. A number is rounded by a codec only where it
travels: what a site adds to its children's sums by itself is added as it is.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import numpy as np

from protos.errors import CorruptDataError, NoTokensError, RemoteProtocolError
from protos.frame import ChunkKey, Frame, Kind
from sites.codecs.codec import Encoded, Payload
from sites.codecs.parts import FloatPart, Floats, Part
from sites.gateway.reduction.events import Action, Bucket, Event, Finish, Own, Send
from sites.gateway.reduction.residuals import Residual
from sites.gateway.reduction.roles import Role
from sites.gateway.reduction.summing import add_up


class ChunkReduction:
    """One chunk at one site. Late or repeated events change nothing.

    All that is summed here is summed at once when the last part is there, so that each number is
    read and written once; until then frames stay encoded, which takes less memory than sums.

    `encode_s` and `decode_s` are CPU time: of encoding what is sent, and of decoding and summing.
    """

    def __init__(self, bucket: Bucket, role: Role, chunk: int, residual: Residual | None) -> None:
        self._bucket = bucket
        self._residual = residual
        self._codec = bucket.codecs[role.tree]
        self._role = role
        self._chunk = chunk
        self._numel = bucket.grid.span(chunk)[1]
        self._own: Own | None = None
        self._encoded: Encoded | None = None
        """The own part, if its rank encoded it, until it is sent."""
        self._part: Part | None = None
        """What all others decode of the own part; None: they do not, it is `values`."""
        self._frames: dict[int, Frame] = {}
        """What the other members sent, until it is summed."""
        self._is_summed = False
        self._is_finished = False
        self.encode_s = 0.0
        self.decode_s = 0.0

    def handle(self, event: Event) -> Iterator[Action]:
        """Apply one event, and return what to do: each before the next one is asked for.

        On one thread from beginning to end.

        Raises:
            CorruptDataError: a payload does not hold the chunk.
            NoTokensError: the weights of all sites add up to nothing.
            RemoteProtocolError: a result came before everything that it must contain.
        """
        if isinstance(event, Own):
            if self._own is None:
                self._own = event
                if event.encoded is not None:
                    self._encoded = self._timed(event.encoded)
                    self._part = self._encoded.part
                yield from self._contribute(event)
                yield from self._sum()
                self._encoded = None
                if not self._is_summed and self._part is not None:
                    # Others' parts may be long in coming; `values` are not needed meanwhile.
                    self._part = self._part.moved_to(event.values)
        elif event.frame.key.kind is Kind.RESULT:
            yield from self._take_result(event.frame)
        elif not self._is_summed and event.sender not in self._frames:
            self._frames[event.sender] = event.frame
            yield from self._sum()

    def _contribute(self, own: Own) -> Iterator[Action]:
        """In a gather, tell all others; from now on the own part is what they decode."""
        role = self._role
        if role.audience:
            encoded = self._encode_part(own)
            self._part = encoded.part
            frame = self._frame(Kind.CONTRIBUTION, own.weight, encoded.payload)
            yield from (Send(site, frame) for site in role.audience)

    def _sum(self) -> Iterator[Action]:
        """Sum all members in site order once they are there, and pass the sum on."""
        own, role = self._own, self._role
        if own is None or self._is_summed or len(self._frames) < len(role.members) - 1:
            return
        self._is_summed = True
        weight = 0.0  # summed in site order, too
        for member in role.members:
            weight += own.weight if member == role.site else self._frames[member].weight
        if role.parent is not None:
            if len(role.members) > 1:
                self._add_up(None)
                encoded = self._encode(own.values)
            else:
                encoded = self._encode_part(own)
                self._part = None  # the result is long in coming
            yield Send(role.parent, self._frame(Kind.CONTRIBUTION, weight, encoded.payload))
            return
        divisor = np.float32(weight)
        if not divisor > 0:
            raise NoTokensError(f"no site has a token behind {self._name}: nothing to divide by")
        self._add_up(divisor)
        self._is_finished = True
        if role.children:
            encoded = self._encode(own.values)
            frame = self._frame(Kind.RESULT, weight, encoded.payload)
            with self._decoding():
                encoded.part.write(own.values)
            yield from (Send(child, frame) for child in role.children)
        yield Finish(weight)

    def _take_result(self, frame: Frame) -> Iterator[Action]:
        if self._is_finished:
            return
        if self._own is None or not self._is_summed:
            raise RemoteProtocolError(f"a result of {self._name} without this site's part")
        with self._decoding():
            self._codec.decode(frame.payload, self._numel, self._own.values)
        self._is_finished = True
        yield from (Send(child, frame) for child in self._role.children)
        yield Finish(frame.weight)

    def _add_up(self, divisor: np.float32 | None) -> None:
        """Sum all parts in site order, in place of the own one; divide the sum, if asked."""
        own, role = self._own, self._role
        assert own is not None
        frames, self._frames = self._frames, {}
        with self._decoding():
            parts = [
                self._own_part(own)
                if member == role.site
                else self._codec.part(frames[member].payload, self._numel)
                for member in role.members
            ]
            self._part = None
            add_up(parts, own.values, divisor)

    def _own_part(self, own: Own) -> Part:
        return FloatPart(own.values) if self._part is None else self._part

    @contextlib.contextmanager
    def _decoding(self) -> Iterator[None]:
        """Count CPU time; name the chunk in errors."""
        begun_s = self._bucket.cpu_s()
        try:
            yield
        except CorruptDataError as error:
            raise CorruptDataError(f"{self._name}: {error}") from error
        self.decode_s += self._bucket.cpu_s() - begun_s

    def _encode_part(self, own: Own) -> Encoded:
        """Return this site's part alone."""
        return self._encode(own.values) if self._encoded is None else self._encoded

    def _encode(self, values: Floats) -> Encoded:
        return self._timed(functools.partial(self._encode_now, values))

    def _encode_now(self, values: Floats) -> Encoded:
        if self._residual is not None:
            return self._residual.encode(self._codec, values)
        return self._codec.encode_owed(values, None)

    def _timed(self, encode: Callable[[], Encoded]) -> Encoded:
        begun_s = self._bucket.cpu_s()
        encoded = encode()
        self.encode_s += self._bucket.cpu_s() - begun_s
        return encoded

    def _frame(self, kind: Kind, weight: float, payload: Payload) -> Frame:
        bucket = self._bucket
        return Frame(
            ChunkKey(bucket.round, bucket.index, self._chunk, self._role.site, kind),
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
