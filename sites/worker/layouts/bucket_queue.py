"""Sends a rank's shards in the buckets that sites agreed on, each once its gradients are there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from isthmus.protos.errors import ScriptError
from isthmus.sites.worker.exchange.collectives import Ranks
from isthmus.sites.worker.exchange.rounds import SharedBy
from isthmus.sites.worker.exchange.routes import Route, participants
from isthmus.sites.worker.exchange.sharding import local_of
from isthmus.sites.worker.exchange.site_averages import BucketAverages
from isthmus.sites.worker.exchange.used_flags import UsedFlags
from isthmus.sites.worker.layouts.canonical import BucketCut, GradientPlan, SiteTensors
from isthmus.sites.worker.layouts.sharded_state import held_pieces


@dataclass(slots=True)
class OwnBucket:
    """A bucket that this rank takes part in."""

    cut: BucketCut
    layout: int
    sharing: SharedBy
    route: Route
    missing: set[str] = field(default_factory=set)
    """Parameters of this rank whose gradients have not come in this round."""


class BucketQueue:
    """The buckets of one rank's rounds. They leave in the agreed order; the flags come last."""

    def __init__(
        self,
        pipeline: BucketAverages,
        trained: Mapping[str, torch.Tensor],
        tensors: SiteTensors,
        plan: GradientPlan,
        divisor_of: Callable[[torch.Tensor], float] | None,
    ) -> None:
        """Expect no gradient yet.

        Args:
            pipeline: averages the buckets.
            trained: this rank's parameters, by name.
            tensors: who holds what at the site.
            plan: how gradients cross.
            divisor_of: returns by what a parameter's gradient, a sum over tokens, was divided;
                None: gradients are means.
        """
        self._pipeline = pipeline
        self._trained = trained
        self._divisor_of = divisor_of
        rank = dist.get_rank()
        self.groups: set[Ranks] = set()
        """The ranks that share a bucket whose elements move among them, of all buckets."""
        self._buckets: list[OwnBucket] = []
        for cut, sharing in plan.cuts:
            ranks = participants(cut.parts(tensors))
            if not cut.is_rank_major:
                self.groups.add(ranks)
            if rank in ranks:
                self._buckets.append(OwnBucket(cut, cut.layout, sharing, cut.route(tensors, rank)))
        devices = (local_of(each).device for each in trained.values())
        device = next(devices, torch.device("cpu"))
        self._flags = UsedFlags(
            plan.flags.names,
            trained,
            device,
            number=plan.flags.number,
            sharing=plan.flags_sharing,
        )
        self.arrived: set[str] = set()
        """Names of the parameters whose gradients have come in this round."""
        self._is_on_cuda = device.type == "cuda"
        self._streams: set[torch.cuda.Stream] = set()
        """CUDA streams that compute this round's gradients: each model, and HSDP, has its own."""
        self._num_submitted = 0
        self._futures: list[torch.futures.Future[torch.Tensor]] = []

    def begin(self) -> None:
        """Expect the gradients of a round."""
        self.arrived.clear()
        self._streams.clear()
        self._num_submitted = 0
        for each in self._buckets:
            each.missing = {name for name in each.cut.names if name in self._trained}

    def arrive(self, name: str) -> None:
        """Note that a gradient is there; submit what it completes."""
        self.arrived.add(name)
        if self._is_on_cuda:
            self._streams.add(torch.cuda.current_stream())
        for bucket in self._buckets[self._num_submitted :]:
            bucket.missing.discard(name)
        while self._num_submitted < len(self._buckets):
            bucket = self._buckets[self._num_submitted]
            if bucket.missing:
                return
            self._num_submitted += 1
            self._submit(bucket)

    def submit_flags(self, unused: Iterable[str]) -> None:
        """Submit the round's last bucket: which gradients this rank has none of."""
        self._flags.submit(self._pipeline, unused)

    def wait(self) -> None:
        """Wait for the round's results; on CUDA, where they are only enqueued, this stream does."""
        futures, self._futures = self._futures, []
        for future in futures:
            future.wait()
        self._flags.wait()

    def used(self) -> set[str]:
        """Return of which parameters any rank of any site had a gradient, after `wait`."""
        return self._flags.read()

    def _submit(self, bucket: OwnBucket) -> None:
        for stream in self._streams:
            torch.cuda.current_stream().wait_stream(stream)
        parameters = {
            name: self._trained[name] for name in bucket.cut.names if name in self._trained
        }
        flats = {name: _flat_gradient(name, each) for name, each in parameters.items()}
        divisor_of = self._divisor_of
        future = self._pipeline.submit(
            held_pieces(bucket.cut, bucket.route, flats),
            bucket.layout,
            exact=bucket.cut.exact,
            route=bucket.route,
            number=bucket.cut.number,
            sharing=bucket.sharing,
            factors=() if divisor_of is None else [*map(divisor_of, parameters.values())],
            named=[*flats.items()],
        )
        self._futures.append(future)


def _flat_gradient(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter's gradient, flat: a view.

    Raises:
        ScriptError: it is not laid out as the parameter is.
    """
    grad = parameter.grad
    assert grad is not None
    local = local_of(grad)
    if local.shape != local_of(parameter).shape or not local.is_contiguous():
        raise ScriptError(f"the gradient of {name} has another layout than the parameter")
    return local.view(-1)
