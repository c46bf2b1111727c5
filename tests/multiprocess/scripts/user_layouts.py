"""A user's own script that each site lays out in its own way. Arguments: STEPS LATER LAYOUT...

Layouts, a site: rows (fully_shard of the root alone), blocks (of each block), tp, pp.
Whoever begins when there is a file LATER takes the layout that it names.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import isthmus

WIDTH, BLOCKS, SAMPLES, MICRO_BATCHES = 8, 2, 4, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 16)
        self.down = nn.Linear(16, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = inputs + self.down(torch.tanh(self.up(self.norm(inputs))))
        return outputs


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(index): Block() for index in range(BLOCKS)})

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for each in self.blocks.values():
            inputs = each(inputs)
        return inputs


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(outputs, targets)


steps, later, layouts = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
site = isthmus.join()
torch.manual_seed(100 + site.index)  # different at each site: attach makes them equal
model = Net()
layout = later.read_text() if later.exists() else layouts[site.index]
mesh = init_device_mesh("cpu", (1, site.world_size), mesh_dim_names=("dp", "inner"))
schedule = None
if layout == "rows":
    fully_shard(model)
elif layout == "blocks":
    for block in model.blocks.values():
        fully_shard(block)
    fully_shard(model)
elif layout == "tp":
    for block in model.blocks.values():
        parallelize_module(
            block, mesh["inner"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
elif layout == "pp":
    assert site.world_size == BLOCKS
    del model.blocks[str(1 - site.rank)]
    fully_shard(model, mesh=mesh["dp"])
    stage = PipelineStage(model, site.rank, BLOCKS, site.device, group=mesh["inner"].get_group())
    schedule = Schedule1F1B(
        stage,
        MICRO_BATCHES,
        loss_fn=lambda outputs, targets: loss_of(outputs, targets) / MICRO_BATCHES,
        scale_grads=False,
    )
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.99)
site.attach(model, optimizer)
start = site.checkpoint(model, optimizer, scheduler=scheduler)
print(f"{site.name} {site.rank} begins with step {start} as {layout}", flush=True)
shares_data = layout in {"tp", "pp"}
for step in range(start, steps):
    place = 10 * site.index + (0 if shares_data else site.rank)
    generator = torch.Generator().manual_seed(100 * step + place)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
    optimizer.zero_grad()
    site.count_tokens(1 + place)
    if schedule is None:
        loss_of(model(inputs), inputs.flip(1)).backward()  # type: ignore[no-untyped-call]
    elif site.rank == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=inputs.flip(1))
    optimizer.step()
    scheduler.step()
    site.log(learning_rate=scheduler.get_last_lr()[0])
