"""Writes sharded tensors, one part per rank, in the format of torch.distributed.checkpoint.

torch's own `save` uses process groups that a script may have destroyed by then (site_group.py).
This module uses the same planner and writer over another group, and streams into any store.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan

from isthmus.protos.failure import reason_of, text_of
from isthmus.sites.checkpoint.checkpoint_files import CheckpointFiles, StoredStream
from isthmus.sites.checkpoint.place import SHARED
from isthmus.sites.checkpoint.site_group import SiteGroup
from isthmus.sites.checkpoint.training_state import Tensors

Made = TypeVar("Made")
_UNFINISHED = ".tmp"
"""Ending of a file that torch renames once it is complete. No manifest names one that is not."""


class _Streams(FileSystem):
    """Has torch's writer write into a checkpoint, each file under its final name."""

    def __init__(self, files: CheckpointFiles) -> None:
        self._files = files

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[StoredStream]:
        """Write a file."""
        assert mode == "wb", "nothing is read"
        with self._files.create(str(path).removesuffix(_UNFINISHED)) as stream:
            yield stream

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Check that it is so called already."""
        assert str(path) == f"{new_path}{_UNFINISHED}"

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Leave folders to `create_stream`."""

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Return False: what is there is written over."""
        return False


def save_sharded(tensors: Tensors, files: CheckpointFiles, group: SiteGroup) -> None:
    """Write all ranks' tensors into one checkpoint. A collective of the site.

    Raises:
        OSError: a rank failed; raised at all ranks.
    """
    writer, planner = FileSystemWriter(SHARED, sync_files=False), DefaultSavePlanner()
    writer.fs = _Streams(files)
    is_first = group.rank == 0

    def plan() -> SavePlan:
        planner.set_up_planner(tensors, writer.storage_meta(), is_first)
        writer.set_up_storage_writer(is_first)
        return writer.prepare_local_plan(planner.create_local_plan())

    # Each rank computes the whole plan from the same parts, which is cheaper than sending it.
    whole, metadata = planner.create_global_plan(of_all(group, plan))
    part = planner.finish_plan(writer.prepare_global_plan(whole)[group.rank])
    written = of_all(group, lambda: writer.write_data(part, planner).wait())
    of_all(group, lambda: writer.finish(metadata, written) if is_first else None)


def of_all(group: SiteGroup, make: Callable[[], Made]) -> list[Made]:
    """Return the results of `make` at all ranks. A collective of the site.

    Raises:
        OSError: a rank failed; raised at all ranks.
    """
    result, problem = None, ""
    try:
        result = make()
    except Exception as error:  # noqa: BLE001 - told to all ranks, or they would wait
        why = text_of(error) if isinstance(error, OSError) else reason_of(error)
        problem = f"rank {group.rank}: {why}"
    parts = group.gather((result, problem))
    if problems := [each for _, each in parts if each]:
        raise OSError(problems[0])
    return [each for each, _ in parts]  # type: ignore[misc]
