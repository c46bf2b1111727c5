"""A user's own script with fully_shard. Argument: STEPS."""

import sys

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import isthmus

site = isthmus.join(alone=True)
torch.manual_seed(100 + site.index)  # different at each site: attach makes them equal
model = nn.Sequential(nn.Linear(8, 17), nn.Tanh(), nn.Linear(17, 5), nn.Tanh(), nn.Linear(5, 1))
fully_shard(model[0])
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
site.attach(model, optimizer)

torch.manual_seed(1000 + site.global_rank)
for _ in range(int(sys.argv[1])):
    inputs = torch.randn(8, 8)
    optimizer.zero_grad()
    site.count_tokens(len(inputs))
    loss = nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    site.log(loss=loss)
print(f"done {site.name} {site.rank}")
