"""Train a small classifier with DistributedDataParallel, at one site or at several.

Alone:     torchrun --nproc-per-node 2 examples/two_sites/train.py
Two sites: isthmus launch examples/two_sites/job.yaml

The lines marked 1 and 2 are all that isthmus needs; 3 to 6 make the most of it.
"""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import isthmus

NUM_CLASSES = 10
EPOCHS = 4


def make_dataset() -> TensorDataset:
    """Return points of 64 numbers and the class that a fixed random network gives each."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(8192, 64, generator=generator)
    first = torch.randn(64, 32, generator=generator)
    second = torch.randn(32, NUM_CLASSES, generator=generator)
    return TensorDataset(points, (torch.relu(points @ first) @ second).argmax(dim=1))


def make_model() -> nn.Module:
    """Return a network that is larger than the one which made the labels."""
    return nn.Sequential(
        nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, NUM_CLASSES)
    )


def main() -> None:
    """Train for a few passes over the data; one rank of all says how it goes."""
    site = isthmus.join(alone=True)  # 1: in place of init_process_group; `alone` allows torchrun

    model = DistributedDataParallel(make_model().to(site.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    site.attach(model, optimizer)  # 2: gradients now cross sites

    dataset = make_dataset()
    sampler = site.sampler(dataset, global_batch=64 * site.global_world_size)
    loader = DataLoader(dataset, batch_sampler=sampler)  # 3: all sites share the data; endless

    epoch_steps = len(dataset) // sampler.global_batch
    start = site.checkpoint(model, optimizer)  # 4: saves by itself; 0, or where a run goes on
    for step, (points, labels) in zip(range(start, EPOCHS * epoch_steps), loader, strict=False):
        optimizer.zero_grad()
        site.count_tokens(len(labels))  # 5: unequal batches weigh what they hold
        scores = model(points.to(site.device))
        loss = nn.functional.cross_entropy(scores, labels.to(site.device))
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the norm over all sites
        optimizer.step()
        site.log(loss=loss)  # 6: shown by `isthmus status` and in the report
        if site.is_main and (step + 1) % epoch_steps == 0:
            print(f"data epoch {(step + 1) // epoch_steps}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
