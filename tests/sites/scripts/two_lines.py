"""A user's training script, as docs/integration.md has it. Usage: two_lines.py [STEPS]."""

import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import isthmus

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 3

site = isthmus.join(alone=True)

torch.manual_seed(site.global_rank)
model = DistributedDataParallel(nn.Linear(8, 1).to(site.device))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

site.attach(model, optimizer)

true_weights = torch.arange(8.0, device=site.device)
for _ in range(steps):
    inputs = torch.randn(16, 8, device=site.device)
    targets = inputs @ true_weights
    loss = nn.functional.mse_loss(model(inputs).squeeze(1), targets)
    optimizer.zero_grad()
    site.count_tokens(len(inputs))
    loss.backward()  # type: ignore[no-untyped-call]
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    site.log(loss=loss, grad_norm=norm)

sums = [round(float(each.detach().sum()), 6) for each in model.parameters()]
# One write: ranks share the terminal.
sys.stdout.write(f"{site.name} {site.global_rank} {site.global_world_size} {sums}\n")
