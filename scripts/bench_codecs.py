"""Measure every codec on arrays like gradients: ratio, and speed in GB/s of float32.

Usage: python scripts/bench_codecs.py [--chunk-mib 1] [--seconds 0.5]
"""

import argparse
import functools
import time
from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.table import Table

from sites.codecs.codec import Floats
from sites.codecs.registry import BY_NAME


def gradient_like(numel: int) -> Floats:
    """Return normal values whose scale varies as it does between layers."""
    generator = np.random.default_rng(7)
    scales = np.repeat(np.exp(generator.normal(-8.0, 1.0, -(-numel // 4096))), 4096)[:numel]
    values: Floats = (generator.standard_normal(numel) * scales).astype(np.float32)
    return values


def best_s(work: Callable[[], object], seconds: float) -> float:
    """Return the shortest of as many calls as fit into `seconds`."""
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--chunk-mib", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each figure")
    arguments = parser.parse_args()
    values = gradient_like(int(arguments.chunk_mib * (1 << 18)))
    out = np.empty_like(values)
    table = Table("codec", "ratio", "encode GB/s", "decode GB/s", "relative error")
    for name, codec in BY_NAME.items():
        payload = codec.encode(values)
        error = np.linalg.norm(codec.decode(payload, len(values)) - values)
        encode_s = best_s(functools.partial(codec.encode, values), arguments.seconds)
        decode = functools.partial(codec.decode, payload, len(values), out)
        decode_s = best_s(decode, arguments.seconds)
        table.add_row(
            name,
            f"{values.nbytes / len(payload):.2f}",
            f"{values.nbytes / encode_s / 1e9:.2f}",
            f"{values.nbytes / decode_s / 1e9:.2f}",
            f"{error / np.linalg.norm(values):.5f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
