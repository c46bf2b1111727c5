"""A lone rank's pipeline, and links and transfers that it meets: slow, broken, scripted ones."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from isthmus.protos import metrics
from isthmus.protos.errors import RankLostError
from isthmus.sites.local.rank_messages import (
    Digest,
    FromRank,
    Metric,
    Reduce,
    Reduced,
    ReductionTimes,
    Region,
)
from isthmus.sites.worker.exchange.bucket_copy import Pending, Slot, Transfer, read_pieces
from isthmus.sites.worker.exchange.bucket_pipeline import BucketPipeline
from isthmus.sites.worker.exchange.collectives import Collectives
from isthmus.sites.worker.exchange.gateway_link import AloneLink, Link

LONG_S = 30.0


@contextmanager
def lone_exchange(
    link: Link,
    transfer: Transfer | None = None,
    *,
    deadline_s: float = LONG_S,
    **options: Any,  # noqa: ANN401 - arguments of the exchange
) -> Iterator[BucketPipeline]:
    """Start the pipeline of this process as the only rank, over the host; close it at the end."""
    exchange = BucketPipeline(
        link,
        transfer or Transfer(Collectives(LONG_S)),
        rank=0,
        world_size=1,
        deadline_s=deadline_s,
        **options,
    )
    exchange.start()
    try:
        yield exchange
    finally:
        exchange.close()


class DeafLink(AloneLink):
    """Never answers."""

    def reduce(self, request: Reduce) -> None:
        del request


class CountingLink(AloneLink):
    """Keeps what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Reduce] = []
        self.regions: list[int] = []
        self.sizes: dict[int, int] = {}
        self.other_tokens = 0.0
        """Of sites that are not there, and contribute zeros."""

    def send(self, message: FromRank, descriptor: int | None = None) -> None:
        if isinstance(message, Region):
            self.regions.append(message.region)
            self.sizes[message.region] = message.numel
        super().send(message, descriptor)

    def reduce(self, request: Reduce) -> None:
        self.requests.append(request)
        super().reduce(dataclasses.replace(request, weight=request.weight + self.other_tokens))


class ScriptedLink(AloneLink):
    """Answers what a test tells it to."""

    def __init__(self, answer: Callable[[Reduce], Reduced]) -> None:
        super().__init__()
        self._answer = answer

    def reduce(self, request: Reduce) -> None:
        self._on_reduced(self._answer(request))


class BrokenLink(AloneLink):
    """Fails when it is used."""

    def reduce(self, request: Reduce) -> None:
        raise ZeroDivisionError(f"round {request.round}")


class RecordingLink(AloneLink):
    """Keeps the metrics and digests."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[tuple[str, int, Mapping[str, float]]] = []
        self.reasons: list[tuple[str, str]] = []
        """Kinds of metrics, and what they give for a reason."""
        self.steps_hashed: list[int] = []
        self.has_left = False

    def send(self, message: FromRank, descriptor: int | None = None) -> None:
        if isinstance(message, Metric):
            self.metrics.append((message.kind, message.step, message.values))
            if metrics.REASON in message.labels:
                self.reasons.append((message.kind, message.labels[metrics.REASON]))
        elif isinstance(message, Digest):
            self.steps_hashed.append(message.step)
        super().send(message, descriptor)

    def leave(self, *, has_averaged: bool = True) -> None:
        self.has_left = True
        self.has_averaged = has_averaged


class StreamTransfer(Transfer):
    """As on CUDA: a result is in place only for whoever has waited for its future."""

    def __init__(self, collectives: Collectives) -> None:
        super().__init__(collectives)
        self.enqueued: list[Callable[[], object]] = []
        self._num_futures = self._num_done = 0

    def make_future(self) -> torch.futures.Future[torch.Tensor]:
        transfer = self
        self._num_futures += 1
        place = self._num_futures

        class StreamFuture(torch.futures.Future[torch.Tensor]):
            def wait(self) -> torch.Tensor:
                super().wait()
                while transfer._num_done < place:
                    transfer._num_done += 1
                    transfer.enqueued.pop(0)()
                return super().wait()

        return StreamFuture()

    def deliver(
        self, slot: Slot, pieces: Sequence[torch.Tensor], complete: Callable[[], None]
    ) -> None:
        self.enqueued.append(partial(read_pieces, slot.padded.clone(), pieces))
        complete()


class SlowDevice(Transfer):
    """A device that has computed a bucket long after it was submitted: half a second ago."""

    def collect(self, slot: Slot, pending: Pending) -> float:
        super().collect(slot, pending)
        return 0.5


class BrokenSite(Transfer):
    """A collective fails; what the gateway says of it comes a little later, if it does."""

    cause: Callable[[], None] = staticmethod(lambda: None)

    def collect(self, slot: Slot, pending: Pending) -> None:
        del slot, pending
        telling = threading.Timer(0.01, self.cause)
        telling.daemon = True
        telling.start()
        raise RankLostError("a collective inside the site failed: connection closed by peer")


class SecondSite(AloneLink):
    """A first site is there, too: its hash and its values are ones, and it alone has a weight."""

    def reduce(self, request: Reduce) -> None:
        values = self._regions[request.region]
        values[:] = values / 2.0 if request.weight else 1.0
        self._on_reduced(
            Reduced(
                round=request.round,
                bucket=request.bucket,
                weight=2.0,
                times=ReductionTimes(),
                wire_bytes=0,
                squares=0,
            )
        )
