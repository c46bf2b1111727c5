"""The ranks of a site, for a thread that saves: a group that the script cannot end.

Many scripts call `dist.destroy_process_group()` after their last step, and that step is saved when
the script ends. It ends all groups that torch has made, and forgets them. So this is gloo itself,
of which torch's list of groups knows nothing.
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
"""Each group of a process has its own keys in torchrun's store."""


class SiteGroup:
    """All ranks of the site. One thread at a time."""

    def __init__(self) -> None:
        """Connect to the others: a collective of the site, while torch's default group is there."""
        store = PrefixStore(f"isthmus-site-group-{next(_number)}", _get_default_store())
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.gloo = dist.ProcessGroupGloo(store, self.rank, self.world_size, APART)

    def gather(self, own: Own) -> list[Own]:
        """Return what each rank gives, by rank; anything that can be pickled. A collective."""
        written = torch.frombuffer(bytearray(pickle.dumps(own)), dtype=torch.uint8)
        sizes = [int(each) for each in self._gather(torch.tensor([written.numel()]))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
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
