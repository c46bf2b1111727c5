"""Train a small classifier with the Trainer of Lightning, at all sites.

Needs: pip install 'isthmus[lightning]'. The lines marked 1 to 3 are what isthmus needs.
"""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import isthmus
from isthmus.sites.integrations.lightning import Together


class Classifier(lightning.LightningModule):  # type: ignore[misc] # lightning may not be there
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 2))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        """Return the batch's loss."""
        inputs, labels = batch
        return nn.functional.cross_entropy(self.net(inputs), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    """Train for two passes over the data."""
    site = isthmus.join(alone=True)  # 1: before the Trainer, which then finds the site's ranks
    points = torch.randn(1200, 16, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(points, (points.sum(1) > 0).long())
    trainer = lightning.Trainer(
        strategy="ddp",
        devices=site.world_size,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=site.run_folder,
        callbacks=[Together(site, tokens=lambda batch: len(batch[0]))],  # 2: gradients cross
    )
    part = site.part_of(dataset)  # 3: Lightning divides it over the ranks of the site
    trainer.fit(Classifier(), DataLoader(part, batch_size=20, shuffle=True))


if __name__ == "__main__":
    main()
