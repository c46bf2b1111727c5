"""The ranks of a site, for a thread that saves: a group that the script cannot end.

Many scripts call `dist.destroy_process_group()` after their last step, but that step is saved when
the script ends. The call destroys all groups in torch's list. So this group uses gloo directly,
outside that list.
"""

from __future__ import annotations

import itertools
import pickle
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from isthmus.sites.worker.exchange.collectives import APART

Own = TypeVar("Own")
_number = itertools.count()
"""Numbers a process's groups, which need different keys in torchrun's store."""


class SiteGroup:
    """A process group of all ranks of the site. Use it in one thread at a time."""

    def __init__(self) -> None:
        """Connect to the other ranks of the site, while torch's default group exists."""
        store = PrefixStore(f"isthmus-site-group-{next(_number)}", _get_default_store())
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.gloo = dist.ProcessGroupGloo(store, self.rank, self.world_size, APART)

    def gather(self, own: Own) -> list[Own]:
        """Return `own` of each rank, by rank; any picklable value. A collective."""
        written = torch.frombuffer(bytearray(pickle.dumps(own)), dtype=torch.uint8)
        sizes = [
            int(each)
            for each in self._gather(
                torch.tensor([written.numel()], dtype=torch.int64, device="cpu")
            )
        ]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        padded[: written.numel()] = written
        gathered: list[Any] = [
            pickle.loads(each[:size].numpy().tobytes())  # noqa: S301 - of our own site's ranks
            for each, size in zip(self._gather(padded), sizes, strict=True)
        ]
        return gathered

    def _gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(own) for _ in range(self.world_size)]
        self.gloo.allgather([gathered], [own]).wait()  # type: ignore[attr-defined]  # of any backend
        return gathered
