"""Measure what a gateway keeps in memory at most: a fast site against one whose ranks come late.

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

from scripts.bench.gateway_pair import DEADLINE_S, Setting, pair
from scripts.bench.timing import numbers

MIB = 1 << 20
BUCKET_BYTES = 16 * MIB
SAMPLE_S = 0.02
STILL_S = 1.5
"""Without growth for so long, nothing more comes."""
GROWTH_BYTES = MIB // 4
CHUNKS_IN_THE_MIDST = 16
"""Each stream's, copied into and out of gRPC both ways; each pool thread's; what is left idle."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what may be asked for."""
    parser.add_argument("--held", type=numbers, default=[32, 128, 512], help="MiB")
    parser.add_argument("--windows", type=numbers, default=[8, 32], help="MiB")
    parser.add_argument("--mib", type=int, default=768, help="of float32 that are posted")


def run(options: argparse.Namespace) -> None:
    """Print a row for each bound and window."""
    print("held  window |  first  second | bound   (MiB)")
    for held_mib, window_mib in itertools.product(options.held, options.windows):
        setting = Setting(
            chunk_bytes=MIB,
            held_bytes=int(held_mib * MIB),
            window_bytes=int(window_mib * MIB),
            num_buckets=options.mib * MIB // BUCKET_BYTES,
            num_bytes=options.mib * MIB,
        )
        first_bytes, second_bytes = most_bytes(setting)
        print(
            f"{held_mib:4.0f} {window_mib:7.0f} | {first_bytes / MIB:6.0f} {second_bytes / MIB:7.0f}"
            f" | {held_mib + 4 * window_mib + CHUNKS_IN_THE_MIDST:5.0f}",
            flush=True,
        )


def most_bytes(setting: Setting) -> list[int]:
    """Return what each gateway had at most, beyond what it had at first."""
    with pair(setting) as (gateways, ranks):
        pids = [gateway.process.pid for gateway in gateways]
        for rank in ranks:
            rank.fill()
        first = [_private_bytes(pid) for pid in pids]
        most = [0, 0]
        ranks[0].post(0)
        still_since_s = time.monotonic()
        deadline_s = still_since_s + DEADLINE_S
        while (now_s := time.monotonic()) - still_since_s < STILL_S:
            if now_s > deadline_s:
                raise SystemExit("a gateway's memory does not stop growing")
            before, most = most, _grown(most, pids, first)
            if any(after > old + GROWTH_BYTES for old, after in zip(before, most, strict=True)):
                still_since_s = now_s
            time.sleep(SAMPLE_S)
        ranks[1].post(0)
        for rank in ranks:
            rank.wait(0)
        if not all((values == 1.0).all() for rank in ranks for values in rank.regions):
            raise SystemExit("the result is wrong")
        return _grown(most, pids, first)


def _grown(most: list[int], pids: list[int], first: list[int]) -> list[int]:
    return [
        max(bytes_, _private_bytes(pid) - first_bytes)
        for bytes_, pid, first_bytes in zip(most, pids, first, strict=True)
    ]


def _private_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])
