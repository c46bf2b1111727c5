"""A user's own script at sites of unlike speeds, which leaves what each step has drawn.

Arguments: STEPS PROGRESS, a folder that all sites see.
"""

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import isthmus

SAMPLE_S = {"a": 0.01, "b": 0.014, "c": 0.025}
NUM_SAMPLES = 1009

steps, progress = int(sys.argv[1]), Path(sys.argv[2])
site = isthmus.join()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
site.attach(model, optimizer)
inputs = torch.randn(NUM_SAMPLES, 8)
targets = inputs.sum(dim=1, keepdim=True)
sampler = site.sampler(inputs)
site.checkpoint(model, optimizer)
progress.mkdir(exist_ok=True)
for step, places in zip(site.steps(steps), sampler, strict=False):
    with (progress / f"{site.name}-{site.rank}.jsonl").open("a") as file:
        file.write(json.dumps([step + 1, [*map(int, places)]]) + "\n")
    time.sleep(len(places) * SAMPLE_S[site.name])
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs[places]), targets[places])
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    site.log(loss=loss)
