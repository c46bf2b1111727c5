"""Wrappers, models that train each other, and precision."""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.conformance.case import APART, AVERAGE, BOTH, DDP, FSDP2, STEPS, Refused, case
from tests.conformance.cases.loops import sgd
from tests.conformance.world import OUTPUTS, WIDTH, F, World, loss_of, net


def train(world: World, **options: Any) -> Any:
    """Train the small model with DDP of these options."""
    return train_wrapped(world, world.wrap(net(), **options))


def train_wrapped(world: World, model: Any) -> Any:
    """Train what is wrapped already."""
    optimizer = sgd(model)
    world.start(model, optimizer)
    for batch in world.batches(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return model


@case(DDP, quick=True)
def static_graph(world: World) -> Any:
    """`static_graph=True`"""
    return train(world, static_graph=True)


@case(
    DDP,
    Refused("ScriptError", "static_graph=True, and its first backward pass"),
    steps=None,
)
def static_graph_and_accumulation(world: World) -> Any:
    """`static_graph=True` and `no_sync`, from the first pass on"""
    model = world.wrap(net(), static_graph=True)
    optimizer = sgd(model)
    world.start(model, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        with world.no_sync(model):
            (loss_of(model, world.batch(2 * step)) / 2).backward()
        (loss_of(model, world.batch(2 * step + 1)) / 2).backward()
        optimizer.step()
    return model


@case(DDP)
def bucket_views(world: World) -> Any:
    """`gradient_as_bucket_view=True`"""
    return train(world, gradient_as_bucket_view=True)


@case(DDP)
def needless_find_unused(world: World) -> Any:
    """`find_unused_parameters=True` where all are used"""
    return train(world, find_unused_parameters=True)


@case(DDP, Refused("RuntimeError", "register_comm_hook"))
def own_comm_hook(world: World) -> Any:
    """A communication hook of the script's own"""
    model = world.wrap(net())
    if not world.is_oracle:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    return train_wrapped(world, model)


def _joined(world: World, steps: int) -> Any:
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    with contextlib.nullcontext() if world.is_oracle else Join([model]):
        for batch in world.batches(steps):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    return model


@case(DDP)
def join_of_even_inputs(world: World) -> Any:
    """torch's `Join`, where inputs are even after all"""
    return _joined(world, STEPS)


@case(
    DDP,
    Refused("ScriptError", "torch's Join goes on"),
    steps=None,
    ranks=(2, 1),
    within_s=12,
)
def join_of_uneven_inputs(world: World) -> Any:
    """torch's `Join`, where a site's ranks have unlike numbers of batches"""
    return _joined(world, STEPS - (world.rank == 1))


@case(DDP, ranks=(1, 2))
def zero_redundancy(world: World) -> Any:
    """`ZeroRedundancyOptimizer`"""
    with warnings.catch_warnings(action="ignore"):  # of torch.jit, which it imports
        from torch.distributed.optim import ZeroRedundancyOptimizer

    model = world.wrap(net())
    optimizer = (
        torch.optim.AdamW(model.parameters(), lr=0.01)
        if world.is_oracle
        else ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    )
    world.start(model, optimizer)
    for batch in world.batches(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return model


@case(DDP)
def wrapper_inside_a_module(world: World) -> Any:
    """A wrapper inside a larger module"""
    model = nn.ModuleDict({"core": world.wrap(net())})
    return train_wrapped(world, model["core"])


# ---------------------------------------------------------------- several models


@case(BOTH, quick=DDP)
def gan(world: World) -> Any:
    """A GAN: two models and two optimizers"""
    judge = nn.Sequential(nn.Linear(OUTPUTS, 5), nn.Tanh(), nn.Linear(5, 1))
    maker = world.wrap(nn.Sequential(OrderedDict(maker=net())))
    critic = world.wrap(nn.Sequential(OrderedDict(critic=judge)))
    optimizers = [sgd(maker), sgd(critic)]
    world.start([maker, critic], optimizers)
    for inputs, real in world.batches(STEPS):
        optimizers[1].zero_grad()
        made = maker(inputs)
        (critic(made.detach()).mean() - critic(real).square().mean()).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        (-critic(made).mean()).backward()
        optimizers[0].step()
    return [maker, critic]


@case(DDP)
def gan_of_many_critic_steps(world: World) -> Any:
    """A GAN whose critic steps three times as often, with a gradient penalty"""
    maker = world.wrap(net())
    critic = world.wrap(nn.Sequential(nn.Linear(OUTPUTS, 5), nn.Tanh(), nn.Linear(5, 1)))
    optimizers = [sgd(maker, lr=0.02), sgd(critic, lr=0.02)]
    world.start([maker, critic], optimizers)
    for step in range(STEPS):
        for micro in range(3):
            inputs, real = world.batch(3 * step + micro)
            optimizers[1].zero_grad()
            with torch.no_grad():
                made = maker(inputs)
            mixed = (0.5 * made + 0.5 * real).requires_grad_()
            (grad,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
            penalty = (grad.norm(dim=1) - 1).square().mean()
            (critic(made).mean() - critic(real).mean() + penalty).backward()
            optimizers[1].step()
        optimizers[0].zero_grad()
        (-critic(maker(world.batch(3 * step)[0])).mean()).backward()
        optimizers[0].step()
    return [maker, critic]


@case(DDP)
def two_models_one_loss(world: World) -> Any:
    """Two wrapped models, one loss and one optimizer"""
    first, second = world.wrap(net()), world.wrap(nn.Linear(OUTPUTS, OUTPUTS))
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    world.start([first, second], optimizer)
    for inputs, targets in world.batches(STEPS):
        optimizer.zero_grad()
        F.mse_loss(second(first(inputs)), targets).backward()
        optimizer.step()
    return [first, second]


@case(
    DDP,
    Refused("NOT_ATTACHED", r"parameter 6 of group 0 \[3, 3\]"),
)
def forgotten_model(world: World) -> Any:
    """A second wrapped model that `attach` is not given, in the same optimizer"""
    first, second = world.wrap(net()), world.wrap(nn.Linear(OUTPUTS, OUTPUTS))
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    world.start(first, optimizer)
    for inputs, targets in world.batches(STEPS):
        optimizer.zero_grad()
        F.mse_loss(second(first(inputs)), targets).backward()
        optimizer.step()
    return [first, second]


@case(DDP, Refused("NOT_ATTACHED", r"parameter 0 of group 1 \[3\]"))
def loss_with_parameters(world: World) -> Any:
    """A loss that has parameters, in the same optimizer, which nothing wraps"""
    model, scales = world.wrap(net()), nn.Parameter(torch.ones(OUTPUTS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.add_param_group({"params": [scales]})
    world.start(model, optimizer)
    for inputs, targets in world.batches(STEPS):
        optimizer.zero_grad()
        F.mse_loss(model(inputs) * scales, targets).backward()
        optimizer.step()
    return model


@case(DDP)
def loss_with_parameters_averaged_by_hand(world: World) -> Any:
    """A loss that has parameters, whose gradients the script averages by `site.all_reduce`"""
    model, scales = world.wrap(net()), nn.Parameter(torch.ones(OUTPUTS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.add_param_group({"params": [scales]})
    world.start(model, optimizer)
    for inputs, targets in world.batches(STEPS):
        optimizer.zero_grad()
        F.mse_loss(model(inputs) * scales, targets).backward()
        world.site.all_reduce([scales.grad], exact=True)
        optimizer.step()
    return [model, nn.ParameterList([scales])]


@case(DDP)
def probe_of_each_rank(world: World) -> Any:
    """A small model beside the large one, of each rank's own, with an optimizer of its own"""
    model, probe = world.wrap(net()), nn.Linear(OUTPUTS, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = torch.optim.SGD(probe.parameters(), lr=0.1)
    world.start(model, optimizer)
    for inputs, targets in world.batches(STEPS):
        optimizer.zero_grad()
        outputs = model(inputs)
        F.mse_loss(outputs, targets).backward()
        optimizer.step()
        own.zero_grad()
        probe(outputs.detach()).square().mean().backward()
        own.step()
    return model


@case(DDP)
def gan_with_one_optimizer(world: World) -> Any:
    """Two models that take turns, and one optimizer of both, whose old gradients stay"""
    maker, critic = world.wrap(nn.Linear(WIDTH, OUTPUTS)), world.wrap(nn.Linear(OUTPUTS, 1))
    optimizer = torch.optim.SGD([*maker.parameters(), *critic.parameters()], lr=0.1)
    world.start([maker, critic], optimizer)
    for step, (inputs, targets) in enumerate(world.batches(STEPS)):
        if step % 2:
            critic.zero_grad()
            critic(targets).square().mean().backward()
        else:
            maker.zero_grad()
            F.mse_loss(maker(inputs), targets).backward()
        optimizer.step()
    return [maker, critic]


# ---------------------------------------------------------------- precision


def _by_parts_in_bf16(world: World) -> Any:
    model = net()
    optimizer = sgd(model)
    for inputs, targets in world.batches(STEPS):
        optimizer.zero_grad()
        for part in zip(inputs.chunk(2), targets.chunk(2), strict=True):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, part) / 2
            loss.backward()
        optimizer.step()
    return model


@case(DDP, quick=True, oracle=_by_parts_in_bf16, beside=APART)
def autocast_bf16(world: World) -> Any:
    """AMP: autocast to bf16, float32 weights"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for batch in world.batches(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
    return model


def _scaled(world: World, *, inf_at: int | None) -> Any:
    model = world.wrap(net())
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    world.start(model, optimizer)
    for step, batch in enumerate(world.batches(STEPS)):
        optimizer.zero_grad()
        is_bad = step == inf_at and (world.is_oracle or world.rank == 1)
        scaler.scale(loss_of(model, batch) * (1e38 if is_bad else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    return model


@case(BOTH, quick=DDP)
def grad_scaler(world: World) -> Any:
    """AMP: `GradScaler`"""
    return _scaled(world, inf_at=None)


@case(BOTH)
def grad_scaler_and_inf(world: World) -> Any:
    """`GradScaler`, and a gradient of one rank that is infinite: all skip the step"""
    return _scaled(world, inf_at=1)


@case(
    AVERAGE,
    Refused("ScriptError", "a GradScaler decides by this rank's own gradients"),
    steps=None,
)
def grad_scaler_on_averages(world: World) -> Any:
    """`GradScaler` with `site.average_gradients`, and a gradient of one rank that is infinite"""
    return _scaled(world, inf_at=1)


@case(AVERAGE)
def grad_scaler_that_is_off_on_averages(world: World) -> Any:
    """`GradScaler(enabled=False)` with `site.average_gradients`"""
    model = world.wrap(net())
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    world.start(model, optimizer)
    for batch in world.batches(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch)).backward()
        scaler.step(optimizer)
        scaler.update()
    return model


def _scaled_and_averaged(world: World) -> Any:
    model = world.wrap(net())
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    if not world.is_oracle:
        world.site.broadcast(model)
    for step, batch in enumerate(world.batches(STEPS)):
        optimizer.zero_grad()
        is_bad = step == 1 and (world.is_oracle or world.rank == 1)
        scaler.scale(loss_of(model, batch) * (1e38 if is_bad else 1.0)).backward()
        if not world.is_oracle:
            world.site.all_reduce([each.grad for each in model.parameters()])
        scaler.step(optimizer)
        scaler.update()
    return model


@case(AVERAGE, steps=None)
def grad_scaler_after_all_reduce(world: World) -> Any:
    """`GradScaler`, gradients averaged by `site.all_reduce` before it, one of which is infinite"""
    return _scaled_and_averaged(world)


@case(DDP)
def unscaled_and_clipped(world: World) -> Any:
    """`GradScaler.unscale_`, then clipping by the site's norm"""
    model = world.wrap(net())
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    world.start(model, optimizer)
    for batch in world.batches(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch)).backward()
        scaler.unscale_(optimizer)
        norm = world.site.clip_grad_norm_(0.1, loss_scale=scaler.get_scale())
        world.note(torch.tensor(norm))
        scaler.step(optimizer)
        scaler.update()
    return model


def _policy(world: World, policy: MixedPrecisionPolicy) -> Any:
    model = net()
    if world.is_oracle:
        return model
    fully_shard(model, mp_policy=policy)
    return model


@case(FSDP2, ranks=(1, 2))
def reduced_in_float32(world: World) -> Any:
    """`MixedPrecisionPolicy` that reduces in float32"""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    return train_wrapped(world, _policy(world, policy))


@case(FSDP2, Refused("TypeError", "reduce_dtype=torch.float32"), ranks=(1, 2))
def reduced_in_float16(world: World) -> Any:
    """`MixedPrecisionPolicy` that reduces in float16"""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    return train_wrapped(world, _policy(world, policy))


@case(FSDP2)
def kept_unsharded(world: World) -> Any:
    """`reshard_after_forward=False`"""
    model = net()
    if not world.is_oracle:
        for each in (model[0], model[2], model):
            fully_shard(each, reshard_after_forward=False)
    return train_wrapped(world, model)


@case(DDP)
def own_process_group(world: World) -> Any:
    """A process group of the script's own"""
    if world.is_oracle:
        return train(world)
    return train(world, process_group=dist.new_group())
