"""The arguments that all programs have which an all-reduce is compared with.

Only the standard library, for plain TCP is measured without PyTorch.
"""

from __future__ import annotations

import argparse


def baseline_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser of what every baseline is told; the caller adds its own."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size-bytes", type=int, required=True)
    parser.add_argument("--count", type=int, required=True, help="repetitions")
    parser.add_argument("--idle", type=float, default=0.0, help="s, before each repetition")
    parser.add_argument("--timeout", type=float, required=True, help="s, for every wait")
    return parser
