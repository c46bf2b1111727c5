"""Error feedback: what an encoder lost is added to what it encodes next.

Whoever encodes a chunk for others (a contributor its part, an inner site its subtree's sum, a root
the result) keeps the difference between what it meant and what they decode, and adds it to the same
chunk of the next round. So nothing is lost for good, only late: over any number of rounds, what was
decoded adds up to what was meant, but for the latest residual, which is at most one step of the
codec.

A residual is kept in the unit of what is encoded. Going up that is gradients times tokens, so each
token's share arrives once, whatever the weights of the rounds are: a late part is divided by the
next round's tokens instead of its own's, which matters as much as tokens differ between two rounds,
for a part that is itself a rounding error. (To normalise by the site's own tokens would be to
divide by zero where it has none.) Coming down it is the mean gradient: what optimizers apply adds
up exactly.

Only the encoder has a residual, so sites decode the same bytes as without. With a gateway its
residuals end; that costs one rounding error, once, and nothing has to be saved or agreed upon.
"""

from __future__ import annotations

import numpy as np

from sites.codecs.codec import Codec, Encoded, Floats


class Residual:
    """What one encoder owes of one chunk: float32, as many as its elements."""

    def __init__(self, numel: int) -> None:
        self._numel = numel
        self._lost: Floats | None = None
        """None until something is encoded: where ranks encode, perhaps never."""

    def encode(self, codec: Codec, values: Floats) -> Encoded:
        """Encode `values` and what is owed.

        NaN and infinities cross as without a residual; of those elements nothing is owed.

        Args:
            codec: lossy.
            values: float32, shape (n,). Not modified.
        """
        if self._lost is None:
            self._lost = np.zeros(self._numel, dtype=np.float32)
        return codec.encode_owed(values, self._lost)


class BucketResiduals:
    """Those of one bucket's chunks. A site encodes each chunk in one role only."""

    def __init__(self, layout: int, numel: int) -> None:
        self.layout = layout
        self.numel = numel
        self._chunks: dict[int, Residual] = {}

    def chunk(self, index: int, numel: int) -> Residual:
        """Return the residual of a chunk with `numel` elements; nothing is owed at first."""
        residual = self._chunks.get(index)
        if residual is None:
            residual = self._chunks[index] = Residual(numel)
        return residual


class Residuals:
    """All of a gateway's: as many float32 as its shards of the model have, at most.

    Not thread-safe. What is handed out is used by one round at a time: a bucket's next round is
    posted after the previous one has been reduced.
    """

    def __init__(self) -> None:
        self._buckets: dict[int, BucketResiduals] = {}

    def bucket(self, index: int, layout: int, numel: int) -> BucketResiduals:
        """Return the residuals of a bucket.

        Where it holds something else than in the round before, the model has been cut into other
        buckets, and what is owed belongs to none of them: it is dropped, of all buckets.
        """
        found = self._buckets.get(index)
        if found is not None and (found.layout, found.numel) != (layout, numel):
            self._buckets.clear()
            found = None
        if found is None:
            found = self._buckets[index] = BucketResiduals(layout, numel)
        return found

    def forget(self) -> None:
        """Owe nothing any more: chunks are encoded in other roles from now on."""
        self._buckets.clear()
