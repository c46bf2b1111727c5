"""A rank's exchange with all other sites, as its job configures it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from sites.worker.average import TensorAverage
from sites.worker.collectives import Collectives
from sites.worker.cuda_transfer import CudaTransfer
from sites.worker.encoding import ShardEncoder
from sites.worker.exactness import Exactness
from sites.worker.exchange import Exchange
from sites.worker.host_transfer import HostTransfer
from sites.worker.initial_state import InitialState
from sites.worker.link import Link, Welcome
from sites.worker.shared_tensors import SharedTensors
from topology.job import Job
from topology.timeouts import Timeouts


class RankExchange:
    """Makes the pipeline, and what averages over it, when they are first needed.

    That is at the same call at every rank of the site, for these calls are collectives.
    """

    def __init__(
        self,
        link: Link,
        welcome: Welcome,
        job: Job,
        timeouts: Timeouts,
        exactness: Exactness,
        device: torch.device,
    ) -> None:
        """Start nothing yet.

        Args:
            link: to the gateway; not closed here.
            welcome: what the gateway said of this site.
            job: of the run.
            timeouts: of its topology.
            exactness: says what crosses exactly though the codec rounds.
            device: where gradients are.
        """
        self._link = link
        self._welcome = welcome
        self._job = job
        self._timeouts = timeouts
        self._exactness = exactness
        self._device = device
        self._rank = dist.get_rank()
        self._shared: SharedTensors | None = None
        if device.type == "cpu" and dist.get_world_size() == 1:
            self._shared = SharedTensors(link)
        self._exchange: Exchange | None = None
        self._average: TensorAverage | None = None

    def open(self) -> Exchange:
        """Return the pipeline, started by the first that needs it."""
        if self._exchange is None:
            # A peer that is gone is noticed by the gateway; this bounds what is slow, as
            # compilation is.
            deadline_s = max(self._timeouts.process_group_s, self._timeouts.start_s)
            collectives = Collectives(self._timeouts.process_group_s)
            on_cuda = self._device.type == "cuda"
            self._exchange = Exchange(
                self._link,
                CudaTransfer(collectives, self._device) if on_cuda else HostTransfer(collectives),
                rank=self._rank,
                world_size=dist.get_world_size(),
                deadline_s=deadline_s,
                overlaps=self._job.exchange.schedule != "serial",
                encoder=self._make_encoder(),
                shared=self._shared,
            )
            self._exchange.start()
        return self._exchange

    def open_average(self) -> TensorAverage:
        """Return what averages lists of tensors."""
        if self._average is None:
            bucket_bytes = self._job.exchange.bucket_bytes
            self._average = TensorAverage(
                self.open(), bucket_bytes=bucket_bytes, exactness=self._exactness
            )
        return self._average

    def empty(self, sizes: Sequence[int]) -> torch.Tensor:
        """Return a float32 tensor on this rank's device, averaged where it lies, if that can be."""
        numel = math.prod(sizes)
        if self._shared is None or numel == 0:
            return torch.empty(tuple(sizes), dtype=torch.float32, device=self._device)
        return self._shared.empty(numel).view(tuple(sizes))

    def equalise(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Give every rank of every site the first site's values.

        With `schedule: off`, those of this site alone, its own first rank's.

        Raises:
            IsthmusError: names, shapes or dtypes differ, or the exchange failed.
        """
        is_off = self._job.exchange.schedule == "off"
        InitialState(
            self.open(),
            site_index=0 if is_off else self._welcome.site_index,
            num_sites=1 if is_off else len(self._welcome.sites),
            rank=self._rank,
            device=self._device,
        ).equalise(named)

    def close(self) -> None:
        """End the pipeline, if there is one."""
        if self._exchange is not None:
            self._exchange.close()

    def _make_encoder(self) -> ShardEncoder | None:
        """Return what encodes on this rank's device, if that is wanted and the gateway takes it."""
        if self._welcome.encoding is None:
            return None
        return ShardEncoder(
            self._welcome.encoding,
            site_index=self._welcome.site_index,
            rank=self._rank,
            ranks_per_site=self._welcome.ranks_per_site,
            device=self._device,
        )
