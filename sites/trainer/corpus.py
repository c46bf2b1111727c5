"""The text that is learnt: which files, which of them are held out, and what the text is like.

Every site reads its own copy. The order of the files, and so every sample, depends only on their
names and contents; `Corpus.digest` covers both, so that sites can tell whether they have the same.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from isthmus.protos.failure import text_of
from isthmus.topology.spec.errors import ConfigError, Problem
from isthmus.topology.spec.job import Data

Bytes = npt.NDArray[np.uint8]

_SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}
)
_SKIPPED_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize")
"""Written by whoever built or packaged this Python, so different on each machine."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Text as bytes; shared, not to be modified."""

    training: Bytes
    held_out: Bytes
    """The text that is not trained on: whole files; empty when nothing is held out."""
    num_files: int
    unigram_entropy: float
    """Entropy of the training text, in nats a byte: the loss of a model that only counts bytes."""
    digest: bytes
    """sha256 over the names and contents of all files, in order."""


def load_corpus(data: Data, folder: Path, context: int) -> Corpus:
    """Read the text.

    Args:
        data: Which files, and how many of them are held out.
        folder: What relative globs are relative to: the job file's.
        context: Bytes of a window; either part of the text must hold one, and the byte after it.

    Raises:
        ConfigError: no file matches, one cannot be read, or a part is too short.
    """
    named = _named_files(data, folder)
    texts = _read(named, data.max_bytes)
    held_out = _choose_held_out(texts, data.held_out, context)
    training = _join([text for name, text in texts.items() if name not in held_out])
    if len(training) <= context:
        raise _error(
            "files",
            f"the training text has {len(training)} bytes, fewer than a context of {context} and "
            "the byte after it: name more files, or lower trainer.model.context",
        )
    return Corpus(
        training=training,
        held_out=_join([text for name, text in texts.items() if name in held_out]),
        num_files=len(texts),
        unigram_entropy=unigram_entropy(training),
        digest=_digest(texts, held_out),
    )


def unigram_entropy(text: Bytes) -> float:
    """Return the entropy of the distribution of single bytes, in nats."""
    counts = np.bincount(text, minlength=256)
    shares = counts[counts > 0] / len(text)
    return float(-(shares * np.log(shares)).sum())


def _named_files(data: Data, folder: Path) -> dict[str, Path]:
    """Return the files by the name that orders them, sorted: the same on every machine."""
    paths = _standard_library() if not data.files else _matches(data.files, folder)
    # Names start at the folder that all files have in common, wherever a machine has it.
    common = os.path.commonpath([path.parent for path in paths])
    return dict(sorted((path.relative_to(common).as_posix(), path) for path in paths))


def _matches(patterns: Sequence[str], folder: Path) -> set[Path]:
    found: set[Path] = set()
    for pattern in patterns:
        # pathlib matches relative globs only: an absolute one is walked from its root.
        root = Path(Path(pattern).anchor or folder)
        relative = Path(pattern).relative_to(Path(pattern).anchor)
        try:
            matches = [path for path in root.glob(str(relative)) if path.is_file()]
        except (ValueError, OSError) as error:
            raise _error("files", f"{pattern!r} cannot be matched: {text_of(error)}") from error
        if not matches:
            raise _error("files", f"no file matches {str(root / relative)!r}")
        found.update(Path(os.path.normpath(path.absolute())) for path in matches)
    return found


def _standard_library() -> set[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    found: set[Path] = set()
    for folder, folders, files in os.walk(root):
        # Pruned, not filtered: site-packages may be larger than all the rest.
        folders[:] = [name for name in folders if not _is_skipped(name)]
        found.update(
            Path(folder, name)
            for name in files
            if name.endswith(".py") and not name.startswith(_SKIPPED_FILES)
        )
    if not found:
        raise _error("files", f"there are no sources of Python's own library in {root}: name files")
    return found


def _is_skipped(folder: str) -> bool:
    return folder in _SKIPPED_FOLDERS or folder.startswith("config-")


def _read(named: dict[str, Path], max_bytes: int) -> dict[str, bytes]:
    """Read files in order, up to `max_bytes` together; empty ones are left out."""
    texts: dict[str, bytes] = {}
    left_bytes = max_bytes
    for name, path in named.items():
        try:
            with path.open("rb") as file:
                text = file.read(left_bytes)
        except OSError as error:
            raise _error("files", f"{path} cannot be read: {error.strerror}") from error
        if text:
            texts[name] = text
        left_bytes -= len(text)
        if left_bytes == 0:
            break
    return texts


def _choose_held_out(texts: dict[str, bytes], share: float, context: int) -> set[str]:
    """Return the files to hold out: those whose names hash lowest, until they are enough.

    Enough is `share` of the files, rounded, and a window of text.
    """
    chosen: set[str] = set()
    num_bytes = 0
    if share == 0:
        return chosen
    wanted = max(1, round(share * len(texts)))
    for name in sorted(texts, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if len(chosen) >= wanted and num_bytes > context:
            return chosen
        chosen.add(name)
        num_bytes += len(texts[name])
    raise _error(
        "held_out",
        f"{share:g} of {len(texts)} files leaves no file to learn from, or no window of "
        f"{context} bytes to evaluate: name more files, or set it to 0",
    )


def _digest(texts: dict[str, bytes], held_out: set[str]) -> bytes:
    digest = hashlib.sha256()
    for name, text in texts.items():
        # Lengths and the split are in it, so that no two corpora read as the same.
        digest.update(f"{len(name)} {name} {len(text)} {name in held_out}\n".encode())
        digest.update(text)
    return digest.digest()


def _join(texts: list[bytes]) -> Bytes:
    return np.frombuffer(b"".join(texts), dtype=np.uint8)


def _error(field: str, message: str) -> ConfigError:
    return ConfigError([Problem("job", 0, 0, message, f"trainer.data.{field}")])
