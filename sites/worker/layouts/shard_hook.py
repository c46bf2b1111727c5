"""Sends gradients of fully_shard (FSDP2) to the other sites while backward goes on.

Whatever the layout: parameters may be sharded by rows, by tensor or expert parallelism, replicated,
or be of another pipeline stage. Each gradient is there when its parameter's hook is called, with
what this rank holds of the mean over the site; buckets leave in the agreed order as their
parameters are there.

fully_shard weighs ranks alike. Where losses are means of unlike numbers of tokens, that is too late
to make good: in its place, a reduce-scatter of ours weighs them. Losses that are sums need none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from isthmus.protos.errors import ScriptError
from isthmus.sites.local.regions import FLOAT_BYTES
from isthmus.sites.worker.checks.arguments import check_not_complex
from isthmus.sites.worker.checks.left_gradients import check_zeroed
from isthmus.sites.worker.checks.torch_calls import call_of, in_backward
from isthmus.sites.worker.exchange.bucket_pipeline import EVERYBODY, BucketPipeline, SharedBy
from isthmus.sites.worker.exchange.collectives import Ranks, reduce_scatter_flat
from isthmus.sites.worker.exchange.exactness import Exactness
from isthmus.sites.worker.exchange.routes import Route, participants
from isthmus.sites.worker.exchange.sharding import is_sharded, local_of
from isthmus.sites.worker.exchange.step_records import TokenCount
from isthmus.sites.worker.exchange.used_flags import UsedFlags
from isthmus.sites.worker.layouts.canonical import Agreed, BucketCut, Held, cut_flags
from isthmus.sites.worker.layouts.fully_sharded import (
    ShardGroup,
    awaits_callback,
    groups_of,
    named_tensors,
    parameters_now,
    sharded_modules,
    states_of,
    tell_reduced,
    twin_buffers,
)
from isthmus.sites.worker.layouts.gradient_hooks import GradientHook, check_is_outermost
from isthmus.sites.worker.layouts.sharded_state import held_pieces, held_tensors


@dataclass(slots=True)
class OwnBucket:
    """A bucket that this rank takes part in."""

    cut: BucketCut
    layout: int
    sharing: SharedBy
    route: Route
    missing: set[str]
    """Parameters of this rank whose gradients have not come in this round."""


class ShardHook(GradientHook):
    """The hook of one rank. Each time that gradients are synchronised is one round."""

    def __init__(
        self,
        pipeline: BucketPipeline,
        tokens: TokenCount,
        models: Sequence[nn.Module],
        *,
        bucket_bytes: int,
        exactness: Exactness,
        data_ranks: Ranks | None = None,
        is_summed: bool = False,
    ) -> None:
        """Hook into the model; `agree` comes next.

        `bucket_bytes` is float32 of a bucket, over all ranks. `data_ranks` are those of the site
        with data of their own, this one among them, whose tokens are counted; None: the most over
        which fully_shard reduces a gradient of this rank.

        Raises:
            TypeError: a parameter cannot be averaged.
        """
        super().__init__(tokens, is_summed=is_summed)
        self._pipeline = pipeline
        self._exactness = exactness
        self._bucket_numel = max(1, bucket_bytes // FLOAT_BYTES)
        self._groups = self._find_groups(models)
        self._states = states_of(models)
        self._models = models
        self.own: dict[str, torch.Tensor] = named_tensors(models)
        """Parameters and buffers that this rank holds any of, by name."""
        self.twins = twin_buffers(models)
        """Buffers that another part of a pipeline has on this rank, too."""
        self._trained: dict[str, torch.Tensor] = {}
        for name, each in self.own.items():
            if isinstance(each, nn.Parameter) and each.requires_grad:
                self._check(name, each)
                self._trained[name] = each
        self.crossed |= {id(each) for each in self._trained.values()}
        most = max((each.ranks for each in self._groups.values()), key=len, default=())
        self.data_ranks: Ranks = data_ranks or most or (dist.get_rank(),)
        self._is_counted_alike = False
        self._scales: dict[str, float] = {}
        """What makes a gradient the mean over all ranks with data, where fully_shard's is not."""
        self.groups: set[Ranks] = set()
        """The ranks that share a bucket whose elements move among them, of all buckets."""
        self.cut = 0
        """What tells apart how all are cut into buckets, and which ranks share each."""
        self._buckets: list[OwnBucket] = []
        self._flags: UsedFlags | None = None
        self._flags_number = 0
        self._sharing_flags = EVERYBODY
        self._tied: set[str] = set()
        """Names of those that other parts of a pipeline have, too."""
        self._arrived: set[str] = set()
        self._is_on_cuda = False
        self._streams: set[torch.cuda.Stream] = set()
        """CUDA streams that compute this round's gradients: each model, and HSDP, has its own."""
        self._num_submitted = 0
        self._is_open = False
        self._reduced: set[int] = set()
        """Parameters whose gradients a pipeline's schedule has reduced, by id."""
        self._taken = 0.0
        self._futures: list[torch.futures.Future[torch.Tensor]] = []
        self._hook_in(models)

    def _find_groups(self, models: Sequence[nn.Module]) -> Mapping[int, ShardGroup]:
        """Return over which ranks the gradient of each parameter is reduced, by its id."""
        return groups_of(models)

    def held(self) -> list[Held]:
        """Return what this rank tells the others of its site."""
        return held_tensors(self.own, self._exactness)

    def agree(self, agreed: Agreed) -> None:
        """Cut the agreed list into buckets.

        Raises:
            TypeError: fully_shard does not make a mean over all ranks with data.
        """
        rank = dist.get_rank()
        for name, parameter in self._trained.items():
            held = agreed.here.holders[name].group_of(rank)
            assert held is not None
            self._check_mean(name, self._groups[id(parameter)].ranks, held[1])
        self._tied = {name for name in self._trained if agreed.here.holders[name].is_tied}
        cuts = agreed.cut_gradients(self._bucket_numel)
        self.cut = agreed.identity(cuts)
        flags = cut_flags(agreed.law, len(cuts))
        self._flags_number = flags.number
        devices = (local_of(each).device for each in self._trained.values())
        device = next(devices, torch.device("cpu"))
        self._is_on_cuda = device.type == "cuda"
        self._flags = UsedFlags(flags.names, self._trained, device)
        *shared_by, self._sharing_flags = agreed.shared_by([*cuts, flags], rank)
        for cut, sharing in zip(cuts, shared_by, strict=True):
            ranks = participants(cut.parts(agreed.here))
            if not cut.is_rank_major:
                self.groups.add(ranks)
            if rank in ranks:
                way = cut.route(agreed.here, rank)
                self._buckets.append(OwnBucket(cut, cut.layout, sharing, way, set()))

    def _hook_in(self, models: Sequence[nn.Module]) -> None:
        """Have this rank's parameters tell of their gradients, and weigh ranks by tokens."""
        self._undo.append(tell_reduced(models, self._note_reduced))
        for name, parameter in self._trained.items():
            handle = parameter.register_post_accumulate_grad_hook(self._collector(name))  # type: ignore[no-untyped-call]
            self._undo.append(handle.remove)
        if not self._is_summed:
            self._weigh_means()

    def _weigh_means(self) -> None:
        """Have fully_shard weigh ranks by their tokens.

        What cannot be weighed, each rank has to count equally many tokens for.
        """
        for each in {id(each.module): each for each in self._groups.values()}.values():
            if each.module is not None and each.is_weighed:
                comm = WeightedReduceScatter(self._weigh, each.num_replicas)
                own = each.record._reduce_scatter_comm
                self._undo.append(partial(each.module.set_custom_reduce_scatter, own))
                each.module.set_custom_reduce_scatter(comm)  # type: ignore[arg-type] # by its methods
        for name, parameter in self._trained.items():
            group = self._groups[id(parameter)]
            is_whole = set(group.ranks) == set(self.data_ranks)
            if not (group.is_weighed and is_whole):
                self._is_counted_alike = len(self.data_ranks) > 1
            if not (group.is_weighed or is_whole):
                self._scales[name] = len(group.ranks) / len(self.data_ranks)

    def _check_mean(self, name: str, averaged: Ranks, copies: Ranks) -> None:
        """Refuse a parameter of which ranks with data of their own have copies, and no mean.

        Raises:
            TypeError: and what to do.
        """
        if not set(copies) & set(self.data_ranks) <= set(averaged):
            raise TypeError(
                f"site.synchronize: fully_shard makes the mean of {name} over ranks "
                f"{list(averaged)}, but ranks {list(self.data_ranks)} have data of their own, and "
                f"{list(copies)} hold the same of it: call fully_shard with a mesh of all of them"
            )

    def gradients(self) -> list[torch.Tensor]:
        """Return what this rank holds of each gradient that there is: views."""
        grads = [each.grad for each in self._trained.values()]
        return [local_of(each) for each in grads if each is not None]

    def parameters_now(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the parameters that the models have now, new ones too, with their names."""
        return parameters_now(self._models)

    def finish(self, *_: object) -> None:
        """End a round that is still open: what an optimizer calls before each step."""
        if self._is_open:
            self._end_backward()

    def shard_in(self, tensors: Sequence[torch.Tensor]) -> str | None:
        """Return the parameter of which one of these is a shard, or of whose gradient."""
        memory = {each.untyped_storage().data_ptr() for each in tensors if each.numel()}
        for name, each in self._trained.items():
            for of in (each, each.grad):
                if (
                    of is not None
                    and local_of(of).numel() < of.numel()
                    and local_of(of).untyped_storage().data_ptr() in memory
                ):
                    return name
        return None

    def _check(self, name: str, parameter: torch.Tensor) -> None:
        """Refuse a parameter whose gradient would not be there when its hook is called.

        Raises:
            TypeError: and what to do.
        """
        where = f"site.synchronize: parameter {name}"
        check_not_complex(name, parameter)
        self._check_layout(where, parameter)
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise TypeError(
                f"{where} has a hook that runs when its gradient is there (an optimizer in "
                "backward?), before the other sites' part has come: take it off"
            )

    def _check_layout(self, where: str, parameter: torch.Tensor) -> None:
        """Refuse a parameter that fully_shard does not manage.

        Raises:
            TypeError: and what to do; it begins with `where`.
        """
        if not is_sharded(parameter) or id(parameter) not in self._groups:
            raise TypeError(
                f"{where}: it is not sharded by fully_shard: call fully_shard on a module that has "
                "it, with a mesh of the ranks that have data of their own (of one rank, if it is "
                "the only one)"
            )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Have backward passes accumulate gradients at this rank, and nothing cross."""
        for each in sharded_modules(self._models):
            each.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for each in sharded_modules(self._models):
                each.set_requires_gradient_sync(True, recurse=False)

    # ---------------------------------------------------------------- a round

    def _weigh(self, values: torch.Tensor, num_replicas: int) -> None:
        """Scale a rank's gradients so that their sum over the site's ranks is the site's mean.

        Over `num_replicas` groups of ranks, fully_shard makes the mean afterwards.
        """
        self._begin()
        if self._taken == 0.0:
            values.zero_()  # Not a product: a loss over no tokens is often NaN.
        else:
            values.mul_(num_replicas * self._taken / self._pipeline.site_tokens()[0])

    def _begin(self, first: str | None = None) -> None:
        """Open a round with the first gradients of a backward pass; `first` is there already."""
        if self._is_open:
            return
        checked = self._trained if self._is_summed else self._tied
        parameters = [self._trained[name] for name in checked if name != first]
        check_zeroed(parameters, is_summed=self._is_summed)
        if in_backward():
            torch.autograd.Variable._execution_engine.queue_callback(self._end_after_others)
        else:
            check_schedule()
        self._taken = self._tokens.take()
        self._pipeline.begin(
            self._taken,
            is_gradient=True,
            is_summed=self._is_summed,
            counted_by=self.data_ranks,
            is_counted_alike=self._is_counted_alike,
        )
        self._arrived.clear()
        self._streams.clear()
        self._reduced.clear()
        self._num_submitted = 0
        for each in self._buckets:
            each.missing = {name for name in each.cut.names if name in self._trained}
        self._is_open = True

    def _collector(self, name: str) -> Callable[[torch.Tensor], None]:
        def collect(parameter: torch.Tensor) -> None:
            if not self._crosses():
                return
            self._begin(name)
            if len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ()) > 1:
                raise ScriptError(
                    f"parameter {name} has got another hook that runs when its gradient is there (an "
                    "optimizer in backward?), before the other sites' part has come: take it off"
                )
            if name in self._arrived:
                raise ScriptError(
                    f"the gradient of {name} came twice in one backward pass: synchronise in the "
                    "last micro-batch only (set_requires_gradient_sync)"
                )
            if name in self._scales:
                local_of(self._trained[name].grad).mul_(self._scales[name])  # type: ignore[arg-type]
            self._arrive(name)

        return collect

    def _crosses(self) -> bool:
        """Whether gradients of this backward pass cross."""
        return True  # else fully_shard calls no hook

    def _note_reduced(self, parameters: Set[int]) -> None:
        """Note that fully_shard has reduced a model's part; end the round with the last one."""
        if in_backward():
            self._end_after_others()
            return
        if self._is_open or schedule_trains():
            self._note_part(parameters)

    def _note_part(self, parameters: Set[int]) -> None:
        """Note that a pipeline's schedule is through with a model's part; end with the last one."""
        self._begin()  # other ranks wait for this one, though its part may have no gradient
        self._reduced |= parameters
        if all(id(each) in self._reduced for each in self._trained.values()):
            self._end_backward()

    def _arrive(self, name: str) -> None:
        """Note that a gradient is there; submit what it completes."""
        self._arrived.add(name)
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

    def _submit(self, bucket: OwnBucket) -> None:
        for stream in self._streams:
            torch.cuda.current_stream().wait_stream(stream)
        flats: Mapping[str, torch.Tensor] = {
            name: _flat_gradient(name, self._trained[name])
            for name in bucket.cut.names
            if name in self._trained
        }
        divisors = [self._groups[id(self._trained[name])].divisor for name in flats]
        future = self._pipeline.submit(
            held_pieces(bucket.cut, bucket.route, flats),
            bucket.layout,
            exact=bucket.cut.exact,
            route=bucket.route,
            number=bucket.cut.number,
            sharing=bucket.sharing,
            factors=divisors if self._is_summed else (),
            named=[*flats.items()],
        )
        self._futures.append(future)

    def _end_after_others(self) -> None:
        """End the round once every model has reduced what fully_shard leaves to its own callback.

        Of several models, a later one's may have been queued after ours.
        """
        torch.autograd.Variable._execution_engine.queue_callback(self._end_if_reduced)

    def _end_if_reduced(self) -> None:
        """End the round, unless this is the end of a nested backward pass: the outer one goes on.

        Reentrant checkpointing has such. fully_shard's own callback, of the outer one, is to come.
        """
        if self._is_open and not awaits_callback(self._states):
            check_is_outermost(len(self._models))
            self._end_backward()

    def _end_backward(self) -> None:
        unused = [name for name in self._trained if name not in self._arrived]
        made = {name for name in unused if self._trained[name].grad is None}
        for name in made:
            self._trained[name].grad = torch.zeros_like(self._trained[name], requires_grad=False)
        for name in unused:
            self._arrive(name)
        assert self._flags is not None, "agree comes first"
        self._flags.submit(
            self._pipeline, made, number=self._flags_number, sharing=self._sharing_flags
        )
        self._is_open = False
        futures, self._futures = self._futures, []
        finished = self._pipeline.wait(has_norm=True)
        self._end_round(finished)
        for future in futures:
            future.wait()  # on CUDA, results are only enqueued: this stream must wait for them
        self._flags.wait()
        if made or finished.is_catching_up:
            # What no rank of any site has used, of those that take part, has no gradient.
            for name in self._trained.keys() - self._flags.read():
                self._trained[name].grad = None


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


def check_schedule() -> None:
    """Refuse a pipeline's schedule that divides gradients after they have crossed.

    Called while it reduces them. torch tells its stage alone what they will be divided by.

    Raises:
        TypeError: and what to do.
    """
    check_undivided(_in_schedule().get("grad_scale_factor", 1))


def check_undivided(divisor: float) -> None:
    """Refuse gradients that a pipeline's schedule will divide by anything but 1.

    Raises:
        TypeError: and what to do.
    """
    if divisor != 1:
        raise TypeError(
            f"site.synchronize: the pipeline's schedule would divide gradients by {divisor} after "
            "they have crossed: give it scale_grads=False, and let loss_fn divide by the number of "
            "micro-batches"
        )


def schedule_trains() -> bool:
    """Whether a pipeline's schedule that reduces gradients has any; else it evaluates."""
    stage = _in_schedule().get("self")
    return bool(getattr(stage, "has_backward", False))


def _in_schedule() -> Mapping[str, Any]:
    """Return what is in the call by which a schedule has a stage reduce; {}: there is none."""
    return call_of("perform_reduce_grad")


class WeightedReduceScatter:
    """Reduce-scatter of a module's gradients, weighted by tokens, as FSDP calls its own."""

    def __init__(self, weigh: Callable[[torch.Tensor, int], None], num_replicas: int) -> None:
        self._weigh = weigh
        self._num_replicas = num_replicas

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a buffer, as FSDP itself would."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Sum what each rank has weighed.

        Raises:
            TypeError: FSDP was told to divide in a way of its own.
        """
        if op != dist.ReduceOp.AVG:
            raise TypeError(
                "site.synchronize: fully_shard would reduce gradients in another way than by their "
                "mean: use reduce_dtype=torch.float32 and no divide factor, or losses that are sums: "
                'synchronize(…, loss="sum")'
            )
        self._weigh(input_tensor, self._num_replicas)
        work: dist.Work | None = reduce_scatter_flat(
            output_tensor, input_tensor, group=group, async_op=async_op
        )
        return work
