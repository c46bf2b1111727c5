"""A user's own script whose model grows on the way, while its first site is lost, or comes back.

Arguments: FOLDER ddp|fsdp lost|returns. Site a, the first one, is killed in its tenth step. Lost,
the model grows in step 20. Else it does once site a has come back and learns from the others.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import isthmus

KILLED_AT, GROWS_AT = 10, 20

folder, kind, fate = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
last_steps = 40 if fate == "lost" else 800  # by then it has learnt all, and takes part
site = isthmus.join()
torch.manual_seed(site.global_rank)
body = nn.Sequential(nn.Linear(6, 8), nn.Tanh())


def wrapped(model: nn.Module) -> nn.Module:
    """Wrap what there is by now."""
    if kind == "ddp":
        return DistributedDataParallel(model)
    fully_shard(model)
    return model


model = wrapped(body)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
site.attach(model, optimizer)
step = site.checkpoint(model, optimizer)
killed = folder / "a.killed"
if site.name == "a" and killed.exists():
    (folder / "a.is-back").touch()

stops_at = sys.maxsize
is_back = torch.zeros(1)
while step < stops_at:
    is_time = step == GROWS_AT if fate == "lost" else bool(is_back > 0)
    if is_time and stops_at == sys.maxsize:
        stops_at = step + last_steps
        head = nn.Linear(8, 3)  # other values at each site: those of one are everybody's
        if kind == "fsdp":
            fully_shard(head)
            optimizer.add_param_group({"params": [*head.parameters()]})
            model = nn.Sequential(model, head)
            site.attach([body, head], optimizer)
            site.checkpoint([body, head], optimizer)
        else:
            model = wrapped(nn.Sequential(body, head))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            site.attach(model, optimizer)
            site.checkpoint(model, optimizer)
    if site.name == "a" and step == KILLED_AT and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(1000 * step + site.global_rank)
    loss = model(torch.randn(4, 6, generator=generator)).square().mean()
    loss.backward()
    optimizer.step()
    site.log(loss=loss)
    step += 1
    is_back = torch.tensor([float((folder / "a.is-back").exists())])
    site.all_reduce([is_back], exact=True)
