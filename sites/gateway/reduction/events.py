"""What happens to a chunk, and what its machine then wants done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from protos.frame import Frame
from sites.codecs.codec import Codec, Encoded
from sites.codecs.parts import Floats
from sites.local.chunk_grid import Grid

WEIGHT_MAX = float(1 << 53)
"""Tokens behind one bucket: up to here every whole number is a float64."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """What all sites must agree on before a byte of a bucket is summed."""

    generation: int
    round: int
    index: int
    layout: int
    codecs: tuple[Codec, ...]
    """Of each tree of the plan; of a gather, one. A tree has one on all of its edges, for what all
    apply is decoded from the same bytes."""
    grid: Grid
    cpu_s: Callable[[], float] = field(compare=False)
    """CPU time of the calling thread: what encoding and summing cost is measured with it."""


@dataclass(frozen=True, slots=True)
class Own:
    """This site's contribution to a chunk is there.

    `values` (float32, shape (n,)) is lent to the machine, which works in it, until `Finish`; then
    it holds the result.
    """

    values: Floats
    weight: float
    """Tokens of the whole site behind the bucket; 0 is legal, the values are then zeros."""
    encoded: Callable[[], Encoded] | None = None
    """Makes this site's part of what its rank has encoded, which lies in `values`. None: `values`
    are the part."""


@dataclass(frozen=True, slots=True)
class Received:
    """A frame came that `BucketReduction.check` has let through."""

    sender: int
    frame: Frame


@dataclass(frozen=True, slots=True)
class Send:
    """Send a frame to the gateway of `site` that owns its chunk there.

    At once: its payload may be a view of the chunk's `values`, which the machine goes on to change.
    """

    site: int
    frame: Frame


@dataclass(frozen=True, slots=True)
class Finish:
    """The chunk's `values` now hold the result."""

    weight: float
    """Tokens of all sites."""


Event = Own | Received
Action = Send | Finish
