"""What codecs cost in time and save in bytes, as measured: docs/codecs.md has the table and its machine. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from topology.job import Exchange
from topology.wire_load import RATIOS


@dataclass(frozen=True, slots=True)
class CodecCost:
    """One codec on one thread of a gateway."""

    ratio: float
    """Encoded bytes for each byte of float32: of the trainer's gradients, where values matter."""
    encode_bytes_per_s: float
    """Of float32."""
    decode_bytes_per_s: float
    feedback_bytes_per_s: float | None = None
    """Instead of the encoder's: with error feedback, all that it does to send."""


COSTS = {
    "fp32": CodecCost(1.0, 61.77e9, 54.05e9),
    "bf16": CodecCost(RATIOS["bf16"], 9.09e9, 34.51e9, 4.93e9),
    "split": CodecCost(1 / 1.175, 1.67e9, 2.51e9),
    "bf16-split": CodecCost(1 / 2.848, 1.90e9, 3.45e9, 1.11e9),
    "int8": CodecCost(RATIOS["int8"], 7.37e9, 13.99e9, 3.69e9),
    "int8-zstd": CodecCost(1 / 4.257, 2.99e9, 4.23e9, 1.52e9),
    "int4": CodecCost(RATIOS["int4"], 6.40e9, 8.68e9, 2.98e9),
    "int4-zstd": CodecCost(1 / 9.403, 3.78e9, 5.10e9, 1.84e9),
    "fp8": CodecCost(RATIOS["fp8"], 2.62e9, 5.58e9, 1.60e9),
    "fp8-zstd": CodecCost(1 / 4.655, 1.73e9, 2.94e9, 0.95e9),
    "topk": CodecCost(1 / 124.104, 4.92e9, 32.92e9, 2.79e9),
    "topk-zstd": CodecCost(1 / 169.305, 4.26e9, 25.99e9, 2.50e9),
}


def codec_cost(exchange: Exchange, *, takes_time: bool = True) -> CodecCost:
    """Return what a job's codec costs: the encoder's rate is that with its feedback, if it has it.

    Args:
        exchange: of the job.
        takes_time: False: only the bytes count.
    """
    cost = COSTS[exchange.codec]
    if not takes_time:
        return CodecCost(cost.ratio, math.inf, math.inf)
    if exchange.error_feedback and cost.feedback_bytes_per_s is not None:
        return CodecCost(cost.ratio, cost.feedback_bytes_per_s, cost.decode_bytes_per_s)
    return cost
