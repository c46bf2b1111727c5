"""A rank's part in writing a checkpoint, and the paths of its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from isthmus.protos.checkpoint.store import checkpoint_name, joined

SHARED, OWN = "shared", "own"
OBJECTS = f"{SHARED}/objects.pt"
LIST = "files.json"
"""File with a site's list of files, in a part that is complete and not the publisher's."""
PUBLISHES = "publishes"
"""Empty file that marks the part of the publishing site (shared part and manifest)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A rank's position among the writers, and one store."""

    store: str
    """The run's folder or URL."""
    local: Path
    """Local folder of the node and this site alone, for files that its gateway writes."""
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

    def made_in(self, step: int) -> str:
        """Return the folder or URL in which the checkpoint of a step is made."""
        return joined(self.store, checkpoint_name(step) if self.is_remote else self._hidden(step))

    def asked(self, step: int, number: int) -> Path:
        """Return the file that the gateway writes residuals to, for request `number`."""
        return self.local / self._hidden(step) / f"{self.rank}.residuals-{number}.npz"

    def _hidden(self, step: int) -> str:
        return f".{checkpoint_name(step)}.g{self.generation}"


def own_path(place: Place) -> str:
    """Return the path of a rank's own state within a checkpoint."""
    return f"{OWN}/{place.site}/{place.rank}.pt"


def residuals_path(place: Place) -> str:
    """Return the path of the residuals of this rank's shards within a checkpoint."""
    return f"{OWN}/{place.site}/{place.rank}.residuals.npz"
