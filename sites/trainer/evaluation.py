"""The loss on text that is never learnt.

Every site evaluates the same sequences, split over its own ranks: no scalar then has to cross the
WAN, nothing of the training state is touched, and since all sites hold the same parameters they
find the same loss, up to the order in which float64 numbers are added.
"""

from __future__ import annotations

import torch

from sites.trainer import sampler
from sites.trainer.corpus import Bytes
from sites.trainer.gpt import Gpt
from sites.trainer.learning import token_losses
from topology.cost.compute import share
from topology.job import Trainer


@torch.no_grad()
def evaluate(
    model: Gpt, text: Bytes, config: Trainer, *, ranks: int, rank: int
) -> tuple[float, int]:
    """Return the sum of the losses of this rank's share, in nats, and its number of tokens.

    Args:
        model: Not the DistributedDataParallel around it.
        text: Held out, longer than the context.
        config: `evaluation_batches` batches of `micro_batch` sequences are spread over the text.
        ranks: Of the site.
        rank: Inside the site; its share may be empty.
    """
    context = config.model.context
    device = next(model.parameters()).device
    starts = sampler.even_starts(
        config.evaluation_batches * config.micro_batch, len(text) - context
    )
    part = share(len(starts), ranks, rank)
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    for batch in sampler.micro_batches(part, config.micro_batch):
        losses = token_losses(model, text, starts[batch.start : batch.stop], context, device)
        loss_sum += losses.sum(dtype=torch.float64)
    return float(loss_sum), len(part) * context
