"""Cuts each sequence over ranks: attention then goes round them in a ring.

torch's own `context_parallel` does it. Of c ranks, rank r has the r-th of 2 c pieces of each
sequence and the r-th from the end, so that all have equally much to do for causal attention. While
a batch is cut, `scaled_dot_product_attention` is torch's ring attention: keys and values of all
ranks come by, and in the backward pass their gradients go back.

Everything else of the model looks at one token at a time, and knows its place by its number.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from isthmus.topology.spec.errors import ConfigError, Problem

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DEVICES: tuple[str, ...] = ("cuda",)
"""Types of devices for which torch has ring attention."""
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
"""Those that torch takes round a ring. Others would compute something else, and not say so."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences that go through the model, or a rank's part of each; B of T tokens."""

    inputs: Tensor
    """int64, shape (B, T)."""
    targets: Tensor
    """What comes after each: int64, shape (B, T)."""
    places: Tensor | None = None
    """Where tokens stand in their sequence: int64, shape (1, T); None: one after another."""


@contextmanager
def cut_sequences(batch: Batch, mesh: DeviceMesh | None) -> Iterator[Batch]:
    """Yield this rank's part of each sequence. Go forward and backward before it ends.

    Args:
        batch: The same at all ranks of `mesh`.
        mesh: The ranks that share the sequences; twice as many divide the number of tokens. None:
            this rank has all of each.
    """
    if mesh is None:
        yield batch
        return
    from torch.distributed.tensor.experimental import context_parallel

    places = torch.arange(batch.inputs.shape[1], device=batch.inputs.device)[None]
    # Copies: torch cuts them where they are.
    parts = [batch.inputs.clone(), batch.targets.clone(), places]
    ring = context_parallel(
        mesh, buffers=parts, buffer_seq_dims=[1, 1, 1], no_restore_buffers={*parts}
    )
    with ring, sdpa_kernel(_KERNELS):
        yield Batch(*parts)


def check_can_cut(site: str, device: torch.device) -> None:
    """Refuse to cut sequences where torch cannot.

    Raises:
        ConfigError: And what to do.
    """
    from torch.distributed.tensor import experimental

    if device.type not in DEVICES:
        message = (
            f"site {site} computes on the host, and torch's ring attention does not run there: "
            "want context: 1"
        )
    elif not hasattr(experimental, "context_parallel"):
        message = (
            f"PyTorch {torch.__version__} of site {site} has no context_parallel (2.9 to 2.13 "
            "have): install another, or write context: 1"
        )
    else:
        return
    raise ConfigError([Problem("job", 0, 0, message, "placement")])
