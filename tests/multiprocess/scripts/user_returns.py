"""A user's script without `site.sampler`, as slow where nothing counts. Arguments: STEPS FOLDER.

Where a site returns, its model takes as long as 20 steps to build. If there is a file `hangs` in
FOLDER, its first step takes as long, too, so it is far behind; and once, it hangs amid the sixth.
"""

import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import isthmus

STEP_S = 0.25


def hang() -> None:
    while True:
        time.sleep(0.01)


steps, folder = int(sys.argv[1]), Path(sys.argv[2])
site = isthmus.join()
was_here, hangs = folder / site.name, folder / "hangs"
if was_here.exists():
    time.sleep(20 * STEP_S)
was_here.touch()
model = DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
site.attach(model, optimizer)
start = site.checkpoint(model, optimizer)
for step in range(start, steps):
    time.sleep(STEP_S)
    if hangs.exists() and start:
        if step == start:
            time.sleep(20 * STEP_S)
        if step == start + 5:
            hangs.unlink()
            hang()
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
