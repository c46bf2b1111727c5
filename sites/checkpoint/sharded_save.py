"""Writes sharded tensors, one part per rank, in the format of torch.distributed.checkpoint.

torch's own `save` uses process groups that a script may have destroyed by then (site_group.py).
This module uses the same planner and writer over another group.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan

from isthmus.protos.failure import reason_of, text_of
from isthmus.sites.checkpoint.site_group import SiteGroup
from isthmus.sites.checkpoint.training_state import Tensors

Made = TypeVar("Made")


def save_sharded(tensors: Tensors, folder: Path, group: SiteGroup) -> None:
    """Write all ranks' tensors into one folder. A collective of the site.

    Raises:
        OSError: a rank failed; raised at all ranks.
    """
    writer, planner = FileSystemWriter(folder), DefaultSavePlanner()
    is_first = group.rank == 0

    def plan() -> SavePlan:
        planner.set_up_planner(tensors, writer.storage_meta(), is_first)
        writer.set_up_storage_writer(is_first)
        return writer.prepare_local_plan(planner.create_local_plan())

    # Each rank computes the whole plan from the same parts, which is cheaper than sending it.
    whole, metadata = planner.create_global_plan(_of_all(group, plan))
    part = planner.finish_plan(writer.prepare_global_plan(whole)[group.rank])
    written = _of_all(group, lambda: writer.write_data(part, planner).wait())
    if is_first:
        writer.finish(metadata, written)


def _of_all(group: SiteGroup, make: Callable[[], Made]) -> list[Made]:
    """Return the results of `make` at all ranks.

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
