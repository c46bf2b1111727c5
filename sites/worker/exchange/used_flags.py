"""Tells all sites which parameters any rank has used: behind a round's gradients, in a bucket.

An optimizer takes a gradient of zeros for another thing than none: it decays the weight, and its
moments go on. A gradient that is all zeros may be either, so values do not tell. Flags cross as
float32 whatever the codec, and all sites read the same bits. They are not weighed by tokens: a rank
that counts none has a gradient, too, of what it uses. They leave with the last gradients, so that
no round trip is added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch
from torch.nn.parallel import DistributedDataParallel

from isthmus.sites.worker.exchange.rounds import EVERYBODY, SharedBy
from isthmus.sites.worker.exchange.site_averages import BucketAverages
from isthmus.sites.worker.exchange.tensor_hashes import layout_of_labels


class UsedFlags:
    """The flags of one rank."""

    def __init__(
        self,
        names: Sequence[str],
        own: Iterable[str],
        device: torch.device,
        *,
        number: int | None = None,
        sharing: SharedBy = EVERYBODY,
    ) -> None:
        """Expect nothing to be used yet.

        Args:
            names: of all trained parameters, in one order everywhere.
            own: those of this rank.
            device: where this rank's parameters are.
            number: as `BucketPipeline.submit` has it.
            sharing: as `BucketPipeline.submit` has it.
        """
        self._number = number
        self._sharing = sharing
        self._places = {name: place for place, name in enumerate(names)}
        self._layout = layout_of_labels(f"{name} is used" for name in names)
        self._own = torch.zeros(len(names), dtype=torch.float32, device="cpu")
        for name in own:
            self._own[self._places[name]] = 1.0
        self._own = self._own.to(device)
        self._flags = self._own
        self._future: torch.futures.Future[torch.Tensor] = torch.futures.Future()

    def submit(self, pipeline: BucketAverages, unused: Iterable[str]) -> None:
        """Send the flags as the open round's last bucket: all of this rank's but the unused."""
        self._flags = self._own.clone()
        for name in unused:
            self._flags[self._places[name]] = 0.0  # a kernel: on CUDA nothing is waited for
        self._future = pipeline.submit(
            [self._flags],
            self._layout,
            exact=True,
            number=self._number,
            sharing=self._sharing,
            factors=[1.0],
            is_gradient=False,
        )

    def submit_numbers(
        self, pipeline: BucketAverages, numbers: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        """Send other numbers in place of the flags: as many at all ranks, and not weighed."""
        return pipeline.submit(
            [numbers],
            layout_of_labels([f"{numbers.numel()} numbers"]),
            exact=True,
            number=self._number,
            sharing=self._sharing,
            factors=[1.0],
            is_gradient=False,
        )

    def wait(self) -> None:
        """Wait for the result; on CUDA this stream does. The next round has the same memory."""
        self._future.wait()

    def read(self) -> set[str]:
        """Return what any rank of any site has used. On CUDA, the host waits for it."""
        flags = self._flags.tolist()
        return {name for name, place in self._places.items() if flags[place] > 0.0}


class MaybeUsed:
    """Parameters that DistributedDataParallel may leave as they are: find_unused_parameters.

    It decides by the ranks of this site whether a parameter was used at all. What only another site
    has used is given its gradient here.
    """

    def __init__(
        self,
        names: Mapping[torch.Tensor, str],
        models: Iterable[DistributedDataParallel],
        *,
        number: int | None = None,
        sharing: SharedBy = EVERYBODY,
    ) -> None:
        """Take all parameters with their names, in an order that is the same at all sites.

        `models` have the parameters; `number` and `sharing` are as `UsedFlags` has them.
        """
        self._names = {each: name for each, name in names.items() if each.requires_grad}
        own, device = [*self._names.values()], next(iter(self._names)).device
        self._flags = UsedFlags(own, own, device, number=number, sharing=sharing)
        self._averaged: dict[torch.Tensor, torch.Tensor] = {}
        """Where in DDP's buckets the average gradients of this round will lie."""
        self._unused: set[torch.Tensor] = set()
        self._left_out = {
            parameter
            for each in models
            if each.find_unused_parameters
            for parameter in each.module.parameters()
        }
        """DDP may leave their gradients as they are."""

    def note(self, parameters: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
        """Note which parameters of one of DDP's buckets have a gradient at this rank.

        `grads` are what the bucket has of each.
        """
        for parameter, grad in zip(parameters, grads, strict=True):
            self._averaged[parameter] = grad
            if parameter.grad is None:
                self._unused.add(parameter)

    def submit(self, pipeline: BucketAverages) -> None:
        """Tell all sites, in a bucket of the open round."""
        unused = [name for each, name in self._names.items() if each not in self._averaged]
        unused += [self._names[each] for each in self._unused]
        self._flags.submit(pipeline, unused)

    def give_averaged_after_ddp(self, *, is_catching_up: bool) -> None:
        """Give each parameter its average gradient that DDP has left out, once it has looked.

        Called at the end of a backward pass, before DDP looks at its futures. With
        `is_catching_up`, what this site has used counts for nothing.
        """
        give = partial(self._give_averaged, is_catching_up=is_catching_up)
        torch.autograd.Variable._execution_engine.queue_callback(give)

    def _give_averaged(self, *, is_catching_up: bool) -> None:
        averaged, self._averaged, self._unused = self._averaged, {}, set()
        self._flags.wait()
        without = {each for each in averaged if each.grad is None}
        used = self._flags.read() if without or is_catching_up else {*self._names.values()}
        for parameter, grad in averaged.items():
            if self._names[parameter] not in used:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = grad.clone().view_as(parameter)
            elif parameter in self._left_out:
                parameter.grad.copy_(grad)  # zeros, where zero_grad(set_to_none=False) left them
