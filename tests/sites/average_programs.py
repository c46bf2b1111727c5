"""What ranks run in tests of averages without DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.autograd import backward
from torch.nn.parallel import DistributedDataParallel

from tests.fakes.ranks import wait_for_all_ranks
from tests.sites.worker_programs import join_site

BUCKET_BYTES = 64 << 10
"""The least there is."""


def tensors_of(global_rank: int, call: int) -> list[torch.Tensor]:
    """Return a list that only these numbers determine: every shape, dtype and stride there is."""
    generator = torch.Generator().manual_seed(100 * call + global_rank)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return [
        draw(150, 151),  # more than a bucket
        draw(3),
        draw(1)[0],
        draw(0),
        draw(4, 0, 2),
        draw(5, 6).t(),
        draw(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        draw(40).to(torch.bfloat16),
        draw(9).to(torch.float64),
        draw(6, 8)[:, ::2],
        draw(3, 3).requires_grad_(),
    ]


def tokens_of(global_rank: int, call: int) -> float:
    """Return unequal weights.

    Rank 1 contributes nothing to call 1, whose tensors hold NaN there.
    """
    return 0.0 if (global_rank, call) == (1, 1) else 0.5 + global_rank + call


def averages(folder: Path, name: str) -> None:
    """Two lists, alternating with others: an empty one, one without elements, and exact scalars."""
    site = join_site()
    found = []
    for call in range(3):
        tensors = tensors_of(site.global_rank, call)
        if tokens_of(site.global_rank, call) == 0.0:
            for each in tensors:
                each.detach().fill_(float("nan"))
        site.all_reduce(tensors, tokens=tokens_of(site.global_rank, call))
        found.append([each.detach().clone() for each in tensors])
        site.all_reduce([])
        site.all_reduce([torch.empty(0)])
        loss = torch.tensor(float(site.global_rank))
        site.all_reduce([loss], exact=True)
        found[-1].append(loss)
    site.leave()
    torch.save(found, folder / f"{name}.pt")


def averages_in_place(folder: Path, name: str) -> None:
    """The same numbers in memory of the rank's own, and in what it shares; pairs of each call."""
    site = join_site()
    in_place = site.empty(151, 150)
    found = []
    for call in range(3):
        copied = tensors_of(site.global_rank, call)[0]
        in_place.copy_(copied.view(151, 150))
        for each in (copied, in_place):
            site.all_reduce([each], tokens=tokens_of(site.global_rank, call))
        found.append((copied, in_place.clone()))
    shared = site._parts.averaging.shared
    lies_there = shared is not None and shared.find([in_place.flatten()]) is not None
    site.leave()
    torch.save({"pairs": found, "lies_there": lies_there}, folder / f"{name}.pt")


def broadcasts(folder: Path, name: str) -> None:
    """Tensors of integers and bits that arithmetic would not keep; equal ones after that."""
    site = join_site()
    odd = torch.tensor([0x7FA12345, -0x800000, -0x80000000, site.global_rank]).to(torch.int32)
    tensors = [odd.view(torch.float32), torch.arange(5) + site.global_rank, torch.ones(2, 2).t()]
    site.broadcast(tensors)
    site.broadcast(tensors)
    site.leave()
    torch.save({"tensors": tensors}, folder / f"{name}.pt")


def normalise(folder: Path, name: str) -> None:
    """Train with a BatchNorm, whose buffers are averaged after every second step."""
    site = join_site()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    site.attach(model, optimizer)
    site.average_buffers(model, every=2)
    found = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + site.global_rank)
        backward(model(torch.randn(5, 3, generator=generator)).square().sum())
        own = model.module[1].running_mean.clone()
        optimizer.step()
        found.append([own, model.module[1].running_mean.clone()])
    wait_for_all_ranks()
    site.leave()
    torch.save(found, folder / f"{name}.pt")
