"""Sends gradients of DistributedDataParallel to sites that shard the model, as these send theirs.

Sites that shard have agreed on buckets of their own (canonical.py), whatever DDP makes. So DDP's
buckets are held until all gradients of the next agreed bucket are there. To the others, every rank
of this site holds all of each tensor.

Annotations are evaluated here, not postponed: DDP compares its hook's with its own classes.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket  # what DDP compares the annotation with
from torch.nn.parallel import DistributedDataParallel

from isthmus.protos.errors import ScriptError
from isthmus.sites.worker.checks.arguments import check_not_complex
from isthmus.sites.worker.exchange.collectives import Ranks
from isthmus.sites.worker.exchange.exactness import bare_name
from isthmus.sites.worker.exchange.rounds import SharedBy
from isthmus.sites.worker.exchange.site_averages import BucketAverages
from isthmus.sites.worker.exchange.step_records import TokenCount
from isthmus.sites.worker.exchange.used_flags import MaybeUsed
from isthmus.sites.worker.layouts.agreed_hook import AgreedHook
from isthmus.sites.worker.layouts.canonical import Agreed, BucketCut, GradientPlan
from isthmus.sites.worker.layouts.ddp_hook import DdpHook, HeldBuckets


class ReplicaBesideShardsHook(DdpHook, AgreedHook):
    """The hook of one rank: a backward pass is a round."""

    def __init__(
        self,
        pipeline: BucketAverages,
        tokens: TokenCount,
        models: Sequence[DistributedDataParallel],
        *,
        is_summed: bool = False,
        regime: str = "sync",
    ) -> None:
        """Hook into the model; `agree` comes next. `regime` is the job's.

        Raises:
            TypeError: there are several models, or a parameter is complex, or not in row-major
                order.
        """
        names = check_agreed(models, regime)
        module = models[0].module
        parameters = [*module.named_parameters()]
        super().__init__(pipeline, tokens, models, names, is_summed=is_summed)
        # Backward comes to them from the last to the first.
        named = [*reversed(parameters), *module.named_buffers()]
        self.own = {bare_name(name): each for name, each in named}
        self.twins = ()
        self.data_ranks = tuple(range(dist.get_world_size()))
        self._cuts: tuple[tuple[BucketCut, SharedBy], ...] = ()
        self._num_submitted = 0
        self._held = HeldBuckets()
        self._arrived: dict[str, torch.Tensor] = {}
        """Where in DDP's buckets a gradient lies, flat."""
        self._take_buckets(models[0], self._reduce)

    def agree(self, _: Agreed, plan: GradientPlan) -> set[Ranks]:
        """Prepare for the buckets that all sites have agreed on."""
        self._cuts = plan.cuts
        parameters = {name: each for each, name in self._names.items()}
        self._used = MaybeUsed(
            {parameters[name]: name for name in plan.flags.names},
            self._models,
            number=plan.flags.number,
            sharing=plan.flags_sharing,
        )
        self.crossed |= {id(parameters[name]) for cut, _ in plan.cuts for name in cut.names}
        return {self.data_ranks}

    def gradients(self) -> list[torch.Tensor]:
        """Return each gradient that there is."""
        return [each.grad for each in self._names if each.grad is not None]

    def parameters_now(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the parameters that the model has now, new ones too, with their names."""
        for name, each in reversed([*self._models[0].module.named_parameters()]):
            yield bare_name(name), each

    def shard_in(self, _: Sequence[torch.Tensor]) -> None:
        """Nothing is a shard here."""

    def _reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Hold one of DDP's buckets; submit the agreed ones that it completes.

        Raises:
            ScriptError: DDP has no gradient of a parameter that other sites train.
        """
        if self._begin():
            self._num_submitted = 0
        future = self._held.hold(bucket.buffer())
        assert self._used is not None, "agree comes first"
        self._used.note(bucket.parameters(), bucket.gradients())
        self._reduced.note_crossed(self._names[each] for each in bucket.parameters())
        for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            self._arrived[self._names[parameter]] = grad.view(-1)
        latest = self._submit()
        if bucket.is_last():
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
            if self._num_submitted < len(self._cuts):
                names = self._cuts[self._num_submitted][0].names
                raise ScriptError(
                    "DistributedDataParallel does not reduce the gradient of "
                    f"{next(each for each in names if each not in self._arrived)}, which other "
                    "sites train"
                )
            assert latest is not None, "the last gradient completes the last bucket"
            self._arrived = {}
            self._held.complete_after(latest)  # buckets come back in order
        return future

    def _submit(self) -> torch.futures.Future[torch.Tensor] | None:
        """Submit the agreed buckets whose turn it is; return the last of them."""
        latest = None
        for cut, sharing in self._cuts[self._num_submitted :]:
            if any(name not in self._arrived for name in cut.names):
                break
            latest = self._pipeline.submit(
                [self._arrived[each.entry.name][each.start : each.stop] for each in cut.slices],
                cut.layout,
                exact=cut.exact,
                number=cut.number,
                sharing=sharing,
                named=[(name, self._arrived[name]) for name in cut.names],
            )
            self._num_submitted += 1
        return latest


def check_agreed(models: Sequence[DistributedDataParallel], regime: str) -> dict[torch.Tensor, str]:
    """Return the names of all parameters of models whose gradients may cross in agreed buckets.

    Raises:
        TypeError: as `ReplicaBesideShardsHook`.
    """
    where = "beside shards" if regime == "sync" else f"under the regime {regime}"
    or_sync = "" if regime == "sync" else ", or say `regime: sync`"
    if len(models) != 1:
        raise TypeError(
            f"site.attach: got {len(models)} models of DistributedDataParallel, and {where} "
            "there can be one: let it wrap one module that has the others as its parts" + or_sync
        )
    names = {each: bare_name(name) for name, each in models[0].module.named_parameters()}
    for each, name in names.items():
        if not each.is_contiguous():
            raise TypeError(
                f"site.attach: parameter {name} is not in row-major order (channels_last, or "
                f"transposed), as it has to be {where}: call contiguous(), or "
                "to(memory_format=torch.contiguous_format), before the model is wrapped" + or_sync
            )
        check_not_complex(name, each, regime)
    return names
