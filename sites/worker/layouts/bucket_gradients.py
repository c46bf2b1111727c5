"""What lies in a bucket of DistributedDataParallel, in the one order that all sites add in.

DDP lays a gradient out as its parameter is, where that has no gaps: channels_last, say, or
transposed. Sites may differ in that, so elements cross in row-major order.
"""

from __future__ import annotations

import torch
from torch._C._distributed_c10d import GradBucket


def gradients_in(bucket: GradBucket) -> list[torch.Tensor]:
    """Return the bucket's gradients: views, of their parameters' shapes and dtypes.

    torch's own views are in row-major order, whatever its buckets are; and of complex gradients,
    which are two real numbers an element there, they have half as many.
    """
    buffer, start = bucket.buffer(), 0
    gradients = []
    for parameter in bucket.parameters():
        is_split = parameter.is_complex() and not buffer.is_complex()
        values = torch.view_as_complex(buffer.view(-1, 2)) if is_split else buffer
        flat = values[start : start + parameter.numel()]
        if is_laid_out_without_gaps(parameter):
            place = flat.storage_offset()
            gradients.append(flat.as_strided(parameter.shape, parameter.stride(), place))
        else:
            gradients.append(flat.view(parameter.shape))
        start += parameter.numel()
    return gradients


def is_laid_out_without_gaps(tensor: torch.Tensor) -> bool:
    """Whether its elements fill a range of memory, each once, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    numel = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != numel:
            return False
        numel *= size
    return True


def piece_of(grad: torch.Tensor) -> torch.Tensor:
    """Return a view of real numbers, which crosses in row-major order: flat, if it lies so."""
    real = torch.view_as_real(grad) if grad.is_complex() else grad
    return real.view(-1) if real.is_contiguous() else real
