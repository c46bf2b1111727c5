"""Steps of 2 s whose model each site cuts by fully_shard over tensor parallelism.

Usage, as a job's entrypoint: modelled_cut.py TENSOR..., the tensor degree of each site in turn,
else of all; the site's other ranks are fully_shard's. `isthmus bench --compute real` runs it:
forward and backward only wait, and hand out gradients that are as large as real ones. Gathering,
reducing and crossing are real.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import backward
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import isthmus
from isthmus.sites.trainer.modelled import ComputeClock

LAYERS, WIDTH = 32, 112
"""3.2 million parameters: 12.9 MB of float32 gradients."""
FORWARD_S, BACKWARD_S = 0.667 / LAYERS, 1.333 / LAYERS
SITES = ("east", "west")
"""As the topology has them: a site that is measured alone has index 0."""
TOKENS = 256
"""A rank with data of its own counts so many a step."""


class Layer(nn.Module):
    """The parameters of an MLP and its norm, which take their time."""

    def __init__(self, clock: ComputeClock, gradient: float) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(WIDTH))
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self._pass = clock, gradient

    def forward(self, passed: Tensor) -> Tensor:
        """Let the time pass."""
        found = (_local(each) for each in (self.norm, self.up.weight, self.down.weight))
        result: Tensor = Pass.apply(passed, *self._pass, *found)  # type: ignore[no-untyped-call]
        return result


class Pass(torch.autograd.Function):
    """One layer of one forward and backward pass."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's own
        passed: Tensor,
        clock: ComputeClock,
        gradient: float,
        *parameters: Tensor,
    ) -> Tensor:
        """Wait as long as a layer computes."""
        ctx.told = clock, gradient, [each.shape for each in parameters]
        clock.compute(FORWARD_S)
        return passed.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: ANN401 - torch's own
        """Wait, and give each parameter a gradient."""
        clock, gradient, shapes = ctx.told
        own = [torch.full(each, gradient) for each in shapes]
        clock.compute(BACKWARD_S)
        return gradients[0], None, None, *own


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def main() -> None:
    """Take the job's steps."""
    site = isthmus.join()
    degrees = [int(each) for each in sys.argv[1:]]
    tensor = degrees[SITES.index(site.name) % len(degrees)]
    shape = (site.world_size // tensor, tensor)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    clock = ComputeClock()
    torch.manual_seed(0)
    gradient = 1e-3 * (1 + site.index)  # unlike at each site, as of other data
    model = nn.Sequential(*(Layer(clock, gradient) for _ in range(LAYERS)))
    for layer in model:
        parallelize_module(
            layer, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    site.attach(model, optimizer, data_mesh=mesh["data"])
    clock.begin()
    for _ in range(site.job.trainer.steps):
        optimizer.zero_grad()
        site.count_tokens(TOKENS)
        backward(model(torch.zeros(())))
        clock.begin()
        optimizer.step()


main()
