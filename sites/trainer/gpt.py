"""A byte-level GPT: pre-norm blocks, learned positions, the embedding mostly tied to the output.

Shape suffixes: B sequences, T positions, W width, H heads, D width of a head, V bytes (256). Under
tensor parallelism a rank has H and F of its own only (sites/trainer/parallel.py).
"""
# ruff: noqa: N803, N806 - the shape suffixes

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from isthmus.sites.trainer.experts import Experts
from isthmus.topology.spec.compute import VOCABULARY
from isthmus.topology.spec.job import Model


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.head_width = model.width // model.heads
        self.project_in = nn.Linear(model.width, 3 * model.width, bias=False)
        self.project_out = nn.Linear(model.width, model.width, bias=False)

    def forward(self, x_BTW: Tensor) -> Tensor:
        """Mix each position with those before it; same shape as `x_BTW`."""
        batch, length = x_BTW.shape[:2]
        # Head after head, each with its queries, keys and values: so that heads can be dealt out.
        qkv_3BHTD = (
            self.project_in(x_BTW)
            .view(batch, length, -1, 3, self.head_width)
            .permute(3, 0, 2, 1, 4)
        )
        q_BHTD, k_BHTD, v_BHTD = qkv_3BHTD.unbind(0)
        mixed_BHTD = functional.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)
        out_BTW: Tensor = self.project_out(mixed_BHTD.transpose(1, 2).reshape(batch, length, -1))
        return out_BTW


class Block(nn.Module):
    """Attention, then a feed-forward layer four times as wide; each adds to its input."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(model.width)
        self.attention = Attention(model)
        self.norm_feed = nn.LayerNorm(model.width)
        if model.experts > 1:
            self.experts = Experts(model)
        else:
            self.feed_in = nn.Linear(model.width, 4 * model.width, bias=False)
            self.feed_out = nn.Linear(4 * model.width, model.width, bias=False)
        self._has_experts = model.experts > 1

    def forward(self, x_BTW: Tensor) -> Tensor:
        """Return the next layer's input, same shape."""
        x_BTW = x_BTW + self.attention(self.norm_attention(x_BTW))
        normed_BTW = self.norm_feed(x_BTW)
        if self._has_experts:
            fed_BTW: Tensor = self.experts(normed_BTW)
        else:
            fed_BTW = self.feed_out(functional.gelu(self.feed_in(normed_BTW), approximate="tanh"))
        return x_BTW + fed_BTW


class Gpt(nn.Module):
    """Predicts the next byte at every position."""

    def __init__(self, model: Model, seed: int) -> None:
        """Make the model with the initial weights that `seed` names."""
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, model.width)
        self.position = nn.Embedding(model.context, model.width)
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.layers))
        self.norm = nn.LayerNorm(model.width)
        self.output = None if model.tied else nn.Linear(model.width, VOCABULARY, bias=False)
        self._initialise(seed)

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        """Set every matrix from a generator of its own, whatever torch's global one holds.

        A matrix keeps the variance of what it multiplies, and the tied embedding that of the first
        logits. The two that add to the residual stream in each block start so small that all of
        them together leave the bytes' own signal the largest: with 1 / sqrt(2 layers) in place of
        1 / (2 layers), and an embedding of 0.02, the loss after 120 steps was 2.63 instead of 2.20.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue  # norms start as the identity
            std = parameter.shape[1] ** -0.5
            if name.endswith(("project_out.weight", "feed_out.weight", "mlps.down")):
                std /= 2 * len(self.blocks)
            parameter.normal_(0.0, std, generator=generator)

    def forward(self, bytes_BT: Tensor, places_1T: Tensor | None = None) -> Tensor:
        """Return the logits of each next byte.

        Args:
            bytes_BT: int64, shape (B, T), values 0 to 255, T at most the context.
            places_1T: int64, shape (1, T), where they stand in their sequence; None: one after
                another from the first.

        Returns:
            float32, shape (B, T, 256).
        """
        x_BTW = embedded(self.embedding, self.position, bytes_BT, places_1T)
        for block in self.blocks:
            x_BTW = block(x_BTW)
        normed_BTW = self.norm(x_BTW)
        if self.output is None:
            return functional.linear(normed_BTW, self.embedding.weight)
        logits_BTV: Tensor = self.output(normed_BTW)
        return logits_BTV


class Part(nn.Module):
    """What one stage of a pipeline has of an untied `Gpt`; parameters keep their names in it."""

    def __init__(self, whole: Gpt, layers: range) -> None:
        """Take blocks, and where they are the first or last, what comes before or after."""
        super().__init__()
        is_first, is_last = layers.start == 0, layers.stop == len(whole.blocks)
        self.embedding = whole.embedding if is_first else None
        self.position = whole.position if is_first else None
        self.blocks = nn.ModuleDict({str(index): whole.blocks[index] for index in layers})
        self.norm = whole.norm if is_last else None
        self.output = whole.output if is_last else None

    def forward(self, x: Tensor) -> Tensor:
        """Go on where the stage before has ended: from bytes (B, T), or (B, T, W).

        Returns:
            The next stage's input, (B, T, W); of the last stage logits, (B, T, 256).
        """
        if self.embedding is not None and self.position is not None:
            x = embedded(self.embedding, self.position, x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.norm is None or self.output is None else self.output(self.norm(x))


def embedded(
    embedding: nn.Module, position: nn.Module, bytes_BT: Tensor, places_1T: Tensor | None = None
) -> Tensor:
    """Return what the first block sees of the bytes: float32, shape (B, T, W)."""
    if places_1T is None:
        places_1T = torch.arange(bytes_BT.shape[1], device=bytes_BT.device)[None]
    x_BTW: Tensor = embedding(bytes_BT) + position(places_1T)
    return x_BTW
