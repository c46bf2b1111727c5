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

SOURCES = Path(__file__).resolve().parent.parent / ".src"
"""The folder of the import name: isthmus/protos there is a link to protos/."""
KINDS = ("python", "grpc_python", "mypy", "mypy_grpc")


def generate(into: Path) -> None:
    """Run protoc over every contract.

    The proto path holds `isthmus/protos`, so `import "isthmus/protos/a/v1/b.proto"` becomes
    `from isthmus.protos.a.v1 import b_pb2` and needs no rewriting.
    """
    folder = SOURCES / "isthmus" / "protos"
    sources = sorted(p.relative_to(SOURCES).as_posix() for p in folder.rglob("*.proto"))
    outs = [f"--{kind}_out={'quiet:' if 'mypy' in kind else ''}{into}" for kind in KINDS]
    if protoc.main(["protoc", f"-I{SOURCES}", *outs, *sources]) != 0:
        raise SystemExit("protoc failed")


def modules(root: Path) -> dict[Path, bytes]:
    """Return the generated modules under `root`, by path relative to it."""
    found = (
        p for p in (root / "isthmus" / "protos").rglob("*_pb2*") if p.suffix in {".py", ".pyi"}
    )
    return {p.relative_to(root): p.read_bytes() for p in found}


def main(argv: list[str]) -> int:
    """Write the modules, or with --check compare them with what is committed."""
    # protoc looks for protoc-gen-mypy on PATH; it lies beside this interpreter.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    if argv != ["--check"]:
        generate(SOURCES)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh, committed = modules(Path(scratch)), modules(SOURCES)
    stale = sorted(p for p in fresh.keys() | committed.keys() if fresh.get(p) != committed.get(p))
    for path in stale:
        print(f"stale: {path}", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
