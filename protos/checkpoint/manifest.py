"""A checkpoint's manifest: its content, and the digest of each file.

The manifest is written last. A folder without one is no checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from isthmus.protos.errors import BadCheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
MANIFEST_BYTES = 64 << 20
"""Largest manifest; a file takes some hundred bytes in it."""
_DIGEST = "digest"
"""Key of the manifest's own digest."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of a checkpoint."""

    path: str
    """Path relative to the checkpoint's folder, with `/`."""
    num_bytes: int
    digest: str
    """xxh3-128 of the contents, in hex."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of a checkpoint."""

    run: str
    job: str
    """Name of the job."""
    step: int
    """Number of optimizer steps taken."""
    written_s: float
    """Unix time of writing."""
    ranks: Mapping[str, int]
    """Number of ranks by site that took part, in the run's order."""
    missing: tuple[str, ...] = ()
    """Sites whose part did not come in time: their ranks' own state is missing."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Positions and batch of the run's data: sites/worker/data/data_positions.py. Empty: the script
    manages its data itself."""
    files: tuple[StoredFile, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Total size of all files."""
        return sum(each.num_bytes for each in self.files)

    def to_bytes(self) -> bytes:
        """Serialise the manifest, with its own digest."""
        fields = {
            "format": FORMAT,
            "run": self.run,
            "job": self.job,
            "step": self.step,
            "written_s": self.written_s,
            "ranks": dict(self.ranks),
            "missing": list(self.missing),
            "data": dict(self.data),
            "files": [[each.path, each.num_bytes, each.digest] for each in self.files],
        }
        return json.dumps({**fields, _DIGEST: _digest(fields)}, indent=1).encode() + b"\n"

    @classmethod
    def from_bytes(cls, written: bytes, where: str) -> Manifest:
        """Parse a manifest from `to_bytes`.

        Raises:
            BadCheckpointError: the bytes are no valid manifest; `where` names the checkpoint.
        """
        try:
            fields = json.loads(written)
            digest = fields.pop(_DIGEST)
            if fields["format"] != FORMAT:
                raise BadCheckpointError(
                    f"{where}: has format {fields['format']}, and this isthmus reads {FORMAT}"
                )
            if digest != _digest(fields):
                raise BadCheckpointError(f"{where}: {MANIFEST} has other contents than its digest")
            return cls(
                run=fields["run"],
                job=fields["job"],
                step=fields["step"],
                written_s=fields["written_s"],
                ranks=fields["ranks"],
                missing=tuple(fields["missing"]),
                data=fields["data"],
                files=tuple(StoredFile(*each) for each in fields["files"]),
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise BadCheckpointError(f"{where}: {MANIFEST} is no manifest") from error


def _digest(fields: Mapping[str, Any]) -> str:
    written = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(written.encode())
