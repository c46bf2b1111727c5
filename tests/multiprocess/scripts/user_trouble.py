"""A user's own script with a mistake at one rank. Arguments: STEPS TROUBLE SITE RANK STEP.

TROUBLE: nan (a gradient, at RANK of SITE in STEP), all-nan (at every rank), forget (attach),
end (the script, with 0), quit (os._exit(0)), exit3, term (SIGTERM to itself).
"""

import os
import signal
import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import isthmus

steps, trouble, name = int(sys.argv[1]), sys.argv[2], sys.argv[3]
rank, at = int(sys.argv[4]), int(sys.argv[5])
site = isthmus.join()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
if trouble != "forget":
    site.attach(model, optimizer)
generator = torch.Generator().manual_seed(site.global_rank)
for step in range(1, steps + 1):
    inputs = torch.randn(4, 8, generator=generator)
    loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
    if (site.name, site.rank, step) == (name, rank, at) or (trouble, step) == ("all-nan", at):
        match trouble:
            case "nan" | "all-nan":
                loss = loss * float("nan")
            case "end":
                sys.exit(0)
            case "quit":
                os._exit(0)
            case "exit3":
                sys.exit(3)
            case "term":
                os.kill(os.getpid(), signal.SIGTERM)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if trouble != "forget":
        site.log(loss=float(loss))
site.leave()
