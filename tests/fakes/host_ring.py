"""Takes torch's ring attention to the host, where torch itself has no entry for it.

Templates, load balance and collectives are torch's own; only the kernel is that for CPUs, which
gives the same two results as CUDA's. So a test learns what sequences cut over ranks come to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from isthmus.sites.trainer import ring as trainers

try:
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring
except ImportError:  # before torch 2.10
    from torch.distributed.tensor.experimental import _attention as ring  # type: ignore[no-redef]

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_SEQUENCE = 2
"""The dim of tokens."""


def allow() -> None:
    """Let this process cut sequences on its host."""
    trainers.DEVICES = ("cuda", "cpu")
    custom_ops().update(HANDLERS)


def custom_ops() -> dict[Any, Any]:
    """Return torch's own table of what it takes round a ring."""
    name = "custom_ops" if hasattr(ring, "custom_ops") else "customized_ops"  # torch 2.9
    found: dict[Any, Any] = getattr(ring, name)
    return found


def _forward(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    q, k, v, *_rest = map(_local, args)
    group = args[0].device_mesh.get_group()
    causal = kwargs.get("is_causal", args[4] if len(args) > 4 else False)
    out = ring._templated_ring_attention(group, _SEQUENCE, _FORWARD, q, k, v, is_causal=causal)
    return _cut(out, args[0])


def _backward(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    grad_out, q, k, v, out, sums, dropout, causal = map(_local, args)
    group = args[0].device_mesh.get_group()
    grads = ring._templated_ring_attention_backward(
        group,
        _SEQUENCE,
        _BACKWARD,
        grad_out,
        "grad_out",
        q,
        k,
        v,
        out,
        sums,
        causal,
        dropout_p=dropout,
    )
    return _cut(grads, args[0])


HANDLERS = {_FORWARD: _forward, _BACKWARD: _backward}


def _local(each: Any) -> Any:  # noqa: ANN401
    return each.to_local() if isinstance(each, DTensor) else each


def _cut(tensors: tuple[torch.Tensor, ...], like: DTensor) -> tuple[DTensor, ...]:
    mesh = like.device_mesh
    return tuple(
        DTensor.from_local(each, mesh, [Shard(_SEQUENCE)], run_check=False) for each in tensors
    )
