"""What one exchange puts on the wire: chunks of a size that links, codec, framing and packets give them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

from topology.channels import FLOWS_MAX, SEND_BUFFER_BYTES, first_channels
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
_CHUNKS_ON_THE_WAY = 4
_ROUND_TRIP_MIN_S = 0.01
_FRAME_MIN_S = 0.01
"""On the slowest link: what comes more often costs more of a processor than it is worth."""
_CHUNK_BYTES_MIN = 64 << 10
_CHUNK_BYTES_ENOUGH = 256 << 10
"""From here on, a message's cost counts no more beside that of its bytes."""


def chunk_bytes_of(job: Job, topology: Topology) -> int:
    """Return the size of a job's chunks, in float32 bytes: the same at all sites and in predictions."""
    links = [(link.bytes_per_s, link.rtt_s) for link in topology.links]
    return chunk_bytes_for(job.exchange.chunk_bytes, job.exchange.codec, links)


def chunk_bytes_for(wanted_bytes: int, codec: str, links: Iterable[tuple[float, float]]) -> int:
    """Return a chunk's size, in float32 bytes: as the job says at most.

    Frames are acknowledged as a whole, so of what a link holds, a few must be on the way at once; with
    larger ones it runs dry, or a router's queue runs over. And a sum is passed on once the whole
    chunk is there. Very small ones cost more of a processor than they are worth.

    Args:
        wanted_bytes: as the job says.
        codec: its name; a chunk that it makes small may be larger.
        links: bytes a second and round trip, of all links of the topology.
    """
    ratio = RATIOS.get(codec, 1.0)
    links = tuple(links)
    held = (rate * max(rtt_s, _ROUND_TRIP_MIN_S) / ratio for rate, rtt_s in links)
    best = int(min(held, default=_CHUNKS_ON_THE_WAY * wanted_bytes) / _CHUNKS_ON_THE_WAY)
    if best >= wanted_bytes:
        return wanted_bytes
    slowest = min(rate for rate, _ in links)
    least = 1 << math.ceil(math.log2(max(slowest * _FRAME_MIN_S / ratio, 1.0)))
    least = min(max(least, _CHUNK_BYTES_MIN), _CHUNK_BYTES_ENOUGH)
    return min(wanted_bytes, max(1 << max(best.bit_length() - 1, 0), least))


def channels_of(job: Job, topology: Topology) -> int:
    """Return how many connections each link of a job begins with; where they differ, the fewest."""
    # Emulated sites may buffer as much as they like: orchestrator/emulator/namespaces.py.
    is_netns = topology.emulate and has_packets(topology)
    return min(
        (
            first_channels(
                job.exchange.channels_per_link,
                link.max_flows or FLOWS_MAX,
                link.bytes_per_s,
                link.rtt_s,
                None if is_netns else SEND_BUFFER_BYTES,
            )
            for link in topology.links
        ),
        default=1,
    )


def has_packets(topology: Topology) -> bool:
    """Return whether TCP crosses the WAN from end to end; the relay knows only bytes."""
    return not (topology.emulate and topology.emulator == "relay")


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
    num_chunks = math.ceil(raw_bytes / chunk_bytes_of(job, topology))
    chunk_bytes = raw_bytes * _ratio(job, ratio) / num_chunks + FRAME_BYTES
    num_abreast = min(channels_of(job, topology), num_chunks)
    first_window_bytes = None
    if has_packets(topology):
        chunk_bytes *= PACKET_FACTOR
        first_window_bytes = num_abreast * FIRST_WINDOW_PACKETS * PACKET_BYTES
    return Load(num_chunks, num_abreast, chunk_bytes, first_window_bytes)


def _ratio(job: Job, ratio: float | None) -> float:
    codec = job.exchange.codec
    known = RATIOS.get(codec) if ratio is None else ratio
    if known is None:
        raise ValueError(f"codec {codec} compresses by what gradients hold: measure its ratio")
    return known
