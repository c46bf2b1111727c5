"""Error feedback: an encoder's rounding error is added to the next values that it encodes.

A site encodes its own part, a subtree's sum, or a root's result. It keeps the residual, the
difference between the true values and the decoded ones, and adds it to the same chunk of the next
round. So no value is lost, only late. Over any number of rounds, the decoded values add up to the
true ones less the latest residual, which is at most one step of the codec. A decay below 1
multiplies the residual each time before it is added: then what is late for n rounds arrives as
decay^n of itself.

A residual has the unit of what is encoded. Going up, that is gradients times tokens. So each
token's share arrives once, whatever the rounds' weights are; a late part is divided by the next
round's tokens instead of its own. Dividing by the site's own tokens first would fail if it has
none. Coming down, the unit is the mean gradient: the applied gradients add up exactly.

Own part, subtree's sum and root's result have separate residuals, so a site that changes its role
in a new epoch loses nothing. If a chunk is repeated because a site was lost, its residual is
restored bit for bit from a copy that its machine keeps. Recomputing it as a difference would round,
and many rounds later an element would cross as another code.

Only the encoder has a residual, so decoding is unaffected. A gateway that ends loses its residuals,
which costs one rounding error, once. A checkpoint keeps them nevertheless, so that a resumed run
ends in the same bits (kept_residuals.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from isthmus.protos.frame import Kind
from isthmus.sites.codecs.codec import Codec, Encoded, Floats

KeptResiduals = dict[tuple[int, int, int, int, Kind], Floats]
"""Residuals by (bucket, its layout, its numel, chunk, kind of frame)."""


class BucketResiduals:
    """The residuals of one bucket at a gateway: one float32 per element.

    Two per element if the site encodes a chunk both up and down. A chunk is encoded by one thread
    at a time.
    """

    def __init__(self, layout: int, numel: int, decay: float = 1.0) -> None:
        self.layout = layout
        self.numel = numel
        self._decay = np.float32(decay)
        self._lost: dict[tuple[int, Kind], Floats] = {}
        """Residual by (chunk, kind of frame). Absent until first encoded; ranks that encode may
        keep it."""

    def encode(self, chunk: int, kind: Kind, codec: Codec, values: Floats) -> Encoded:
        """Encode a chunk's `values`, float32 (n,), and the residual. They are not modified.

        NaN and infinities cross as they do without a residual, and leave no residual. Where a
        run goes over to a lossless codec, that has nothing to leave out: the residual is gone.
        """
        if codec.lossless:
            lost = self._lost.pop((chunk, kind), None)
            meant = values if lost is None else values + self._decay * lost
            return codec.encode_with_residual(meant, None)
        lost = self._lost.get((chunk, kind))
        if lost is None:
            lost = self._lost[chunk, kind] = np.zeros(len(values), dtype=np.float32)
        elif self._decay != 1:
            lost *= self._decay
        return codec.encode_with_residual(values, lost)

    def of(self, chunk: int, kind: Kind) -> Floats | None:
        """Return the current residual of a chunk; None: it was never encoded."""
        return self._lost.get((chunk, kind))

    def restore(self, chunk: int, kind: Kind, values: Floats) -> None:
        """Set a chunk's residual to `values`, and take ownership of the array."""
        self._lost[chunk, kind] = values


class Residuals:
    """All residuals of a gateway: about one float32 per element of its shards.

    Not thread-safe. A returned `BucketResiduals` has one user at a time: a bucket's next round is
    posted after the previous one is reduced.
    """

    def __init__(self, decay: float = 1.0) -> None:
        """`decay`: factor on a residual, each time before it is added."""
        self._decay = decay
        self._buckets: dict[int, BucketResiduals] = {}

    def bucket(self, index: int, layout: int, numel: int) -> BucketResiduals:
        """Return the residuals of a bucket.

        If `layout` or `numel` differs from the previous round, the model has been cut into other
        buckets, and all residuals are dropped.
        """
        residuals = self._buckets.get(index)
        if residuals is not None and (residuals.layout, residuals.numel) != (layout, numel):
            self._buckets.clear()
            residuals = None
        if residuals is None:
            residuals = self._buckets[index] = BucketResiduals(layout, numel, self._decay)
        return residuals

    def kept(self, chunks: Callable[[int, int], Iterable[int]]) -> KeptResiduals:
        """Return the residuals of the chunks in `chunks(numel, layout)` of each bucket.

        Their latest round must have ended; the arrays change in the next one.
        """
        return {
            (index, bucket.layout, bucket.numel, chunk, kind): lost
            for index, bucket in self._buckets.items()
            for chunk in chunks(bucket.numel, bucket.layout)
            for kind in (Kind.CONTRIBUTION, Kind.RESULT)
            if (lost := bucket.of(chunk, kind)) is not None
        }

    def restore(self, residual: KeptResiduals) -> None:
        """Set all residuals to what `kept` returned. Before the first round."""
        for (index, layout, numel, chunk, kind), values in residual.items():
            self.bucket(index, layout, numel).restore(chunk, kind, values)
