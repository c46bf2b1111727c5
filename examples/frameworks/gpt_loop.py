"""Train a small GPT by one plain loop, as single-file scripts on the web do, at all sites.

Such scripts draw batches at random, from a generator that is seeded by torchrun's RANK, and
accumulate gradients. The lines marked 1 to 3 are what isthmus needs.
"""

import os

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import isthmus

TEXT = torch.tensor(list(b"gradients cross the narrow land between two seas of machines. " * 400))
LENGTH, BATCH, WIDTH, MICRO_BATCHES, STEPS = 32, 4, 64, 2, 30


class GPT(nn.Module):
    """Blocks that look back only, over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        block = nn.TransformerEncoderLayer(
            WIDTH, 2, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return scores of the next byte after each."""
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=inputs.device)
        hidden = self.tokens(inputs) + self.places.weight
        scores: torch.Tensor = self.head(self.blocks(hidden, mask=mask, is_causal=True))
        return scores


def main() -> None:
    """Train for thirty steps of two micro-batches."""
    # 1: in place of init_process_group. RANK then counts the ranks of all sites.
    site = isthmus.join(alone=True, environment="global")
    generator = torch.Generator().manual_seed(1337 + int(os.environ.get("RANK", "0")))

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(TEXT) - LENGTH - 1, (BATCH,), generator=generator).tolist()
        inputs = torch.stack([TEXT[each : each + LENGTH] for each in starts])
        targets = torch.stack([TEXT[each + 1 : each + 1 + LENGTH] for each in starts])
        return inputs.to(site.device), targets.to(site.device)

    model = DistributedDataParallel(GPT().to(site.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    site.attach(model, optimizer)  # 2: gradients now cross sites
    for _ in range(STEPS):
        losses = []
        for micro in range(MICRO_BATCHES):
            model.require_backward_grad_sync = micro == MICRO_BATCHES - 1
            inputs, targets = batch()
            scores = model(inputs)
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
            (loss / MICRO_BATCHES).backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        site.log(loss=torch.stack(losses).mean())  # 3: shown by `isthmus status`


if __name__ == "__main__":
    main()
