#!/usr/bin/env python3
"""Regenerate the protobuf and gRPC modules beside their .proto files.

Usage: python scripts/gen_protos.py [--check]
With --check nothing is written: exit 1 when a committed module is out of date.
"""

import os
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("python", "grpc_python", "mypy", "mypy_grpc")


def generate(into: Path) -> None:
    """Run protoc over every contract.

    The proto path is the repository root, so `import "protos/a/v1/b.proto"`
    becomes `from protos.a.v1 import b_pb2` and needs no rewriting.
    """
    sources = sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "protos").rglob("*.proto"))
    outs = [f"--{kind}_out={'quiet:' if 'mypy' in kind else ''}{into}" for kind in KINDS]
    if protoc.main(["protoc", f"-I{ROOT}", *outs, *sources]) != 0:
        raise SystemExit("protoc failed")


def modules(root: Path) -> dict[Path, bytes]:
    """Return the generated modules under `root`, by path relative to it."""
    found = (p for p in (root / "protos").rglob("*_pb2*") if p.suffix in {".py", ".pyi"})
    return {p.relative_to(root): p.read_bytes() for p in found}


def main(argv: list[str]) -> int:
    """Write the modules, or with --check compare them with what is committed."""
    # protoc looks for protoc-gen-mypy on PATH; it lies beside this interpreter.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    if argv != ["--check"]:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh, committed = modules(Path(scratch)), modules(ROOT)
    stale = sorted(p for p in fresh.keys() | committed.keys() if fresh.get(p) != committed.get(p))
    for path in stale:
        print(f"stale: {path}", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
