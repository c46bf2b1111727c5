"""Measure what a gateway keeps in memory at most: a fast site against one whose ranks come late.

Usage: python scripts/bench_memory.py [--held MIB,..] [--windows MIB,..] [--mib 768]

Two gateways on loopback. Ranks of the first post everything at once; the second's post nothing
until both gateways' memory has stopped growing. Then they do, and the round has to end with the
right numbers. Printed: the private memory (RssAnon, so without the regions that ranks share) that
each gateway had at most, beyond what it had when it was connected; and the bound
(docs/invariants.md, "Memory of a gateway"): what is held, four windows, and 16 chunks for what
streams and threads are in the midst of.
"""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path

from scripts.gateway_pair import DEADLINE_S, GatewayChild, Setting, pair

MIB = 1 << 20
BUCKET_BYTES = 16 * MIB
SAMPLE_S = 0.02
STILL_S = 1.5
"""Without growth for so long, nothing more comes."""
GROWTH_BYTES = MIB // 4
CHANNELS = 2
_CHUNKS_IN_THE_MIDST = 16
"""Each stream's, copied into and out of gRPC both ways; each pool thread's; what is left idle."""


class Watch:
    """The most private memory of a gateway, beyond what it had at first."""

    def __init__(self, child: GatewayChild) -> None:
        self._pid = child.process.pid
        self._first_bytes = self._now_bytes()
        self.most_bytes = 0

    def look(self) -> bool:
        """Look; return whether it has grown."""
        before_bytes = self.most_bytes
        self.most_bytes = max(before_bytes, self._now_bytes() - self._first_bytes)
        return self.most_bytes > before_bytes + GROWTH_BYTES

    def _now_bytes(self) -> int:
        status = Path(f"/proc/{self._pid}/status").read_text()
        (line,) = (each for each in status.splitlines() if each.startswith("RssAnon"))
        return 1024 * int(line.split()[1])


def setting_of(held_bytes: int, window_bytes: int, num_bytes: int) -> Setting:
    """Return a link that holds nothing up: only the bounds do."""
    return Setting(
        bits_per_s=100e9,
        rtt_s=1e-4,
        loss=0.0,
        congestion="",
        codec="fp32",
        channels=CHANNELS,
        max_flows=CHANNELS,
        chunk_bytes=MIB,
        window_bytes=window_bytes,
        keeps_warm=False,
        num_buckets=num_bytes // BUCKET_BYTES,
        num_bytes=num_bytes,
        held_bytes=held_bytes,
    )


def measure(setting: Setting) -> tuple[int, int]:
    """Return how many bytes the first and the second took at most."""
    with pair(setting, [None, None]) as (children, ranks):
        watches = [Watch(child) for child in children]
        ranks[0].post(0)
        deadline_s = time.monotonic() + DEADLINE_S
        still_since_s = time.monotonic()
        while (now_s := time.monotonic()) - still_since_s < STILL_S:
            if now_s > deadline_s:
                raise SystemExit("a gateway's memory does not stop growing")
            grown = [watch.look() for watch in watches]  # all of them
            if any(grown):
                still_since_s = now_s
            time.sleep(SAMPLE_S)
        ranks[1].post(0)
        for rank in ranks:
            rank.wait(0)
        for watch in watches:
            watch.look()
        if not all((values == 1.0).all() for rank in ranks for values in rank.regions):
            raise SystemExit("the result is wrong")
    return watches[0].most_bytes, watches[1].most_bytes


def _sizes(text: str) -> list[int]:
    return [int(float(each) * MIB) for each in text.split(",")]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--held", type=_sizes, default=_sizes("32,128,512"), help="MiB")
    parser.add_argument("--windows", type=_sizes, default=_sizes("8,32"), help="MiB")
    parser.add_argument("--mib", type=int, default=768, help="of float32 that are posted")
    chosen = parser.parse_args()
    print("held  window |  first  second | bound   (MiB)")
    for held_bytes, window_bytes in itertools.product(chosen.held, chosen.windows):
        setting = setting_of(held_bytes, window_bytes, chosen.mib * MIB)
        first_bytes, second_bytes = measure(setting)
        bound_bytes = held_bytes + 4 * window_bytes + _CHUNKS_IN_THE_MIDST * setting.chunk_bytes
        figures = (
            f"{held_bytes / MIB:4.0f} {window_bytes / MIB:7.0f}",
            f"{first_bytes / MIB:6.0f} {second_bytes / MIB:7.0f}",
            f"{bound_bytes / MIB:5.0f}",
        )
        print(" | ".join(figures), flush=True)


if __name__ == "__main__":
    main()
