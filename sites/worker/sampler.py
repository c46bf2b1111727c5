"""Hands each rank its samples of each step, so that all sites together use every sample once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from sites.worker.data_positions import DataPositions, Positions
from sites.worker.shuffling import key_of, shuffled, splitmix64


class Sampler:
    """This rank's batches, one a step: what a DataLoader takes as its `batch_sampler`.

    Endless: one pass over the data follows another, each in an order of its own. A batch is used
    when the optimizer's step has used it, not when it is drawn, so that a DataLoader may fetch
    ahead. Made by `Site.sampler`, which counts the steps.
    """

    def __init__(self, *, num_samples: int, global_batch: int, part: range, seed: int) -> None:
        """Start at the run's first sample.

        Args:
            num_samples: of the dataset.
            global_batch: samples of a step, over all sites.
            part: this rank's places among them.
            seed: names the orders.

        Raises:
            ValueError: there are no samples.
        """
        if num_samples < 1:
            raise ValueError("site.sampler: the dataset is empty")
        self.num_samples = num_samples
        self.global_batch = global_batch
        self._part = part
        self._key = key_of(seed)
        self._drawn = DataPositions()
        self._used = DataPositions()
        self._ahead: deque[DataPositions] = deque()
        self._before_first: Callable[[], None] = lambda: None

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the dataset's indices of this rank's samples, step after step, without an end."""
        while True:
            yield self.indices(self.draw()).tolist()

    def draw(self) -> Positions:
        """Return this rank's positions of the next step: int64, shape (samples of the rank,)."""
        before_first, self._before_first = self._before_first, lambda: None
        before_first()
        positions, self._drawn = self._drawn.taken(self.global_batch)
        self._ahead.append(self._drawn)
        return positions[self._part.start : self._part.stop]

    def indices(self, positions: Positions) -> Positions:
        """Return which samples of the dataset stand at positions of the run.

        A pure function of seed, pass over the data, and place in it.
        """
        data_epochs, places = np.divmod(positions, self.num_samples)
        found = np.empty_like(positions)
        for data_epoch in np.unique(data_epochs):
            here = data_epochs == data_epoch
            key = splitmix64(self._key + np.uint64(data_epoch))
            found[here] = shuffled(places[here], self.num_samples, key)
        return found

    @property
    def data_epoch(self) -> int:
        """The pass over the data, from 0, in which the next step's first sample stands."""
        return self._used.next // self.num_samples

    @property
    def used(self) -> DataPositions:
        """What completed steps have used; a checkpoint has it."""
        return self._used

    def step(self) -> None:
        """Note that the oldest batch drawn has been used."""
        if self._ahead:
            self._used = self._ahead.popleft()

    def resize(self, global_batch: int, part: range) -> None:
        """Take other batches from now on; before anything is drawn."""
        self.global_batch, self._part = global_batch, part

    def resume(self, used: DataPositions, before_first: Callable[[], None]) -> None:
        """Go on after what a checkpoint has: before anything is drawn.

        Args:
            used: of the checkpoint.
            before_first: called before the first batch is drawn. A DataLoader takes a seed from
                torch's generator when it begins, which the run that was saved had done long before.

        Raises:
            RuntimeError: a batch was drawn already.
        """
        if self._drawn != DataPositions():
            raise RuntimeError("site.checkpoint: call it before the sampler is iterated")
        self._drawn = self._used = used
        self._before_first = before_first
