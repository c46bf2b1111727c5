"""What cannot be averaged in sharded models is refused by its name, with the way out."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.autograd import backward
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from isthmus.protos.errors import LayoutMismatchError, ScriptError
from isthmus.sites.worker.api.site import Site
from isthmus.sites.worker.exchange.holdings import Dealt, Holding
from isthmus.sites.worker.exchange.sharding import whole_of
from isthmus.sites.worker.layouts.canonical import Entry, Held, SiteTensors, check_alike
from isthmus.sites.worker.layouts.shard_hook import ShardHook, check_schedule
from tests.fakes.lone_exchanges import RecordingLink
from tests.fakes.lone_sites import lone_site

pytestmark = pytest.mark.usefixtures("process_group")


def _sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _replicated() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _entry(name: str, *shape: int, kind: str = "trained") -> Entry:
    return Entry(name, shape, "torch.float32", 4, kind, exact=False)


def _held(name: str, mesh: tuple[int, ...], place: int, kind: str = "trained") -> Held:
    holding = Holding.of((4, 2), [Dealt(0, len(mesh), place)])
    return Held(_entry(name, 4, 2, kind=kind), holding, mesh, content=place)


def test_a_gradient_that_comes_twice_is_named(site: Site) -> None:
    model, optimizer = _sharded()
    site.attach(model, optimizer)
    weight = next(model.parameters())
    weight.grad = torch.zeros_like(weight)
    (told,) = weight._post_accumulate_grad_hooks.values()
    told(weight)  # as a pipeline's schedule does that reduces after each micro-batch
    with pytest.raises(ScriptError, match=r"gradient of 0.weight came twice in one backward"):
        told(weight)


def test_an_optimizer_in_backward_is_refused_before_and_after() -> None:
    site = lone_site(RecordingLink())
    model, optimizer = _sharded()
    weight = next(model.parameters())
    hook = weight.register_post_accumulate_grad_hook(lambda _: None)  # type: ignore[no-untyped-call]
    with pytest.raises(TypeError, match=r"parameter 0.weight has a hook that runs .* take it off"):
        site.attach(model, optimizer)
    hook.remove()
    site = lone_site(RecordingLink())
    site.attach(model, optimizer)
    weight.register_post_accumulate_grad_hook(lambda _: None)  # type: ignore[no-untyped-call]
    with pytest.raises(ScriptError, match=r"parameter 0.weight has got another hook"):
        backward(model(torch.ones(2, 3)).sum())
    site.leave()


def test_the_norm_is_of_all_that_crosses_and_clips(site: Site) -> None:
    model, optimizer = _sharded()
    with pytest.raises(RuntimeError, match=r"call site.attach first"):
        _ = site.grad_norm
    site.attach(model, optimizer)
    with pytest.raises(RuntimeError, match=r"no backward pass has"):
        _ = site.grad_norm
    backward(1024.0 * model(torch.ones(2, 3)).sum())
    grads = [each.grad for each in model.parameters() if each.grad is not None]
    assert len(grads) == 4
    norm = float(nn.utils.get_total_norm([whole_of(each) for each in grads]))
    assert site.grad_norm == pytest.approx(norm, rel=1e-6)
    for each in grads:
        each.div_(1024.0)  # as a GradScaler's unscale_
    clipped = site.clip_grad_norm_(0.5, loss_scale=1024.0)
    assert clipped == pytest.approx(norm / 1024.0, rel=1e-6)
    left = float(nn.utils.get_total_norm([whole_of(each) for each in grads]))
    assert left == pytest.approx(0.5, rel=1e-5)


class Stream:
    """Stands for a CUDA stream: knows which other streams it waits for."""

    def __init__(self) -> None:
        self.waits_for: set[Stream] = set()

    def wait_stream(self, other: Stream) -> None:
        self.waits_for.add(other)


def test_a_bucket_waits_for_all_streams_that_compute_its_gradients(
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """HSDP and fully_shard's others have unlike streams, as have two models."""
    model, optimizer = _sharded()
    site.attach(model, optimizer)
    hook = site._parts.attachment.hook
    assert isinstance(hook, ShardHook)
    hook._queue._is_on_cuda = True
    streams = [Stream() for _ in model.parameters()]
    for each, stream in zip(model.parameters(), streams, strict=True):
        monkeypatch.setattr("torch.cuda.current_stream", lambda stream=stream: stream)
        each.grad = torch.zeros_like(each)
        (told,) = each._post_accumulate_grad_hooks.values()
        told(each)
    assert {*streams[:-1]} <= streams[-1].waits_for, "the last gradient completes the bucket"


def test_a_sum_needs_its_tokens(site: Site) -> None:
    model, optimizer = _sharded()
    with pytest.raises(ValueError, match=r"want mean or sum, got 'all'"):
        site.attach(model, optimizer, loss="all")  # type: ignore[arg-type]
    site.attach(model, optimizer, loss="sum")
    site.count_tokens(4)
    backward(model(torch.ones(4, 3)).sum())
    bias = [*model.parameters()][-1].grad
    assert bias is not None
    assert whole_of(bias).tolist() == [1.0], "the mean over tokens"
    optimizer.zero_grad()
    with pytest.raises(ScriptError, match=r"losses are sums that need it"):
        backward(model(torch.ones(4, 3)).sum())


@pytest.mark.parametrize("is_sharded", [True, False], ids=["fsdp2", "ddp"])
def test_sums_are_not_added_to_what_an_earlier_pass_left(site: Site, *, is_sharded: bool) -> None:
    model, optimizer = _sharded() if is_sharded else _replicated()
    site.attach(model, optimizer, loss="sum")

    def learn() -> None:
        site.count_tokens(4)
        backward(model(torch.ones(4, 3)).sum())

    learn()
    optimizer.zero_grad(set_to_none=False)
    if not is_sharded:
        with model.no_sync():  # type: ignore[operator]
            learn()
    learn()
    bias = [*model.parameters()][-1].grad
    assert bias is not None
    assert whole_of(bias).tolist() == [1.0], "the mean over tokens, of all micro-batches"
    with pytest.raises(ScriptError, match=r"earlier backward pass .* call zero_grad, of"):
        learn()


def test_what_parts_of_a_pipeline_share_is_not_added_again(site: Site) -> None:
    """Each part would give all of what an earlier pass has left."""
    model, optimizer = _sharded()
    site.attach(model, optimizer)
    backward(model(torch.ones(4, 3)).sum())
    backward(model(torch.ones(4, 3)).sum())
    hook = site._parts.attachment.hook
    assert isinstance(hook, ShardHook)
    hook._tied = {"0.bias"}
    with pytest.raises(ScriptError, match=r"a pipeline share: each would add them again"):
        backward(model(torch.ones(4, 3)).sum())


def test_parts_of_a_pipeline_that_share_a_parameter_begin_with_one_value() -> None:
    first = [_held("embedding", (0,), 0), _held("layers.0", (0,), 0)]
    last = [_held("layers.1", (1,), 0), _held("embedding", (1,), 0)]
    tied = SiteTensors.of([first, last])
    assert [each.name for each in tied.entries] == ["layers.1", "embedding", "layers.0"]
    assert tied.holders["embedding"].is_tied
    last[1] = replace(last[1], content=1)
    with pytest.raises(TypeError, match=r"ranks 0 and 1 hold the same part of embedding, and not"):
        SiteTensors.of([first, last])


def test_ranks_with_unlike_buffers_are_no_parts_of_a_pipeline() -> None:
    """Their copies have one gradient, and no sum of two."""
    first = [_held("layers.0", (0,), 0), _held("seen", (0,), 0, kind="buffer")]
    assert not SiteTensors.of([first, [_held("layers.0", (1,), 0)]]).holders["layers.0"].is_tied


def test_a_gradient_that_is_reduced_over_unlike_parts_is_not_added_again() -> None:
    whole = replace(_held("shared", (0,), 0), mesh=(0, 1))
    ranks = [[whole, _held(f"experts.{rank}", (rank,), 0)] for rank in range(2)]
    with pytest.raises(TypeError, match=r"ranks 0 and 1 .* fully_shard reduces shared over both"):
        SiteTensors.of(ranks)


def test_a_parameter_that_only_some_parts_of_a_pipeline_freeze_is_refused() -> None:
    first = [_held("embedding", (0,), 0), _held("layers.0", (0,), 0)]
    last = [_held("embedding", (1,), 0, kind="frozen"), _held("layers.1", (1,), 0)]
    with pytest.raises(TypeError, match="embedding is trained on rank 0, and frozen on rank 1"):
        SiteTensors.of([first, last])


def test_a_pipeline_stage_that_trains_nothing_is_refused() -> None:
    stages = [[_held("embedding", (0,), 0, "frozen")], [_held("head", (1,), 0)]]
    with pytest.raises(TypeError, match=r"rank 0 has no parameter that is trained, and others"):
        SiteTensors.of(stages)


def test_empty_tensors_are_nobodys_shard(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = _sharded()
    site.attach(model, optimizer)
    # As of a bias with fewer elements than there are ranks.
    monkeypatch.setattr(
        "isthmus.sites.worker.layouts.shard_hook.local_of", lambda each: torch.empty(0)
    )
    site.all_reduce([torch.empty(0)])


def test_what_an_earlier_pass_left_stays_where_the_next_uses_a_parameter_no_more(
    site: Site,
) -> None:
    model = nn.ModuleList(
        nn.Sequential(OrderedDict({name: nn.Linear(3, 1)})) for name in ("first", "second")
    )
    for each in model:
        fully_shard(each, mesh=init_device_mesh("cpu", (1,)))
    site.attach([*model], torch.optim.SGD(model.parameters(), lr=0.1))
    for each in model:
        backward(each(torch.ones(2, 3)).sum())
    grads = [whole_of(each.grad).tolist() for each in model.parameters() if each.grad is not None]
    assert grads == [[[2.0, 2.0, 2.0]], [2.0]] * 2, "the first one's are there yet"


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ([_entry("a", 3)], "site east has a tensor b, site west has not"),
        ([_entry("a", 3), _entry("b", 2), _entry("c", 1)], "site west has a tensor c, site east"),
        ([_entry("a", 3), _entry("b", 2, 1)], r"shape of b is \(2, 1\) at site west, and \(2,\)"),
        (
            [_entry("a", 3), _entry("b", 2, kind="frozen")],
            "kind of b is frozen at site west, and trained at site east",
        ),
    ],
)
def test_sites_that_differ_are_told_in_what(entries: list[Entry], told: str) -> None:
    law = [_entry("a", 3), _entry("b", 2)]
    with pytest.raises(LayoutMismatchError, match=told):
        check_alike("west", entries, "east", law)


def test_a_pipeline_of_a_torch_that_does_not_tell_is_refused(site: Site) -> None:
    """As 2.9 is, whose schedules reduce inside a stage's last backward pass."""

    def run_post_backward(fsdp_module: nn.Module) -> None:
        check_schedule()

    with pytest.raises(TypeError, match="pipelines of PyTorch"):
        run_post_backward(nn.Linear(3, 1))
    check_schedule()

    class Stage:
        def forward_one_chunk(self, module: nn.Module) -> None:
            module(torch.zeros(1, 3))

    model = nn.Linear(3, 1)
    site.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match="pipelines of PyTorch"):
        Stage().forward_one_chunk(model)
