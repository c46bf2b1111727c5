"""Where a rank's files of a checkpoint lie, while it is being written and afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from isthmus.protos.checkpoint.store import checkpoint_name

SHARED, OWN = "shared", "own"
OBJECTS = f"{SHARED}/objects.pt"
LIST = "files.json"
"""In the part of a site that does not publish, once it is whole: its files."""
PUBLISHES = "publishes"
"""An empty file in the part of the site that writes what all have, and the manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Who writes, and where to."""

    store: str
    """The run's folder or URL."""
    local: Path
    """A folder of the site, or of its node, for what is to be uploaded."""
    run: str
    job: str
    generation: int
    site: str
    rank: int
    local_rank: int
    """Among the ranks of this node."""
    ranks: Mapping[str, int]
    """Ranks of each site, in the run's order."""
    keep: int

    @property
    def is_remote(self) -> bool:
        """Whether the store is a URL, with neither folders nor renames."""
        return "://" in self.store

    @property
    def cleans(self) -> bool:
        """Whether this rank removes what lies where `staging` does: one does that for all."""
        return (self.local_rank if self.is_remote else self.rank) == 0

    @property
    def staging_root(self) -> Path:
        """The folder with what is being written."""
        return self.local if self.is_remote else Path(self.store)

    def staging(self, step: int) -> Path:
        """Return the folder in which this rank's files are written."""
        return self.staging_root / f".{checkpoint_name(step)}.g{self.generation}"


def own_path(place: Place) -> str:
    """Return where in a checkpoint a rank's own state is."""
    return f"{OWN}/{place.site}/{place.rank}.pt"


def residuals_path(place: Place) -> str:
    """Return where the residuals of this rank's shards are, which its gateway keeps."""
    return f"{OWN}/{place.site}/{place.rank}.residuals.npz"


def asked_path(place: Place, number: int) -> str:
    """Return where its gateway writes that when asked for it, one time after another."""
    return f"{OWN}/{place.site}/{place.rank}.residuals-{number}.npz"
