"""Data that has to lie at every site before ranks start: a path, or a URL to be fetched from."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteData:
    """One file that ranks read, or a folder that lies at the sites already."""

    path: str | None = None
    """Where it lies at each site; relative to the script's working folder. None: the file is kept
    with the agent's, and ranks find it in $ISTHMUS_DATA by its name."""
    url: str | None = None
    """Where a site that lacks it fetches it, by fsspec; None: it has to be there."""
    digest: str | None = None
    """sha256 of the file, in hex."""
    num_bytes: int | None = None
    """Size; of a folder that of all its files."""

    @property
    def name(self) -> str:
        """What the file is called."""
        return posixpath.basename((self.url or self.path or "").partition("?")[0].rstrip("/"))
