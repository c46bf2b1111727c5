"""Sites that read the same data behind dropout, and whose buffer moves by what each one counts.

Argument: `site`, or `global` for one that does both right.
"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import isthmus

is_right = sys.argv[1] == "global"
site = isthmus.join(environment="global")
torch.manual_seed(int(os.environ["RANK"]))


class Balanced(nn.Module):
    """Biases a choice by how often it was made."""

    bias: torch.Tensor
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.2))
        self.register_buffer("bias", torch.zeros(4))
        self.register_buffer("count", torch.zeros(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scores = self.layers(inputs)
        chosen = (scores + self.bias).argmax(-1)
        self.count += torch.bincount(chosen, minlength=4)
        return torch.gather(scores, 1, chosen[:, None])

    def balance(self, count: torch.Tensor) -> None:
        self.bias += count.mean() - count
        self.count.zero_()


inner = Balanced()
model = DistributedDataParallel(inner)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
site.attach(model, optimizer)
rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
data = TensorDataset(rows)
places = (site.global_world_size, site.global_rank) if is_right else ()
sampler: Any = DistributedSampler(data, *places)
for (batch,) in DataLoader(data, batch_size=4, sampler=sampler):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
    count = inner.count.clone()
    if is_right:
        site.all_reduce([count], exact=True)
    else:
        dist.all_reduce(count)
    inner.balance(count)
