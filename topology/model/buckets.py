"""DistributedDataParallel's buckets of the shipped model: gradients that cross together.

Pure.

DDP goes through the parameters in reverse, because backward computes gradients in that order. It
closes a bucket once it holds as many bytes as it may, or more
(torch/csrc/distributed/c10d/reducer.cpp, compute_bucket_assignment_by_size). A bucket leaves when
its last gradient is there.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from isthmus.topology.spec.compute import layers, num_parameters
from isthmus.topology.spec.job import Job, Model
from isthmus.topology.spec.model_shape import workload_described

FLOAT32_BYTES = 4
BUCKETS_MAX = 256
"""Number of buckets from which on predictions take several as one: more would not show."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket: gradients that are reduced together."""

    raw_bytes: int
    """Bytes of the bucket in float32."""
    last_layer: int
    """The layer whose backward pass completes the bucket, in the order of the forward pass
    (isthmus.topology.spec.compute.layers)."""


def buckets_of(model: Model, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Return the buckets in the order in which they leave.

    Args:
        model: its shape.
        bucket_bytes: float32 bytes that close a bucket.
    """
    buckets: list[Bucket] = []
    raw_bytes = 0
    for layer, each in reversed([*enumerate(layers(model))]):
        for numel in reversed(each.numels):
            raw_bytes += FLOAT32_BYTES * numel
            if raw_bytes >= bucket_bytes:
                buckets.append(Bucket(raw_bytes, layer))
                raw_bytes = 0
    if raw_bytes:
        buckets.append(Bucket(raw_bytes, 0))
    return tuple(buckets)


def predicted_buckets(
    model: Model, bucket_bytes: int, most: int = BUCKETS_MAX
) -> tuple[Bucket, ...]:
    """Return the buckets as predictions count them: not many more than `most`."""
    total_bytes = FLOAT32_BYTES * num_parameters(model)
    return buckets_of(model, max(bucket_bytes, total_bytes // most))


@dataclass(frozen=True, slots=True)
class Release:
    """A release: gradients that leave together."""

    num_bytes: int
    left_bytes: int
    """Bytes of these gradients and of all that leave later."""
    share_after: float
    """Share of a micro-batch's compute, forward and backward, that is still to do when they
    leave."""


def gradient_bytes(job: Job) -> int:
    """Return the float32 bytes that all sites sum up each step."""
    if job.workload is not None:
        return FLOAT32_BYTES * workload_described(job.workload).parameters
    return FLOAT32_BYTES * num_parameters(job.trainer.model)


def releases(job: Job) -> tuple[Release, ...]:
    """Return the groups of gradients that leave together in a step, in order."""
    num_bytes = gradient_bytes(job)
    if job.exchange.schedule == "serial":
        return (Release(num_bytes, num_bytes, 0.0),)
    return _releases(job.trainer.model, job.exchange.bucket_bytes)


@functools.lru_cache(maxsize=256)
def _releases(model: Model, bucket_bytes: int) -> tuple[Release, ...]:
    flops = [layer.flops_per_token for layer in layers(model)]
    buckets = predicted_buckets(model, bucket_bytes)
    left_bytes = sum(each.raw_bytes for each in buckets)
    releases = []
    for bucket in buckets:
        # Backward is two thirds of the compute, and ends at the first layer.
        after = 2 / 3 * math.fsum(flops[: bucket.last_layer]) / math.fsum(flops)
        releases.append(Release(bucket.raw_bytes, left_bytes, after))
        left_bytes -= bucket.raw_bytes
    return tuple(releases)
