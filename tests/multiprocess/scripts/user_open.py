"""A user's own script in rounds that wait for nobody: sites of unlike speeds, of which one stands.

Arguments: STEPS STANDS_AT UNTIL PROGRESS. Site b stands in step STANDS_AT until site a has taken
UNTIL. PROGRESS is a folder that all sites see, for what each has used.
"""

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import isthmus

STEP_S = {"a": 0.02, "b": 0.03, "c": 0.05}
LONGEST_S = 100.0

steps, stands_at, until = map(int, sys.argv[1:4])
site = isthmus.join()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
site.attach(model, optimizer)
inputs = torch.randn(20_000, 8)
dataset = TensorDataset(torch.arange(len(inputs)), inputs, inputs.sum(dim=1, keepdim=True))
sampler = site.sampler(dataset, global_batch=12)
site.checkpoint(model, optimizer)
progress = Path(sys.argv[4])
progress.mkdir(exist_ok=True)
used = progress / f"{site.name}-{site.rank}.jsonl"
has_stood = used.exists()
for step, (places, batch, targets) in zip(
    site.steps(steps), DataLoader(dataset, batch_sampler=sampler), strict=False
):
    time.sleep(STEP_S[site.name])
    deadline_s = time.monotonic() + LONGEST_S
    while site.name == "b" and step >= stands_at and not has_stood:
        reached = progress / "a"
        has_stood = reached.exists() and int(reached.read_text() or 0) >= until
        assert time.monotonic() < deadline_s, "the others wait"
        time.sleep(0.01)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(batch), targets)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    site.log(loss=loss)
    with used.open("a") as file:
        file.write(json.dumps([step, site.num_steps, places.tolist()]) + "\n")
    if site.name == "a" and site.rank == 0:
        (progress / "a.new").write_text(str(site.num_steps))
        (progress / "a.new").rename(progress / "a")
