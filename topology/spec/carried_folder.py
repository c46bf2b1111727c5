"""A folder that is carried to sites: names, modes and digests of its files, but no content.

Its bytes are what sites are given, and their sha256 names the folder and all that is in it.
"""

from __future__ import annotations

import difflib
import hashlib
import posixpath
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.json_fields import json_bytes, json_of, read_json, to_json

MODES = 0o777
"""The bits of a mode that are kept."""
_SHOWN_FILES, _SHOWN_LINES, _LINE_CHARS = 8, 6, 120


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedFile:
    """One regular file."""

    path: str
    """Relative to the folder, with slashes."""
    mode: int
    num_bytes: int
    digest: str
    """sha256 of its content, in hex."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedLink:
    """A symbolic link to something inside the folder."""

    path: str
    target: str
    """Relative to the link's own folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedFolder:
    """All that is carried of a folder, in the order of paths."""

    files: tuple[CarriedFile, ...] = ()
    links: tuple[CarriedLink, ...] = ()
    empty_folders: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse paths that lead out of the folder, or through a file or link.

        Raises:
            ConfigError: a path does.
        """
        leaves = [file.path for file in self.files] + [link.path for link in self.links]
        paths = [*leaves, *self.empty_folders]
        taken = set(leaves)
        for path in paths:
            parts = path.split("/")
            above = ("/".join(parts[:end]) for end in range(1, len(parts)))
            if "\0" in path or not {"", ".", ".."}.isdisjoint(parts) or taken.intersection(above):
                raise ConfigError(f"the carried folder has a path that leads out of it: {path!r}")
        if len(set(paths)) != len(paths):
            raise ConfigError("the carried folder has a path twice")
        for link in self.links:
            if leads_out(link.path, link.target):
                raise ConfigError(f"the carried link {link.path!r} leads out of its folder")
        for file in self.files:
            if file.num_bytes < 0 or not 0 <= file.mode <= MODES or not is_digest(file.digest):
                raise ConfigError(f"the carried file {file.path!r} has no valid mode or digest")

    @property
    def num_bytes(self) -> int:
        """The size of all files."""
        return sum(file.num_bytes for file in self.files)

    def to_bytes(self) -> bytes:
        """Serialise; equal folders give equal bytes."""
        return json_bytes(to_json(self))

    @classmethod
    def from_bytes(cls, written: bytes) -> CarriedFolder:
        """Read what `to_bytes` wrote.

        Raises:
            ConfigError: it did not, or a path leads out of the folder.
        """
        return read_json(cls, json_of(written, "the carried folder"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """The folder that a run carries to its sites."""

    digest: str
    """sha256 of the folder's `to_bytes`, in hex."""
    source: str
    """The folder's path where the job was launched."""


def digest_of(content: bytes) -> str:
    """Return the name of a content: its sha256, in hex."""
    return hashlib.sha256(content).hexdigest()


def is_digest(text: str) -> bool:
    """Whether `text` is a sha256 in lower-case hex."""
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


def leads_out(path: str, target: str) -> bool:
    """Whether a link at `path` leads out of the folder that paths are relative to."""
    place = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    return posixpath.isabs(target) or "\0" in target or place == ".." or place.startswith("../")


def changes(
    before: CarriedFolder, after: CarriedFolder, read: Callable[[str], str | None]
) -> list[str]:
    """Return what differs between two folders, in a few lines for people.

    Args:
        before: The older one.
        after: The newer one.
        read: Returns the text with a digest; None: it is not kept, or is no text.
    """
    old = {file.path: (file.digest, file.mode) for file in before.files}
    new = {file.path: (file.digest, file.mode) for file in after.files}
    old |= {link.path: (link.target, -1) for link in before.links}
    new |= {link.path: (link.target, -1) for link in after.links}
    paths = sorted(path for path in old.keys() | new.keys() if old.get(path) != new.get(path))
    lines: list[str] = []
    for path in paths[:_SHOWN_FILES]:
        if path not in old or path not in new:
            lines.append(f"{path}: {'removed' if path in old else 'new'}")
            continue
        if old[path][0] == new[path][0]:
            lines.append(f"{path}: mode {old[path][1]:o} is now {new[path][1]:o}")
            continue
        lines.append(f"{path}: changed")
        texts = read(old[path][0]), read(new[path][0])
        if texts[0] is not None and texts[1] is not None:
            lines += _changed_lines(texts[0].splitlines(), texts[1].splitlines())
    if len(paths) > _SHOWN_FILES:
        lines.append(f"and {len(paths) - _SHOWN_FILES} more files")
    return lines


def _changed_lines(before: Iterable[str], after: Iterable[str]) -> list[str]:
    """Return the first changed lines of a text, as a diff without context has them."""

    def told() -> Iterator[str]:
        number = 0
        for line in difflib.unified_diff(list(before), list(after), lineterm="", n=0):
            if line.startswith("@@"):
                number = int(line.split("+")[1].split(",")[0].split(" ")[0])
            elif not line.startswith(("---", "+++")):
                yield f"  line {number}: {line[:_LINE_CHARS]}"
                number += line.startswith("+")

    lines = list(told())
    more = len(lines) - _SHOWN_LINES
    return lines[:_SHOWN_LINES] + ([f"  and {more} more lines"] if more > 0 else [])
