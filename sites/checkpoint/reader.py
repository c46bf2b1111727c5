"""Reads a checkpoint into a model and its optimizer, with any number of ranks and sites."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader

from isthmus.protos.checkpoint.manifest import Manifest
from isthmus.protos.checkpoint.store import StoredCheckpoint, joined, opened, storage_errors
from isthmus.protos.errors import BadCheckpointError
from isthmus.protos.failure import text_of
from isthmus.sites.checkpoint.place import OBJECTS, SHARED, Place, own_path, residuals_path
from isthmus.sites.checkpoint.plain_metadata import PlainReader, PlainUrlReader
from isthmus.sites.checkpoint.training_state import TrainingState
from isthmus.sites.worker.exchange.collectives import APART


class CheckpointReader:
    """Reads one checkpoint, with all ranks of a site together."""

    def __init__(self, place: str) -> None:
        """`place` is the checkpoint's folder or URL. A collective of the site."""
        self._stored = StoredCheckpoint(place)
        self._group = dist.new_group(backend="gloo", timeout=APART)

    def verified(self) -> Manifest:
        """Verify the digests of all files, some at each rank. A collective of the site.

        Raises:
            BadCheckpointError: a file is damaged; raised at all ranks.
        """
        rank, world_size = dist.get_rank(self._group), dist.get_world_size(self._group)
        problem, manifest = "", None
        try:
            manifest = self._stored.verified(slice(rank, None, world_size))
        except (BadCheckpointError, OSError) as error:
            problem = text_of(error)
        problems: list[Any] = [None] * world_size
        dist.all_gather_object(problems, problem, group=self._group)
        if found := [each for each in problems if each]:
            raise BadCheckpointError(f"{self._stored.place} cannot be resumed from: {found[0]}")
        assert manifest is not None, "without a problem it was read"
        return manifest

    def load(self, state: TrainingState) -> dict[str, Any]:
        """Fill model and optimizer, and return the first rank's objects. A collective of the site.

        Raises:
            ConfigMismatchError: the checkpoint has another model or optimizer.
        """
        reader = storage_reader(self._stored.place)
        with storage_errors(self._stored.place):
            stored = reader.read_metadata().state_dict_metadata
        tensors = state.to_load(
            {
                path: (found.size, found.properties.dtype)
                for path, found in stored.items()
                if isinstance(found, TensorStorageMetadata)
            }
        )
        load(tensors, storage_reader=reader, process_group=self._group)
        objects = self._unpickled(OBJECTS)
        state.adopt(tensors, objects["optimizer"])
        return objects

    def own(self, manifest: Manifest, place: Place) -> dict[str, Any] | None:
        """Return this rank's own saved state; None: there was no such rank."""
        path = own_path(place)
        has_ranks = manifest.ranks.get(place.site) == place.ranks[place.site]
        return self._unpickled(path) if has_ranks and _has(manifest, path) else None

    def residuals(self, manifest: Manifest, place: Place) -> Path | None:
        """Return a local file of the residuals of this rank's shards; None: there is none."""
        path = residuals_path(place)
        if not _has(manifest, path):
            return None
        if "://" not in self._stored.place:
            return Path(self._stored.place) / path
        local = place.local / "resumed" / path
        local.parent.mkdir(parents=True, exist_ok=True)
        with opened(self._stored.place) as (files, root):
            files.get_file(f"{root}/{path}", str(local))
        return local

    def _unpickled(self, path: str) -> dict[str, Any]:
        with opened(self._stored.place) as (files, root):
            written = io.BytesIO(files.cat_file(f"{root}/{path}"))
        found: dict[str, Any] = torch.load(written, map_location="cpu", weights_only=True)
        return found


def _has(manifest: Manifest, path: str) -> bool:
    return any(each.path == path for each in manifest.files)


def storage_reader(place: str) -> StorageReader:
    """Return a reader for model and optimizer of a checkpoint at a path or URL."""
    shared = joined(place, SHARED)
    return PlainReader(shared) if "://" not in shared else PlainUrlReader(shared)
