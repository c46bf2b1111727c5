"""What ranks run in tests of training without DistributedDataParallel.

A plain loop, and fully_shard.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.autograd import backward
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from isthmus.sites.worker.api.site import Site
from tests.fakes.ranks import wait_for_all_ranks
from tests.sites.worker_programs import Net, build, join_site, loss_of, tokens_of

NUM_STEPS = 10
LEARNING_RATE = 0.1
CLIP_NORM = 0.5
LATE_STEP = 4
"""From here on the last rank, and nobody else, uses one more parameter."""


class Odd(nn.Module):
    """The net, a parameter that few use, and one that nobody does."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net = build(seed)
        self.late = nn.Parameter(torch.full((3,), float(seed)))
        self.never = nn.Parameter(torch.ones(2))

    def loss(self, step: int, rank: int, last_rank: int, micro: int) -> torch.Tensor:
        loss = loss_of(self.net, step, rank, micro, torch.float32)
        return loss + self.late.sum() if (rank == last_rank and step >= LATE_STEP) else loss


def train_plain(folder: Path, name: str) -> None:
    """Ten steps of two micro-batches each; losses are averaged by the site, too."""
    site = join_site()
    model = Odd(seed=site.index)
    optimizer = torch.optim.SGD(
        model.named_parameters(), lr=LEARNING_RATE, momentum=0.9, weight_decay=0.1
    )
    site.average_gradients(optimizer)
    site.broadcast(model)
    losses, rank = [], site.global_rank
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = torch.zeros(())
        for micro in (0, 1):
            site.count_tokens(tokens_of(step, rank))
            part = model.loss(step, rank, site.global_world_size - 1, micro) / 2
            backward(part)
            loss += part.detach()
        site.all_reduce([loss], tokens=tokens_of(step, rank), exact=True)
        losses.append(float(loss))
        optimizer.step()
    site.leave()
    torch.save({"losses": losses, "final": model.state_dict()}, folder / f"{name}.pt")


def train_sharded(folder: Path, name: str) -> None:
    """Ten steps, from the third on of two micro-batches.

    Gradients are clipped by the global norm.
    """
    site = join_site()
    net = shard(build(seed=site.index))
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE, momentum=0.9)
    site.attach(net, optimizer)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        losses.append(_sharded_step(site, net, step))
        norms.append(float(_clip(site, net)))
        optimizer.step()
    final = {name: _whole(value) for name, value in net.state_dict().items()}
    site.leave()
    torch.save({"losses": losses, "norms": norms, "final": final}, folder / f"{name}.pt")


def _clip(site: Site, net: Net) -> torch.Tensor:
    """Clip by the global norm, as docs/integration.md has it for sites of unequal size."""
    if site.global_world_size == site.num_sites * site.world_size:
        return _whole(nn.utils.clip_grad_norm_(net.parameters(), CLIP_NORM))
    grads = [each.grad for each in net.parameters() if each.grad is not None]
    norm = _whole(nn.utils.get_total_norm(grads))
    site.all_reduce([norm], exact=True)
    nn.utils.clip_grads_with_norm_(net.parameters(), CLIP_NORM, norm)
    return norm


def _sharded_step(site: Site, net: Net, step: int) -> float:
    assert isinstance(net, FSDPModule)
    rank, loss = site.global_rank, torch.zeros(())
    num_micro = 1 if step < 2 else 2
    for micro in range(num_micro):
        net.set_requires_gradient_sync(micro == num_micro - 1)
        if micro == 0:
            site.count_tokens(tokens_of(step, rank))
        part = loss_of(net, step, rank, micro, torch.float32) / num_micro
        if tokens_of(step, rank) == 0:
            part = part * float("nan")
        backward(part)
        loss += part.detach()
    site.all_reduce([loss], tokens=tokens_of(step, rank), exact=True)
    return float(loss)


def train_sharded_wrongly(folder: Path, name: str) -> None:
    """Leave a parameter out of what is sharded."""
    site = join_site()
    net = nn.Linear(6, 6)
    fully_shard(net, ignored_params={net.bias})
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    _note_type_error(folder, name, site, net, optimizer)


def train_with_an_early_optimizer(folder: Path, name: str) -> None:
    """Let an optimizer step as soon as a gradient is there."""
    site = join_site()
    net = nn.Linear(6, 6)
    fully_shard(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    net.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())  # type: ignore[no-untyped-call]
    _note_type_error(folder, name, site, net, optimizer)


def _note_type_error(
    folder: Path, name: str, site: Site, net: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    try:
        site.attach(net, optimizer)
    except TypeError as error:
        torch.save({"text": str(error)}, folder / f"{name}.pt")
    wait_for_all_ranks()


def shard(net: Net) -> Net:
    """Shard the first layer by itself, and all others together."""
    fully_shard(net.layers[0])
    fully_shard(net)
    return net


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
