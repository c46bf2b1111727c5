"""Which buckets a gateway has had, and which may still come. Pure.

A round ends at all sites together, for each needs something of every other; so a peer is at most
one round ahead of a site. A gateway can be a round behind its site: where all of a round's buckets
are so small that nothing of them belongs to its node, nobody waits for its ranks until the
collectives of the next. What comes of an older round is a repetition, or a bucket that never was
here.
"""

from __future__ import annotations

from protos.errors import LayoutMismatchError, RemoteProtocolError

BucketKey = tuple[int, int]
"""Round and bucket."""

_AHEAD_MAX = 2
"""Rounds that a peer can be ahead: one of this site, which is at most one ahead of this gateway."""


class Rounds:
    """Remembers the latest two rounds."""

    def __init__(self) -> None:
        self.current = -1
        """The latest round that a local rank has posted; -1 before the first."""
        self._posted: dict[int, set[int]] = {}
        self._done: set[BucketKey] = set()

    def begin(self, round_: int) -> None:
        """A local rank has gone on to `round_`: everything of the rounds before was posted."""
        self.current = round_
        self._posted = {r: buckets for r, buckets in self._posted.items() if r >= round_ - 1}
        self._done = {key for key in self._done if key[0] >= round_ - 1}

    def note_posted(self, key: BucketKey) -> None:
        """A local rank has posted a bucket."""
        self._posted.setdefault(key[0], set()).add(key[1])

    def note_done(self, key: BucketKey) -> None:
        """A bucket is finished for all ranks of the node."""
        self._done.add(key)

    def is_done(self, key: BucketKey) -> bool:
        """Whether a bucket is finished here; of older rounds, nothing is remembered."""
        return key in self._done

    def is_ahead(self, key: BucketKey) -> bool:
        """Whether a bucket that is not under way here is still to come.

        Raises:
            LayoutMismatchError: it never will.
            RemoteProtocolError: no site can be that far ahead.
        """
        round_, bucket = key
        if round_ > self.current + _AHEAD_MAX:
            raise RemoteProtocolError(
                f"a frame of round {round_}, when this site is in round {self.current}"
            )
        if round_ >= self.current:
            return not self.is_done(key)
        if round_ in self._posted and bucket not in self._posted[round_]:
            raise LayoutMismatchError(
                f"a frame of round {round_} bucket {bucket}, which this site has never had"
            )
        return False
