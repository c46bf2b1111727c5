"""TCP as Linux has it over Ethernet: sizes, windows, and the least time-out."""

from __future__ import annotations

import math

MTU_BYTES = 1500
"""Bytes of a full IP packet."""
SEGMENT_BYTES = 1448
"""Payload bytes of a full packet: IP's and TCP's headers take 40 bytes, and time stamps 12."""
PAYLOAD_SHARE = SEGMENT_BYTES / MTU_BYTES
"""Share of a packet link that is TCP payload."""
FIRST_WINDOW_PACKETS = 10
"""Packets of a new connection's first window (RFC 6928)."""
RTO_MIN_S = 0.2
"""Seconds of Linux's shortest time-out, TCP_RTO_MIN, on top of the smoothed round trip."""
RENO_CONSTANT = 1.2
"""Mathis' constant C as RFC 8312 has it; sqrt(3/2) is 1.22, with delayed acknowledgements 0.87."""
CUBIC_CONSTANT = 1.054
"""The factor of CUBIC's mean window: (C (3 + beta) / (4 (1 - beta)))^(1/4) with C = 0.4 and beta =
0.7 (RFC 8312, 5.1)."""


def reno_window(loss: float, constant: float = RENO_CONSTANT) -> float:
    """Return Reno's mean window in packets; infinite without loss."""
    return constant / math.sqrt(loss) if loss > 0 else math.inf


def cubic_window(rtt_s: float, loss: float) -> float:
    """Return CUBIC's mean window in packets; where Reno's is larger, that (RFC 8312, 4.2)."""
    if loss <= 0:
        return math.inf
    cubic: float = CUBIC_CONSTANT * (rtt_s / loss) ** 0.75
    return max(reno_window(loss), cubic)
