"""What one exchange puts on the wire: chunks of a size that codec, framing and packets give them. Pure."""

from __future__ import annotations

import math

from topology.job import Job
from topology.tree_times import Load
from topology.world import Topology

FRAME_BYTES = 64 + 5
"""Of a chunk beside its payload: protos/frame.py's header, and gRPC's before each message."""
PACKET_BYTES = 1500
PACKET_FACTOR = PACKET_BYTES / 1448
"""IP and TCP headers with time stamps, in full packets."""
FIRST_WINDOW_PACKETS = 10
"""RFC 6928; Linux starts again from it once a connection was idle for longer than its time-out."""
_SCALE_BYTES = 2 / 128
"""Of an element, where a block has a scale: sites/codecs/blocks.py."""
RATIOS = {
    "fp32": 1.0,
    "bf16": 0.5,
    "int8": (1 + _SCALE_BYTES) / 4,
    "fp8": (1 + _SCALE_BYTES) / 4,
    "int4": (0.5 + _SCALE_BYTES) / 4,
}
"""Encoded bytes for each byte of float32, where the values do not matter."""


def wire_load(job: Job, topology: Topology, raw_bytes: int, ratio: float | None = None) -> Load:
    """Return the load of one exchange.

    Args:
        job: gives codec, chunk size, channels.
        topology: its `emulator` says whether there are packets and slow start (`auto` counts as netns,
            and so does a WAN that is not emulated).
        raw_bytes: float32 bytes of the whole gradient, 1 at least.
        ratio: encoded bytes for each of them; needed for codecs that compress.

    Raises:
        ValueError: no ratio for a codec that compresses.
    """
    num_chunks = math.ceil(raw_bytes / job.exchange.chunk_bytes)
    chunk_bytes = raw_bytes * _ratio(job, ratio) / num_chunks + FRAME_BYTES
    num_abreast = min(job.exchange.channels_per_link, num_chunks)
    first_window_bytes = None
    if not (topology.emulate and topology.emulator == "relay"):
        chunk_bytes *= PACKET_FACTOR
        first_window_bytes = num_abreast * FIRST_WINDOW_PACKETS * PACKET_BYTES
    return Load(num_chunks, num_abreast, chunk_bytes, first_window_bytes)


def _ratio(job: Job, ratio: float | None) -> float:
    codec = job.exchange.codec
    known = RATIOS.get(codec) if ratio is None else ratio
    if known is None:
        raise ValueError(f"codec {codec} compresses by what gradients hold: measure its ratio")
    return known
