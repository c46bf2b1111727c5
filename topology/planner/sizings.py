"""Which chunks and buckets come into question: what a planner chooses from."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

from topology.codec_costs import usual_ratio
from topology.job import Job, LinkCodec
from topology.model.buckets import gradient_bytes, releases
from topology.model.tree_times import seconds_per_byte
from topology.model.wire_load import chunk_bytes_of, tree_ratios
from topology.planner.choice import Sizing
from topology.planner.codings import Coding
from topology.trees.trees import ReductionPlan
from topology.world import Topology

CHUNKS = tuple(size << 10 for size in (1024, 256, 4096, 512, 2048, 128, 64))
BUCKETS = (4 << 20, 1 << 20, 16 << 20, 64 << 20)
"""Sizes that are tried beside the job's own."""


class Sizes:
    """The sizes for some sites, and what they come to. Keeps what it has found."""

    def __init__(
        self,
        job: Job,
        topology: Topology,
        leaving: Callable[[int], int] | None = None,
        only: tuple[Sizing, ...] = (),
    ) -> None:
        """Look at these sites only.

        Args:
            job: Gives its own sizes.
            topology: Of the sites that take part.
            leaving: Returns what leaves together, of a bucket's bytes; None: each size differs.
            only: What there is to choose from; empty: all.
        """
        self._job, self._topology, self._leaving = job, topology, leaving
        self.all = only or sizings(job)
        """The job's own first."""
        self._cut_bytes: dict[tuple[str, tuple[LinkCodec, ...], int], int] = {}
        """Of chunks, by codecs and the size that is asked for."""

    def different(self, coding: Coding, sizes: Sequence[Sizing]) -> list[Sizing]:
        """Return the first of sizes that are alike: links may make chunks smaller than is asked."""
        found: dict[tuple[int, int], Sizing] = {}
        for sizing in sizes:
            bucket = sizing.bucket_bytes
            leaves = bucket if self._leaving is None else self._leaving(bucket)
            found.setdefault((self._cut(coding, sizing.chunk_bytes), leaves), sizing)
        return [*found.values()]

    def _cut(self, coding: Coding, chunk_bytes: int) -> int:
        key = (coding.codec, coding.links, chunk_bytes)
        if key not in self._cut_bytes:
            exchange = dataclasses.replace(coding.of(self._job.exchange), chunk_bytes=chunk_bytes)
            job = dataclasses.replace(self._job, exchange=exchange)
            self._cut_bytes[key] = chunk_bytes_of(job, self._topology)
        return self._cut_bytes[key]


def sizings(job: Job) -> tuple[Sizing, ...]:
    """Return chunks and buckets that are tried, the job's own first."""
    own = Sizing(chunk_bytes=job.exchange.chunk_bytes, bucket_bytes=job.exchange.bucket_bytes)
    # With `serial` everything leaves at once, whatever fills a bucket.
    buckets = () if job.exchange.schedule == "serial" else BUCKETS
    largest = max(gradient_bytes(job), own.bucket_bytes, min(BUCKETS))
    pairs = itertools.product(
        dict.fromkeys((own.bucket_bytes, *buckets)), dict.fromkeys((own.chunk_bytes, *CHUNKS))
    )
    found = [
        Sizing(chunk_bytes=chunk_bytes, bucket_bytes=bucket_bytes)
        for bucket_bytes, chunk_bytes in pairs
        if chunk_bytes <= min(bucket_bytes, job.exchange.window_bytes or bucket_bytes)
        and bucket_bytes < 4 * largest
    ]
    return tuple(dict.fromkeys((own, *found)))


def leaving_alike(job: Job) -> dict[int, int]:
    """Return of each bucket size the first of those with which the same leaves together."""
    first: dict[object, int] = {}
    found = {}
    for bucket_bytes in dict.fromkeys(each.bucket_bytes for each in sizings(job)):
        exchange = dataclasses.replace(job.exchange, bucket_bytes=bucket_bytes)
        leaving = releases(dataclasses.replace(job, exchange=exchange))
        found[bucket_bytes] = first.setdefault(leaving, bucket_bytes)
    return found


def crossing_bound_s(job: Job, topology: Topology, plan: ReductionPlan) -> float:
    """Return how long a step's bytes keep some link busy at least, whatever they are cut into."""
    ratios = tree_ratios(job, topology, plan, usual_ratio(job.exchange.codec))
    return gradient_bytes(job) * max(seconds_per_byte(plan, topology, ratios).values())
