"""Train a small classifier with Hugging Face Accelerate, at all sites.

Needs: pip install 'isthmus[transformers]'. The lines marked 1 to 4 are what isthmus needs.
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import isthmus
from isthmus.sites.integrations.accelerate import accumulate_before_crossing


def main() -> None:
    """Train for two passes over the data, two batches a step."""
    site = isthmus.join(alone=True)  # 1: before Accelerate, which then finds the site's ranks
    accelerator = Accelerator(cpu=site.device.type == "cpu", gradient_accumulation_steps=2)
    accumulate_before_crossing(accelerator)  # 2: for sites of one rank
    points = torch.randn(1200, 16, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(points, (points.sum(1) > 0).long())

    net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 2))
    model, optimizer, loader = accelerator.prepare(
        net,
        torch.optim.AdamW(net.parameters(), lr=1e-2),
        DataLoader(site.part_of(dataset), batch_size=20, shuffle=True),  # 3: this site's part
    )
    site.attach(model, optimizer)  # 4: gradients now cross sites
    for _ in range(2):
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                site.log(loss=loss)


if __name__ == "__main__":
    main()
