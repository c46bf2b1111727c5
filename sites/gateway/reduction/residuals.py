"""Error feedback: what an encoder lost is added to what it encodes next.

A site encodes its own part, a subtree's sum, or a root's result. It keeps the difference between
what it meant and what others decode, and adds it to the same chunk of the next round. So nothing is
lost for good, only late. Over any number of rounds, what was decoded adds up to what was meant,
less the latest residual, which is at most one step of the codec.

A residual has the unit of what is encoded. Going up, that is gradients times tokens. So each
token's share arrives once, whatever the weights of the rounds are; a late part is divided by the
next round's tokens instead of its own. To divide by the site's own tokens before would fail where
it has none. Coming down, the unit is the mean gradient: what optimizers apply adds up exactly.

Own part, subtree's sum and root's result each have a residual of their own, so a site that has
another role in another epoch loses nothing. Where a chunk is done again, because a site was lost,
its residual is put back as it was, bit for bit: until a chunk is finished its machine keeps a copy.
What was meant less what was given would be another number, by a rounding, and many rounds later an
element would cross as another code.

Only the encoder has a residual, so sites decode the same bytes as without. Residuals end with their
gateway, which costs one rounding error, once. A checkpoint keeps them nevertheless, for a resumed
run to end in the same bits (kept_residuals.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from isthmus.protos.frame import Kind
from isthmus.sites.codecs.codec import Codec, Encoded, Floats

KeptResiduals = dict[tuple[int, int, int, int, Kind], Floats]
"""Residuals by bucket, its layout and elements, chunk, and way."""


class BucketResiduals:
    """What a gateway's encoders have lost of one bucket: one float32 an element.

    Where a site has had both ways of a chunk, two. A chunk is encoded by one thread at a time.
    """

    def __init__(self, layout: int, numel: int) -> None:
        self.layout = layout
        self.numel = numel
        self._lost: dict[tuple[int, Kind], Floats] = {}
        """By chunk and way, once it is encoded. Where ranks encode, that may be never."""

    def encode(self, chunk: int, kind: Kind, codec: Codec, values: Floats) -> Encoded:
        """Encode a chunk's `values`, float32 (n,), and the residual. They are not modified.

        NaN and infinities cross as they do without a residual, and leave no residual.
        """
        lost = self._lost.get((chunk, kind))
        if lost is None:
            lost = self._lost[chunk, kind] = np.zeros(len(values), dtype=np.float32)
        return codec.encode_with_residual(values, lost)

    def of(self, chunk: int, kind: Kind) -> Floats | None:
        """Return the residual of a chunk, until it is encoded again; None: it was never encoded."""
        return self._lost.get((chunk, kind))

    def restore(self, chunk: int, kind: Kind, values: Floats) -> None:
        """Set a chunk's residual to `values`, which are owned from now on."""
        self._lost[chunk, kind] = values


class Residuals:
    """All residuals of a gateway: at most one float32 for each element of its shards of the model.

    Not thread-safe. One round at a time uses what is handed out: a bucket's next round is posted
    after the previous one has been reduced.
    """

    def __init__(self) -> None:
        self._buckets: dict[int, BucketResiduals] = {}

    def bucket(self, index: int, layout: int, numel: int) -> BucketResiduals:
        """Return the residuals of a bucket.

        If it holds something else than in the round before, the model has been cut into other
        buckets. The residual belongs to none of them: the residuals of all buckets are dropped.
        """
        found = self._buckets.get(index)
        if found is not None and (found.layout, found.numel) != (layout, numel):
            self._buckets.clear()
            found = None
        if found is None:
            found = self._buckets[index] = BucketResiduals(layout, numel)
        return found

    def kept(self, chunks: Callable[[int, int], Iterable[int]]) -> KeptResiduals:
        """Return the residual of `chunks(numel, layout)` of each bucket, until their next round.

        Of chunks whose latest round has ended.
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
