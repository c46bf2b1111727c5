"""A user's own script of which one site takes fewer steps.

Arguments: STEPS KIND SITE FEWER. KIND is `end` (its data ends first), `skip` (it skips batches
whose loss is bad) or `steps` (it skips steps after the backward pass). All write what they have
learnt, a rank a file.
"""

import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import isthmus

steps, kind, fewer = int(sys.argv[1]), sys.argv[2], int(sys.argv[4])
site = isthmus.join()
is_here = site.name == sys.argv[3]
torch.manual_seed(1)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
site.attach(model, optimizer)
start = site.checkpoint(model, optimizer)
generator = torch.Generator().manual_seed(site.global_rank)
for step in range(start, steps - fewer * (is_here and kind == "end")):
    is_bad = is_here and 3 <= step < 3 + fewer
    batch = torch.randn(4, 8, generator=generator)
    if is_bad and kind == "skip":
        continue
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    if is_bad and kind == "steps":
        continue
    optimizer.step()
    site.log(loss=loss)
torch.save(model.state_dict(), site.run_folder / f"learnt-{site.global_rank}.pt")
