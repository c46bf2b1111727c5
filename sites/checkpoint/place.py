"""The paths of a rank's files of a checkpoint, while it is written and afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from isthmus.protos.checkpoint.store import checkpoint_name

SHARED, OWN = "shared", "own"
OBJECTS = f"{SHARED}/objects.pt"
LIST = "files.json"
"""File with a site's list of files, in a part that is complete and not the publisher's."""
PUBLISHES = "publishes"
"""Empty file that marks the part of the publishing site (shared part and manifest)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A rank's position among the writers, and the store."""

    store: str
    """The run's folder or URL."""
    local: Path
    """Local folder of the site or node for files to be uploaded."""
    run: str
    job: str
    generation: int
    site: str
    rank: int
    local_rank: int
    """Rank on this node."""
    ranks: Mapping[str, int]
    """Number of ranks by site, in the run's order."""
    keep: int

    @property
    def is_remote(self) -> bool:
        """Whether the store is a URL, with neither folders nor renames."""
        return "://" in self.store

    @property
    def cleans(self) -> bool:
        """Whether this rank cleans the folder of `staging` on behalf of all."""
        return (self.local_rank if self.is_remote else self.rank) == 0

    @property
    def staging_root(self) -> Path:
        """Folder of the checkpoints being written."""
        return self.local if self.is_remote else Path(self.store)

    def staging(self, step: int) -> Path:
        """Return the folder in which this rank's files are written."""
        return self.staging_root / f".{checkpoint_name(step)}.g{self.generation}"


def own_path(place: Place) -> str:
    """Return the path of a rank's own state within a checkpoint."""
    return f"{OWN}/{place.site}/{place.rank}.pt"


def residuals_path(place: Place) -> str:
    """Return the path of the residuals of this rank's shards within a checkpoint."""
    return f"{OWN}/{place.site}/{place.rank}.residuals.npz"


def asked_path(place: Place, number: int) -> str:
    """Return the path at which the gateway writes residuals for request `number`."""
    return f"{OWN}/{place.site}/{place.rank}.residuals-{number}.npz"
