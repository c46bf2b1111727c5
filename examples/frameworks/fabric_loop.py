"""Train a small classifier with Lightning Fabric, at all sites.

Needs: pip install 'isthmus[lightning]'. The lines marked 1 to 3 are what isthmus needs.
"""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import isthmus


def main() -> None:
    """Train for two passes over the data."""
    site = isthmus.join(alone=True)  # 1: before Fabric, which then finds the site's ranks
    fabric = lightning.Fabric(strategy="ddp", devices=site.world_size)
    fabric.launch()
    points = torch.randn(1200, 16, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(points, (points.sum(1) > 0).long())

    model, optimizer = fabric.setup(
        net := nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 2)),
        torch.optim.AdamW(net.parameters(), lr=1e-2),
    )
    site.attach(model, optimizer)  # 2: gradients now cross sites
    loader = DataLoader(site.part_of(dataset), batch_size=20, shuffle=True)  # 3: this site's part
    for _ in range(2):
        for inputs, labels in fabric.setup_dataloaders(loader):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            fabric.backward(loss)
            optimizer.step()
            site.log(loss=loss)


if __name__ == "__main__":
    main()
