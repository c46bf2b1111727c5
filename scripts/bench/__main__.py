"""Measure one thing: `python -m scripts.bench WHAT [options]`; without WHAT, list what there is.

WHAT is a module of this folder with two functions: `add_options(parser)`, and `run(options)`, which
prints figures and returns an exit status, or None.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
from pathlib import Path

WHATS = (
    *("checkpoint_stall", "codecs", "convergence", "floor", "gateways"),
    *("gpu", "planner", "predictions", "regimes", "ladder", "unlike", "window"),
)


def main(arguments: list[str]) -> int:
    """Run one benchmark; return its exit status."""
    if not arguments or arguments[0] not in WHATS:
        print(__doc__)
        for what in WHATS:  # without importing it: torch takes a second
            tree = ast.parse(Path(__file__).with_name(f"{what}.py").read_text())
            print(f"{what:16} {(ast.get_docstring(tree) or '').partition(chr(10))[0]}")
        return 0 if arguments in ([], ["-h"], ["--help"]) else 2
    module = importlib.import_module(f"scripts.bench.{arguments[0]}")
    parser = argparse.ArgumentParser(
        prog=f"python -m scripts.bench {arguments[0]}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_options(parser)
    return module.run(parser.parse_args(arguments[1:])) or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
