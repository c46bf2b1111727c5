"""What is reduced in benchmarks: the same values every time, and what their mean must be."""

from __future__ import annotations

import torch
import xxhash

FLOAT_BYTES = 4
_SEED = 1009


def values_of(rank: int, numel: int) -> torch.Tensor:
    """Return float32[1, numel] of a normal distribution: a rank's own part, on the host.

    A matrix, for vectors cross as fp32 whatever the codec.

    Args:
        rank: among those of all sites.
        numel: elements.
    """
    generator = torch.Generator().manual_seed(_SEED + rank)
    return torch.randn(1, numel, generator=generator, dtype=torch.float32, device="cpu")


def digest_of(values: torch.Tensor) -> str:
    """Return a hash of all bits of a contiguous float32 tensor, in hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(values.cpu().numpy().data)


def relative_error(values: torch.Tensor, num_ranks: int) -> float:
    """Return how far `values` are from the mean of all ranks' own: ‖x - mean‖ ÷ ‖mean‖."""
    mean = torch.zeros(values.shape, dtype=torch.float64, device="cpu")
    for rank in range(num_ranks):
        mean += values_of(rank, values.numel())
    mean /= num_ranks
    return float((values.cpu() - mean).norm() / mean.norm())
