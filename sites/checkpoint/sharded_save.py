"""Writes tensors that ranks share, each rank its part, as torch.distributed.checkpoint has them.

Its own `save` speaks over groups that a script may have ended by then (site_group.py). This is the
same plan, made and written by the same planner and writer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan

from isthmus.protos.failure import reason_of
from isthmus.sites.checkpoint.site_group import SiteGroup
from isthmus.sites.checkpoint.training_state import Tensors

Made = TypeVar("Made")


def save_sharded(tensors: Tensors, folder: Path, group: SiteGroup) -> None:
    """Write all ranks' tensors into one folder. A collective of the site.

    Raises:
        OSError: at all ranks, what one of them could not do.
    """
    writer, planner = FileSystemWriter(folder), DefaultSavePlanner()
    is_first = group.rank == 0

    def plan() -> SavePlan:
        planner.set_up_planner(tensors, writer.storage_meta(), is_first)
        writer.set_up_storage_writer(is_first)
        return writer.prepare_local_plan(planner.create_local_plan())

    # Each makes the whole plan, of the same parts: sending it to all would be more.
    whole, metadata = planner.create_global_plan(_of_all(group, plan))
    part = planner.finish_plan(writer.prepare_global_plan(whole)[group.rank])
    written = _of_all(group, lambda: writer.write_data(part, planner).wait())
    if is_first:
        writer.finish(metadata, written)


def _of_all(group: SiteGroup, make: Callable[[], Made]) -> list[Made]:
    """Return what each rank makes.

    Raises:
        OSError: at all ranks, why one of them could not.
    """
    made, problem = None, ""
    try:
        made = make()
    except Exception as error:  # noqa: BLE001 - told to all ranks, or they would wait
        why = str(error) if isinstance(error, OSError) else reason_of(error)
        problem = f"rank {group.rank}: {why}"
    parts = group.gather((made, problem))
    if problems := [each for _, each in parts if each]:
        raise OSError(problems[0])
    return [each for each, _ in parts]  # type: ignore[misc]
