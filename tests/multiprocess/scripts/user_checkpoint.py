"""A user's own script that is saved and resumed, with all there is.

Arguments: STEPS ddp|fsdp|average DROPOUT.
"""

import sys

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import isthmus


class Seen:
    """Something of the script's own that is saved along: the steps that it has seen."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.steps = state_dict["steps"]


steps, kind, dropout = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
site = isthmus.join()
torch.manual_seed(100 + site.index)  # different at each site: attach makes them equal
model: nn.Module = nn.Sequential(
    nn.Linear(8, 17), nn.Tanh(), nn.Dropout(dropout), nn.Linear(17, 64), nn.Tanh(), nn.Linear(64, 1)
)
if kind == "fsdp":
    fully_shard(model[0])  # type: ignore[index]
    fully_shard(model)
elif kind == "ddp":
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
if kind == "average":
    site.average_gradients(optimizer)
else:
    site.attach(model, optimizer)

torch.manual_seed(1000 + site.global_rank)  # of dropout: a rank's own
generator = torch.Generator().manual_seed(0)
inputs = torch.randn(100, 8, generator=generator)
dataset = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
sampler = site.sampler(dataset, global_batch=12)
seen = Seen()
start = site.checkpoint(model, optimizer, scheduler=scheduler, extra={"seen": seen})
assert seen.steps == start
for _, (batch, targets) in zip(
    range(start, steps), DataLoader(dataset, batch_sampler=sampler), strict=False
):
    optimizer.zero_grad()
    site.count_tokens(len(batch))
    loss = nn.functional.mse_loss(model(batch), targets)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    scheduler.step()
    seen.steps += 1
    site.log(loss=loss, learning_rate=scheduler.get_last_lr()[0])
