"""A user's own script: a DDP loop with isthmus' two lines, and faults to order.

Arguments: STEPS [FAULT SITE RANK STEP]. Faults: exit17, raise, perturb, import.
"""

import os
import sys

import torch
from torch.nn.parallel import DistributedDataParallel

import isthmus


def break_here(fault: str, model: torch.nn.Module) -> None:
    """Do the harm that the test asked for."""
    if fault == "exit17":
        sys.stderr.write("about to exit with 17\n")
        sys.stderr.flush()
        os._exit(17)
    if fault == "raise":
        raise ValueError("a mistake in the user's script")
    if fault == "perturb":
        with torch.no_grad():
            # One bit, in one tensor, at one site: what a broken accelerator might do.
            weight = dict(model.named_parameters())["module.2.weight"]
            weight.view(torch.int32)[0, 0] ^= 1


def main() -> None:
    """Fit a random teacher; every rank has its own part of the batch."""
    steps = int(sys.argv[1])
    fault, where, rank, when = sys.argv[2:6] if len(sys.argv) > 2 else ("", "", "0", "0")
    if fault == "import" and os.environ["ISTHMUS_SITE"] == where:
        import a_module_that_does_not_exist  # type: ignore[import-not-found]  # noqa: F401
    site = isthmus.join()
    torch.manual_seed(100 + site.index)  # different at each site: attach makes them equal
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    site.attach(model, optimizer)
    generator = torch.Generator().manual_seed(site.global_rank)
    for step in range(steps):
        if fault and (site.name, site.rank, step) == (where, int(rank), int(when)):
            break_here(fault, model)
        x = torch.randn(16, 8, generator=generator)
        loss = (model(x) - x[:, :3].sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        site.log(loss=float(loss.detach()), site_tokens=16.0)
    print(f"done {site.name} {site.rank}", flush=True)
    site.leave()


if __name__ == "__main__":
    main()
