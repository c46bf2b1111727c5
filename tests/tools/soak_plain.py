"""A user's script without `site.sampler`, whose steps take as long whatever they count for."""

import itertools
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import isthmus

STEP_S = 0.25

site = isthmus.join()
torch.manual_seed(0)
model = DistributedDataParallel(
    nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 64))
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100, 0.99)
site.attach(model, optimizer)
start = site.checkpoint(model, optimizer, scheduler=scheduler)
for step in itertools.count(start):
    generator = torch.Generator().manual_seed(1000 * step + site.global_rank)
    inputs = torch.randn(8, 64, generator=generator)
    time.sleep(STEP_S)  # stands for a forward and a backward pass of that length
    optimizer.zero_grad()
    (model(inputs) - inputs.square()).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
