"""torch.distributed inside one site: its initialisation, and collectives on groups of their own.

There are two groups of the same ranks. Reduce-scatters, and what sends shards in, are launched from
the autograd thread, all-gathers from another. On one group, two ranks could launch them in
different orders, and wait for each other. torch 2.13 renamed the flat collectives and warns about
the old names; older versions have only those.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from isthmus.protos.errors import RankLostError
from isthmus.protos.failure import reason_of
from isthmus.topology.spec.expected_devices import NO_DEVICE

APART = timedelta(days=365)
"""Ranks may come so far apart to a collective beside training: where one missed a checkpoint, until
the next is due. After one that was not in time, a group of gloo's is never of use again."""
Counts = Sequence[int]
_Flat = Callable[..., dist.Work]
reduce_scatter_flat: _Flat = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
_all_gather: _Flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def choose_device() -> torch.device:
    """Return this rank's device, and make it the current one."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank())
    torch.cuda.set_device(device)
    return device


def device_name(device: torch.device) -> str:
    """Return the device's own name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else NO_DEVICE


def local_rank() -> int:
    """Return the rank inside the node, as torchrun gave it."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def ensure_process_group(device: torch.device, timeout_s: float) -> bool:
    """Initialise the default process group; return whether it was done here, and not before.

    Without torchrun's variables this process is the only rank.
    """
    if dist.is_initialized():
        return False
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, store=HashStore(), rank=0, world_size=1)
    return True


Ranks = tuple[int, ...]


class Collectives:
    """Asynchronous collectives over ranks of this site; none at all for a single rank."""

    def __init__(self, timeout_s: float) -> None:
        """Make the groups of all ranks: a collective call, by all ranks of the site."""
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._timeout = timedelta(seconds=timeout_s)
        self._everybody = tuple(range(self.world_size))
        self._groups: dict[Ranks, tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]] = {}
        self.make_groups([self._everybody])

    def make_groups(self, wanted: Iterable[Ranks]) -> None:
        """Make groups of these ranks: a collective call of the site, with the same groups."""
        for ranks in wanted:
            if ranks not in self._groups:
                pair = [
                    dist.new_group(list(ranks), timeout=self._timeout) if len(ranks) > 1 else None
                    for _ in range(2)
                ]
                self._groups[ranks] = pair[0], pair[1]

    def all_reduce(self, tensor: torch.Tensor, ranks: Ranks | None = None) -> dist.Work | None:
        """Sum `tensor` over these ranks, else all, in place. Ordered with the reduce-scatters."""
        group = self._groups[ranks or self._everybody][0]
        if group is None:
            return None
        work: dist.Work | None = dist.all_reduce(tensor, group=group, async_op=True)
        return work

    def reduce_scatter(self, shard: torch.Tensor, padded: torch.Tensor) -> dist.Work | None:
        """Sum float32[P s] over the site's P ranks; rank r gets elements [r s, (r+1) s).

        Bytes sent per rank: 4 s (P-1) or more, by backend. With P = 1 the two are one tensor.
        """
        group = self._groups[self._everybody][0]
        if group is None:
            return None
        return reduce_scatter_flat(shard, padded, group=group, async_op=True)

    def all_to_all(
        self,
        arriving: torch.Tensor,
        leaving: torch.Tensor,
        received: Counts,
        sent: Counts,
        *,
        ranks: Ranks,
        is_back: bool,
    ) -> dist.Work | None:
        """Send `sent[j]` elements to the j-th of these ranks, for all j, and get `received[j]`.

        Ordered with reduce-scatters; on the way back, with all-gathers.
        """
        group = self._groups[ranks][is_back]
        if group is None:
            arriving.copy_(leaving)
            return None
        work: dist.Work | None = dist.all_to_all_single(
            arriving, leaving, [*received], [*sent], group=group, async_op=True
        )
        return work

    def all_gather(self, padded: torch.Tensor, shard: torch.Tensor) -> dist.Work | None:
        """Collect all ranks' shards into float32[P s]."""
        group = self._groups[self._everybody][1]
        if group is None:
            return None
        return _all_gather(padded, shard, group=group, async_op=True)


def wait(pending: dist.Work | torch.cuda.Event | None) -> None:
    """Wait for a collective or an event: on CUDA the current stream does, otherwise this thread.

    Raises:
        RankLostError: it failed, or the group's timeout passed.
    """
    if pending is None:
        return
    try:
        pending.wait()
    except RuntimeError as error:
        cause = (str(error).strip() or reason_of(error)).splitlines()[0]
        raise RankLostError(f"a collective inside the site failed: {cause}") from error
