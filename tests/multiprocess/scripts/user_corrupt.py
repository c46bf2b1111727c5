"""A user's own script of which one rank computes wrongly from a step on.

Arguments: STEPS [FAULT SITE RANK STEP]. `flip`: one bit of one gradient, in every backward pass;
`once`: in one.
"""

import os
import sys
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import isthmus


def main() -> None:
    """Fit a random teacher; every rank has its own part of the batch."""
    steps = int(sys.argv[1])
    fault, where, rank, when = sys.argv[2:6] if len(sys.argv) > 2 else ("", "", "0", "0")
    site = isthmus.join()
    torch.manual_seed(1)
    net = torch.nn.Sequential(
        torch.nn.Linear(8, 16),
        torch.nn.BatchNorm1d(16),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(16, 3),
    )
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    site.attach(model, optimizer)
    start = site.checkpoint(model, optimizer)
    passes, now = 0, 0

    def flip(grad: torch.Tensor) -> torch.Tensor:
        nonlocal passes
        is_here = (site.name, site.rank) == (where, int(rank)) and now >= int(when)
        passes += is_here
        if is_here and (fault == "flip" or (fault == "once" and passes == 2)):
            grad = grad.clone()
            grad.view(torch.int32)[0, 0] ^= 1
        return grad

    dict(net.named_parameters())["3.weight"].register_hook(flip)  # type: ignore[no-untyped-call]
    for now in range(start, steps):
        generator = torch.Generator().manual_seed(1000 * now + site.global_rank)
        x = torch.randn(16, 8, generator=generator)
        loss = (model(x) - x[:, :3].sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        site.log(loss=float(loss.detach()), site_tokens=16.0)
    if folder := os.environ.get("SAVE_IN"):
        torch.save(net.state_dict(), Path(folder) / f"{site.name}{site.rank}.pt")
    site.leave()


if __name__ == "__main__":
    main()
