"""A user's own script that says with which parameters it ends. Argument: STEPS."""

import hashlib
import sys

import torch
from torch.nn.parallel import DistributedDataParallel

import isthmus

site = isthmus.join()
torch.manual_seed(0)
# 132 K parameters, so that each of four ranks has several chunks of 64 KiB.
model = DistributedDataParallel(torch.nn.Linear(256, 513))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
site.attach(model, optimizer)
torch.manual_seed(1000 + site.global_rank)
for _ in range(int(sys.argv[1])):
    inputs = torch.randn(16, 256)
    optimizer.zero_grad()
    loss = (model(inputs) - inputs.sum(1, keepdim=True).sin()).square().mean()
    loss.backward()
    optimizer.step()
    site.log(loss=float(loss.detach()), site_tokens=16.0)
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
print(f"parameters {digest.hexdigest()}", flush=True)
site.leave()
