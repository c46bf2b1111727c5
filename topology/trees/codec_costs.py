"""The codecs' measured speeds, sizes and errors on gradients. Pure.

From the table of docs/measurements/codecs.md (scripts/bench/codecs.py: one thread of an AMD EPYC
Zen 5, gradients of the model that ships). Sizes that depend on the gradients' values are from that
table; others are in RATIOS, which is exact. The speeds of topk2 are those of topk, times what was
measured of both in one run.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCK = 128
"""Elements per scale in block codecs: sites/codecs/quantising_codecs.py."""
_SCALE_BYTES = 2 / BLOCK
"""Bytes that the block's scale adds per element."""
LOSSLESS = frozenset({"fp32", "split"})
"""Codecs whose decoding gives back every bit."""
RATIOS = {
    "fp32": 1.0,
    "bf16": 0.5,
    "int8": (1 + _SCALE_BYTES) / 4,
    "fp8": (1 + _SCALE_BYTES) / 4,
    "int4": (0.5 + _SCALE_BYTES) / 4,
}
"""Encoded bytes per byte of float32, for codecs whose size does not depend on values."""


@dataclass(frozen=True, slots=True)
class CodecCost:
    """The speed of one codec, in bytes of float32 per second of one core, and its size."""

    encode_bytes_per_s: float
    """Encoding speed of a sending gateway, with error feedback if the codec is lossy."""
    decode_bytes_per_s: float
    typical_ratio: float | None = None
    """Encoded bytes per byte of float32, as measured; None: exactly that in RATIOS."""


COSTS = {
    "fp32": CodecCost(1290e9, 54.0e9),
    "bf16": CodecCost(32.5e9, 60.7e9),
    "split": CodecCost(1.76e9, 2.48e9, 1 / 1.175),
    "bf16-split": CodecCost(2.24e9, 3.80e9, 1 / 2.848),
    "int8": CodecCost(20.3e9, 47.2e9),
    "int8-zstd": CodecCost(3.87e9, 5.62e9, 1 / 4.257),
    "int4": CodecCost(16.8e9, 49.5e9),
    "int4-zstd": CodecCost(5.78e9, 10.3e9, 1 / 9.403),
    "fp8": CodecCost(12.2e9, 44.0e9),
    "fp8-zstd": CodecCost(3.48e9, 5.55e9, 1 / 4.655),
    "topk": CodecCost(3.11e9, 20.6e9, 1 / 124.1),
    "topk-zstd": CodecCost(2.85e9, 17.5e9, 1 / 169.3),
    "topk2": CodecCost(1.93e9, 11.6e9, 1 / 178.0),
}
"""The cost of each codec, by its name; one for each of isthmus.topology.spec.job.CODECS."""

RELATIVE_ERRORS = {
    "fp32": 0.0,
    "bf16": 0.00167,
    "split": 0.0,
    "bf16-split": 0.00167,
    "int8": 0.00681,
    "int8-zstd": 0.00681,
    "int4": 0.12175,
    "int4-zstd": 0.12175,
    "fp8": 0.02581,
    "fp8-zstd": 0.02581,
    "topk": 0.67573,
    "topk-zstd": 0.67573,
    "topk2": 0.82987,
}
"""|decoded - original| / |original| of the same gradients, without feedback; 0: lossless."""

GATEWAY_BYTES_PER_S = 570e6
"""Encoded bytes per second that a gateway can send while receiving as much; see
docs/measurements/loopback.md."""


def usual_ratio(codec: str) -> float:
    """Return the encoded bytes per byte of float32, exact or measured."""
    exact = RATIOS.get(codec)
    if exact is not None:
        return exact
    typical = COSTS[codec].typical_ratio
    assert typical is not None, "what has no exact ratio has a measured one"
    return typical
