"""Packs a job's folder to be carried to sites: what git and `.isthmusignore` do not leave out."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pathspec import GitIgnoreSpec

from isthmus.protos.limits import CARRIED_BYTES, CARRIED_FILES
from isthmus.topology.spec.carried_folder import (
    MODES,
    CarriedFile,
    CarriedFolder,
    CarriedLink,
    leads_out,
)
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.units import format_size

RULES = (".gitignore", ".isthmusignore")
"""Files of rules, in the order in which a later one wins."""
NEVER = frozenset({".git", "__pycache__"})
_KEY_BYTES = 64 << 10
_LARGEST = 3
CURE = "list what no site needs in .isthmusignore, and name large files under `data`"


@dataclass(frozen=True, slots=True)
class Packed:
    """A folder, and where its contents are."""

    root: Path
    folder: CarriedFolder
    num_keys: int
    """Private keys that were left out."""

    @property
    def paths(self) -> dict[str, Path]:
        """A file with each digest."""
        return {file.digest: self.root / file.path for file in self.folder.files}


def pack(
    root: Path,
    left_out: Sequence[Path] = (),
    *,
    limit_bytes: int = CARRIED_BYTES,
    limit_files: int = CARRIED_FILES,
) -> Packed:
    """Return what is carried of a folder, with digests.

    Private keys in PEM never are.

    Args:
        root: The folder.
        left_out: Folders inside, with all that is in them: outputs of runs.
        limit_bytes: Limit on all files together.
        limit_files: Limit on their number.

    Raises:
        ConfigError: it is too large, or a link in it leads out of it; with the cure.
        OSError: it cannot be read.
    """
    found: dict[str, os.stat_result] = {}
    links, empty_folders = [], []
    for path, status in _walk(root, "", _rules_above(root), frozenset(left_out)):
        if stat.S_ISLNK(status.st_mode):
            links.append(_link(root, path))
        elif stat.S_ISDIR(status.st_mode):
            empty_folders.append(path)
        else:
            found[path] = status
        if len(found) > limit_files:
            raise ConfigError(f"{root} has more than {limit_files:,} files to carry: {CURE}")
    num_bytes = sum(status.st_size for status in found.values())
    if num_bytes > limit_bytes:
        largest = sorted(found, key=lambda path: -found[path].st_size)[:_LARGEST]
        named = ", ".join(f"{path} ({format_size(found[path].st_size)})" for path in largest)
        raise ConfigError(
            f"{root} has {format_size(num_bytes)} to carry, and the limit is {format_size(limit_bytes)}; the "
            f"largest files are {named}: {CURE}"
        )
    files, num_keys = [], 0
    for path, status in sorted(found.items()):
        if status.st_size <= _KEY_BYTES and _is_private_key(root / path):
            num_keys += 1
            continue
        files.append(_file(root, path))
    folder = CarriedFolder(
        files=tuple(files),
        links=tuple(sorted(links, key=lambda link: link.path)),
        empty_folders=tuple(sorted(empty_folders)),
    )
    return Packed(root, folder, num_keys)


def _file(root: Path, path: str) -> CarriedFile:
    with (root / path).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        status = os.fstat(file.fileno())
    mode = stat.S_IMODE(status.st_mode) & MODES
    return CarriedFile(path=path, mode=mode, num_bytes=status.st_size, digest=digest)


def _is_private_key(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.readline(100)
    return head.startswith(b"-----BEGIN") and b"PRIVATE KEY" in head


def _link(root: Path, path: str) -> CarriedLink:
    target = os.readlink(root / path)  # noqa: PTH115 - its text, as it was written
    place = os.path.realpath(root / path)
    is_inside = Path(place).is_relative_to(os.path.realpath(root))
    if leads_out(path, target) or not is_inside:
        raise ConfigError(
            f"{root / path}: the link leads out of the folder that is carried, to {target}: list it "
            "in .isthmusignore, and name what lies there under `data`, or replace it by a copy"
        )
    return CarriedLink(path=path, target=target)


Rules = tuple[tuple[str, GitIgnoreSpec], ...]
"""The rules of folders, the outermost first, each with the folder's path."""


def _walk(
    root: Path, inside: str, rules: Rules, left_out: frozenset[Path]
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield paths relative to `root` below `inside`: files, links, and folders without either."""
    folder = root / inside
    rules = (*rules, *_rules_in(folder))
    is_empty = True
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda each: each.name):
            path = f"{inside}/{entry.name}" if inside else entry.name
            is_folder = entry.is_dir(follow_symlinks=False)
            if entry.name in NEVER or root / path in left_out:
                continue
            if _is_ignored(root / path, rules, is_folder=is_folder):
                continue
            is_empty = False
            if is_folder and (root / path / "pyvenv.cfg").exists():
                continue  # a virtual environment is of its machine
            if is_folder:
                yield from _walk(root, path, rules, left_out)
            elif entry.is_symlink() or entry.is_file():  # sockets and pipes are nobody's code
                yield path, entry.stat(follow_symlinks=False)
    if is_empty and inside:
        yield inside, folder.stat()


def _rules_in(folder: Path) -> Rules:
    lines: list[str] = []
    for name in RULES:
        try:
            lines += (folder / name).read_text(encoding="utf-8", errors="replace").splitlines()
        except (FileNotFoundError, IsADirectoryError):
            continue
    return ((str(folder), GitIgnoreSpec.from_lines(lines)),) if lines else ()


def _rules_above(root: Path) -> Rules:
    """Return the rules of the repository around a folder, outside of it."""
    repository = next((each for each in root.parents if (each / ".git").exists()), None)
    if repository is None or (root / ".git").exists():
        return ()
    between = [each for each in root.parents if each.is_relative_to(repository)]
    return tuple(rules for each in reversed(between) for rules in _rules_in(each))


def _is_ignored(path: Path, rules: Rules, *, is_folder: bool) -> bool:
    """Whether the innermost rule about a path leaves it out."""
    for folder, spec in reversed(rules):
        relative = os.path.relpath(path, folder) + ("/" if is_folder else "")
        is_ignored = spec.check_file(relative).include
        if is_ignored is not None:
            return is_ignored
    return False
