"""A user's own script of which one rank hangs. Arguments: STEPS SITE RANK STEP [leave].

With `leave` it is done with the run before it hangs.
"""

import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import isthmus


def hang() -> None:
    while True:
        pass


steps, name, rank, at = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
site = isthmus.join()
model = DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
site.attach(model, optimizer)
for step in range(steps):
    if (site.name, site.rank, step) == (name, rank, at):
        if "leave" in sys.argv:
            site.leave()
        hang()
    site.count_tokens(4)
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 20:
        print("trains", flush=True)
site.leave()
