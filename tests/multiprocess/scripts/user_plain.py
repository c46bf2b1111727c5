"""A user's own script without DistributedDataParallel: a plain loop. Argument: STEPS."""

import sys

import torch
from torch import nn

import isthmus

site = isthmus.join(alone=True)
torch.manual_seed(100 + site.index)  # different at each site: average_gradients makes them equal
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(site.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
site.average_gradients(optimizer)

torch.manual_seed(1000 + site.global_rank)
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    mean_loss = torch.zeros((), device=site.device)
    for _ in range(2):  # micro-batches; their sum crosses once
        inputs = torch.randn(8, 8, device=site.device)
        site.count_tokens(8)
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True)) / 2
        loss.backward()  # type: ignore[no-untyped-call]
        mean_loss += loss.detach()
    optimizer.step()
    site.all_reduce([mean_loss], exact=True)
    site.log(loss=mean_loss)
print(f"done {site.name} {site.rank}")
