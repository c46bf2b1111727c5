"""The committed corpus: small inputs of each target, valid ones and those that once crashed it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tests.fuzz.target import Target

FOLDER = Path(__file__).parent / "corpus"


def folder_of(target: Target) -> Path:
    """Return where a target's inputs lie."""
    return FOLDER / target.name


def read_corpus(target: Target) -> dict[str, bytes]:
    """Return a target's inputs by file name, in their order."""
    return {path.name: path.read_bytes() for path in sorted(folder_of(target).iterdir())}


def write_samples(target: Target) -> int:
    """Write what the real encoders make now in place of the samples; return how many there are."""
    folder = folder_of(target)
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("sample-*"):
        path.unlink()
    samples = target.samples()
    for index, data in enumerate(samples):
        (folder / f"sample-{index}").write_bytes(data)
    return len(samples)


def write_crasher(target: Target, data: bytes) -> Path:
    """Keep an input that crashed a target; return its file."""
    folder = folder_of(target)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"crash-{hashlib.sha256(data).hexdigest()[:12]}"
    path.write_bytes(data)
    return path
