"""A user's own script whose disk is full at rank 1 of site b, until there is a file `mended`.

Arguments: STEPS FOLDER.
"""

import errno
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import isthmus

steps, folder = int(sys.argv[1]), Path(sys.argv[2])
site = isthmus.join()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
site.attach(model, optimizer)
start = site.checkpoint(model, optimizer)
for step in range(start, steps):
    time.sleep(0.02)
    is_there = (site.name, site.rank) == ("b", 1) and step > start + 20
    if is_there and not (folder / "mended").exists():
        raise OSError(errno.ENOSPC, "No space left on device", "/scratch/activations")
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
