"""The regime `streaming`: DiLoCo in fragments, whose results land while training goes on.

The model is cut into P fragments (OuterBuckets.fragments). Every H / P steps the next one is sent:
how far the site's parameters have moved from the global ones. The site goes on training. `delay`
steps later the outer step's result lands:

    step s ends             send (G - theta) tokens of fragment p
    step s + delay ends     wait; G and M are of all sites; theta := alpha theta + (1 - alpha) G

So a link carries 1 / P of what DiLoCo has cross at once, and has `delay` steps' time for it.

Sites' parameters are never alike, as long as alpha is above 0. Where a run needs one state of all,
for a checkpoint or a site that returns, all fragments cross at once, as in DiLoCo, and parameters
are the global ones.

From: Streaming DiLoCo (arXiv 2501.18512, algorithm 2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from isthmus.sites.worker.exchange.rounds import Landing, Round
from isthmus.sites.worker.regimes.local_steps import LocalSteps
from isthmus.sites.worker.regimes.outer_buckets import OuterBucket, Pieces, written


@dataclass(slots=True)
class _Sent:
    """A fragment that crosses."""

    round: Round
    results: Sequence[tuple[OuterBucket, Pieces]]
    """Where the global parameters of each bucket arrive."""
    is_there: bool = False
    """They have arrived."""


class Streaming(LocalSteps):
    """One rank's part of rounds of fragments. For the training thread."""

    _fragments: Sequence[Sequence[int]] = ()
    """Places of each fragment's buckets; none before the first step."""
    _sent: _Sent | None = None
    """What is under way."""
    _sent_tokens = 0.0
    """This rank's tokens in what was sent last."""

    # ---------------------------------------------------------------- what others ask

    def finish(self) -> None:
        """Have what is under way land, at the end of a run."""
        self._land()

    def close(self) -> None:
        """End it between two steps, the same ones at all sites: steps of their own count."""
        self._land()
        super().close()

    @contextmanager
    def global_parameters(self) -> Iterator[None]:
        """Have parameters hold the global ones, by all that has been sent."""
        self._wait_sent()
        with super().global_parameters():
            yield

    # ---------------------------------------------------------------- a step

    def _begin(self) -> None:
        super()._begin()
        self._fragments = self._buckets.fragments(self._regime.fragments)

    def before_end(self, step: int) -> Landing | None:
        """Have the fragment land that is due."""
        self._note_step(step)
        if self._regime.delay == 0:
            self._send()
        if self._regime.lands_at(step):
            self._land()
        return None

    def after_end(self) -> None:
        """Send the fragment that is due, unless all fragments have just crossed."""
        if self._regime.delay and self._has_moved:
            self._send()

    def _send(self) -> None:
        fragment = self._regime.fragment_sent_at(self._step)
        if fragment is None or fragment >= len(self._fragments):
            return
        places = self._fragments[fragment]
        shards = [self._state.shards[place] for place in places]
        self._set_rates(shards)
        tokens, self._tokens[fragment] = self._tokens[fragment], 0.0
        self._sent_tokens = tokens
        with written(self._trained) as flats:
            sent = [
                (each, [piece.clone() for piece in self._buckets.pieces_of(each, flats)])
                for each in (self._buckets.buckets[place] for place in places)
            ]
            works = [(*each, shard) for each, shard in zip(sent, shards, strict=True)]
            self._sent = _Sent(self._buckets.send_some(tokens, flats, works, self._since), sent)

    def _land(self) -> None:
        """Merge what was sent last into the parameters, once it is there."""
        self._wait_sent()
        sent, self._sent = self._sent, None
        if sent is None or not sent.is_there:
            return
        self._landed.append(sent.round)
        alpha = self._regime.alpha
        with written(self._trained) as flats:
            for bucket, results in sent.results:
                own = self._buckets.pieces_of(bucket, flats)
                for value, result in zip(own, results, strict=True):
                    value.copy_(result if alpha == 0.0 else value.lerp(result, 1.0 - alpha))

    def _wait_sent(self) -> None:
        """Wait for what is under way; not in a script that has destroyed its process groups."""
        sent = self._sent
        if sent is not None and not sent.is_there and self._buckets.can_wait:
            self._buckets.wait_some(sent.round)
            sent.is_there = True

    # ---------------------------------------------------------------- state

    def make_common(self, *, crosses: bool = True) -> bool:
        """Have all fragments cross, and parameters be the global ones: as `LocalSteps`.

        Where nothing crosses any more, global parameters are of what has crossed before.
        """
        if self._state.is_noted:
            return True
        if not self._state.shards or not self._buckets.can_wait:
            return False
        self._land()
        if not crosses:
            with written(self._trained) as flats:
                self._state.give(flats)
            self._has_moved = False
            self._state.note()
            return True
        if self._has_moved:
            if not any(self._tokens):  # the only fragment has landed with this step, as a part
                self._tokens = [self._sent_tokens] * len(self._tokens)
            self._meet()
        return super().make_common()
