"""A user's own script that is saved, and ends, or fails, as the test asks for.

Arguments: STEPS ENDING [SITE RANK]: it ends so there; elsewhere it runs through.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import isthmus

steps, ending = int(sys.argv[1]), sys.argv[2]
site = isthmus.join()
is_here = sys.argv[3:] in ([], [site.name, str(site.rank)])
torch.manual_seed(1)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
if ending == "type" and is_here:
    site.attach(model, optimizer, los="mean")  # type: ignore[call-arg]
site.attach(model, optimizer)
start = site.checkpoint(model, optimizer)
generator = torch.Generator().manual_seed(site.global_rank)
for step in range(start, steps):
    if is_here and step == 5:
        if ending == "raise":
            raise ValueError("a mistake in the user's script")
        if ending == "status":
            sys.exit(3)
        if ending == "disk":
            raise OSError(28, "No space left on device")
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8, generator=generator)).square().mean()
    loss.backward()
    optimizer.step()
    site.log(loss=loss)
if is_here:
    match ending:
        case "destroy":
            dist.destroy_process_group()
        case "destroy and exit":
            dist.destroy_process_group()
            sys.exit(0)
        case "destroy late":
            dist.destroy_process_group()
            time.sleep(3.0 * (site.rank + 1))
        case "last raise":
            raise ValueError("after the last step")
        case "os_exit":
            os._exit(0)
