"""Data that has to lie at every site before ranks start: a path, or a URL to be fetched from."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from typing import Annotated

from isthmus.topology.spec.suggest import shown
from isthmus.topology.spec.yaml_keys import Checked, Key, KeyedError, Section, Size, Text

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


def _digest(value: str) -> str:
    """Return a sha256 in hex."""
    if (found := _DIGEST.fullmatch(value)) is None:
        raise ValueError(
            f"want sha256: and 64 hex digits, as `sha256sum` prints; got {shown(value)}"
        )
    return found[1]


Digest = Annotated[str, Checked(_digest, {"type": "string", "pattern": rf"^{_DIGEST.pattern}$"})]


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteData(Section):
    """A file that has to lie at every site before ranks start."""

    path: Text | None = None
    """Where it lies at each site, relative to where the script runs. With a url absolute; absent:
    ranks find it in $ISTHMUS_DATA by its name."""
    url: Text | None = None
    """Where a site that lacks it fetches it, by fsspec: s3://bucket/train.bin. [it has to be
    there]"""
    digest: Digest | None = None
    """sha256: and the file's digest."""
    num_bytes: Annotated[Size | None, Key("size")] = None
    """Its exact size, as 17179869184B; of a folder, of all files."""

    @property
    def name(self) -> str:
        """What the file is called."""
        return posixpath.basename((self.url or self.path or "").partition("?")[0].rstrip("/"))

    def check(self) -> None:
        """Refuse data that cannot be found, or cannot be checked."""
        if self.path is None and self.url is None:
            raise ValueError("want a path, or a url to fetch it from")
        if self.digest is None and self.num_bytes is None:
            raise ValueError("want a digest or a size: what lies at a site is checked")
        if self.url is not None and "://" not in self.url:
            raise KeyedError("url", f"want a URL, as s3://bucket/file; got {shown(self.url)}")
        if self.url is not None and self.path is not None and not self.path.startswith("/"):
            raise KeyedError("path", "want an absolute path, where the url's content is kept")
        if self.path is None and not self.name:
            raise KeyedError("url", "want the URL of a file: it ends with no name")
