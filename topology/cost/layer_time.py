"""The time of one layer and micro-batch on one rank, by its device and network. Pure.

A kernel takes the time of its FLOPs plus the time of the bytes it moves. This is a roofline whose
two parts add up, for no kernel overlaps them all the way. Fitted to measured A100 steps are
GEMM_PASSES, and the A100's `gemm_efficiency` and `launch_s`; CONTENTION is chosen by published
steps (docs/cost-model.md). The other constants are from data sheets and published microbenchmarks.

Legend: b sequences of s tokens (s/c with context parallelism), width h, a heads, t tensor ranks.

- Matrices: each multiplication by itself, with its shape as `t` leaves it (`Device.gemm_s`). The
  backward pass has two of each. Scores and their sums are b a/t small ones. Fused attention
  computes the scores again in its backward pass, which takes 2.5 times the forward pass instead of
  2 (Dao et al.).
- Element-wise kernels: the elements of size h that they read or write for each token, counted from
  the kernels of a GPT layer as Megatron-LM fuses them. Norms, dropout and residual are whole at
  each tensor rank unless the sequence is cut (Korthikanti et al.). Scores are s² a numbers a
  sequence.
- Tensor parallelism: two all-reduces of b s h elements a pass (Shoeybi et al.). With sequence
  parallelism there are as many reduce-scatters and all-gathers, which cost the same. With
  `overlap_tensor` they are cut into t pieces and go on beside the multiplications (Wang et al.,
  ASPLOS'23), which they delay by the device's `contention` of their time.
- Context parallelism: keys and values go once round the ring, behind the attention (Liu et al.,
  "Ring Attention"). What the attention does not cover is exposed. The backward pass sends twice as
  much.
- Expert parallelism: two all-to-alls a pass of the tokens that are sent to experts (balanced).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from isthmus.topology.cost.collectives import (
    Channel,
    Level,
    all_reduce_s,
    all_to_all_s,
    levels_of,
    reduce_scatter_s,
)
from isthmus.topology.spec.compute import peak_flops_per_s
from isthmus.topology.spec.model_shape import Degrees, Workload
from isthmus.topology.spec.world import Accelerator, Site

GEMM_PASSES = 1.6
"""Times that a matrix multiplication moves its operands and its result: tiles read the same operand
more than once, and those at the edges are partly empty. Fitted."""
STREAM_EFFICIENCY = 0.8
"""Share of the memory's bandwidth that element-wise kernels reach (STREAM on A100: 0.8 to 0.9)."""
NODE_EFFICIENCY = 0.78
"""Share of a node's fabric that collectives reach: nccl-tests' busbw of a large all-reduce is 235
of an A100's 300 GB/s."""
CLUSTER_EFFICIENCY = 0.85
"""Share of the fabric between nodes that collectives reach."""
CONTENTION = 0.4
"""Share of a collective's time by which it delays the multiplications beside it, for it takes
processors and memory bandwidth from them. Chosen to a tenth; 0.3 to 0.7 predict about as well."""
CAUSAL_BLOCK = 128
"""Tokens in a block of fused attention, which skips what the causal mask hides block by block."""
NODE_LATENCY_S = 3.4e-6
CLUSTER_LATENCY_S = 14e-6
"""Seconds of latency of one step of a ring, within a node and between nodes. NCCL reckons with the
same (`hwLat` of its src/graph/tuning.cc, protocol Simple)."""
NODE_HALF_BYTES = 1e6
CLUSTER_HALF_BYTES = 0.25e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The speeds of one accelerator, as kernels see them."""

    peak_flops_per_s: float
    """FLOP/s of the matrix units at most, in the dtype that trains."""
    gemm_efficiency: float
    """Share of the peak that a large matrix multiplication reaches."""
    memory_bytes_per_s: float = math.inf
    """Bytes per second of the memory by the data sheet; infinite: only FLOPs take time."""
    gemm_passes: float = GEMM_PASSES
    fused_efficiency: float | None = None
    """Share of the peak that fused attention reaches in forward and backward pass together. Only
    the FLOPs that the causal mask leaves count. None: `gemm_efficiency` of all FLOPs, as in any
    multiplication."""
    launch_s: float = 0.0
    """Seconds that the host needs to launch one layer's pass; the device is never ahead of it."""
    contention: float = 0.0
    """Share of a collective's time by which it delays the compute beside it; 0 to 1."""

    def gemm_s(self, m: float, k: float, n: float, element_bytes: int = 2) -> float:
        """Return the seconds of an m by k matrix times a k by n one."""
        moved_bytes = element_bytes * (m * k + k * n + m * n)
        flops_s = 2 * m * k * n / (self.peak_flops_per_s * self.gemm_efficiency)
        return flops_s + self.gemm_passes * self.stream_s(moved_bytes)

    def fused_attention_s(self, rows: float, sequence: float, head: float) -> float:
        """Return the seconds of a head's attention whose scores stay on the chip: only FLOPs count.

        Rows are queries. The sequence's tokens are keys, of which a query sees those before it.
        """
        flops = 4 * rows * sequence * head
        if self.fused_efficiency is None:
            return flops / (self.peak_flops_per_s * self.gemm_efficiency)
        seen = min(1.0, (1 + CAUSAL_BLOCK / sequence) / 2)
        return seen * flops / (self.peak_flops_per_s * self.fused_efficiency)

    def beside_s(self, collective_s: float, compute_s: float) -> float:
        """Return the seconds that an overlapped collective adds to the compute beside it.

        That is the part longer than the compute, and the share `contention` of the rest.
        """
        hidden_s = min(collective_s, compute_s)
        return collective_s - hidden_s + self.contention * hidden_s

    def stream_s(self, moved_bytes: float) -> float:
        """Return the seconds of kernels that read and write `moved_bytes` in all."""
        return moved_bytes / (self.memory_bytes_per_s * STREAM_EFFICIENCY)


A100 = Device(
    peak_flops_per_s=312e12,
    gemm_efficiency=0.88,
    memory_bytes_per_s=2.039e12,
    fused_efficiency=0.55,
    launch_s=0.9e-3,
    contention=CONTENTION,
)
"""A100 SXM 80 GB, bf16 or fp16 (NVIDIA's data sheet). cuBLAS reaches 270 to 280 TFLOP/s,
FlashAttention-2 about 175. `launch_s` is what vTrain's 1,440 steps of small models on one node of
Megatron-LM need (docs/measurements/cost-model.md)."""
H100 = Device(
    peak_flops_per_s=989.4e12,
    gemm_efficiency=0.74,
    memory_bytes_per_s=3.35e12,
    fused_efficiency=0.5,
    launch_s=0.5e-3,
    contention=CONTENTION,
)
"""H100 SXM 80 GB, bf16 (NVIDIA's data sheet). Its power limits cuBLAS to 700 to 760 TFLOP/s;
attention by cuDNN 9 or FlashAttention-3 reaches about 500. `launch_s` is that of fused kernels on a
fast host; no case here depends on it."""
DEVICES = {
    "a100-40": dataclasses.replace(A100, memory_bytes_per_s=1.555e12),
    "a100-80": A100,
    "h100-sxm": H100,
    "h200": dataclasses.replace(H100, memory_bytes_per_s=4.8e12),
}
"""The known devices, by their names in topology/catalogue/accelerators.yaml."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interior:
    """The network inside a site."""

    node_ranks: int
    """Number of accelerators of a node."""
    node: Channel
    """The connection between the accelerators of a node."""
    cluster: Channel
    """The connection between nodes; its bandwidth is one accelerator's share."""


def flat_device(accelerator: Accelerator) -> Device:
    """Return a device whose time is only FLOPs, at the topology's peak and MFU.

    It equals `topology/spec/compute.py`, so that plans agree with `trainer.compute: modelled`.
    """
    peak = peak_flops_per_s(accelerator)
    return Device(peak_flops_per_s=peak, gemm_efficiency=accelerator.mfu)


def device_of(accelerator: Accelerator) -> Device:
    """Return the device that DEVICES knows by name, with the topology's peak; else the flat one."""
    flat = flat_device(accelerator)
    known = DEVICES.get(accelerator.name.lower())
    if known is None:
        return flat
    return dataclasses.replace(known, peak_flops_per_s=flat.peak_flops_per_s)


def interior(
    node_ranks: int,
    node_bytes_per_s: float,
    cluster_bytes_per_s: float,
    cluster_latency_s: float = CLUSTER_LATENCY_S,
) -> Interior:
    """Return the network of nodes from data sheet figures, of one direction.

    `node_bytes_per_s` is one accelerator's, `cluster_bytes_per_s` a whole node's.
    """
    share_bytes_per_s = CLUSTER_EFFICIENCY * cluster_bytes_per_s / node_ranks
    return Interior(
        node_ranks=node_ranks,
        node=Channel(
            NODE_EFFICIENCY * node_bytes_per_s,
            min(NODE_LATENCY_S, cluster_latency_s),
            NODE_HALF_BYTES,
        ),
        cluster=Channel(share_bytes_per_s, cluster_latency_s, CLUSTER_HALF_BYTES),
    )


def interior_of(site: Site) -> Interior:
    """Return the network of a topology's site; without a fabric it costs nothing."""
    if site.fabric is None:
        free = Channel(math.inf)
        return Interior(node_ranks=site.accelerators_per_node, node=free, cluster=free)
    fabric = site.fabric
    return interior(
        site.accelerators_per_node,
        fabric.node_bytes_per_s,
        fabric.cluster_bytes_per_s,
        fabric.latency_s,
    )


_FORWARD_WHOLE, _BACKWARD_WHOLE = 11.0, 17.0
"""Elements of size h that two norms and two bias-dropout-residuals move (masks count half)."""
_FORWARD_SCORES, _BACKWARD_SCORES = 4.5, 5.5
"""Elements of the scores that mask, softmax and dropout move."""
_LOSS_BYTES = 24
"""Bytes that the cross entropy moves for each logit: to float32, maximum, exponential, gradient."""


@dataclass(frozen=True, slots=True)
class PassTimes:
    """The times of one layer of one micro-batch."""

    forward_s: float
    backward_s: float
    """Seconds of the backward pass, including what is computed again."""
    exchange_s: float = 0.0
    """Seconds of both passes that collectives of tensor, context and expert groups take."""

    @property
    def total_s(self) -> float:
        """The seconds of both passes."""
        return self.forward_s + self.backward_s

    def times(self, count: float) -> PassTimes:
        """Return the times of `count` such layers."""
        return PassTimes(count * self.forward_s, count * self.backward_s, count * self.exchange_s)


@dataclass(frozen=True, slots=True)
class _Compute:
    """Seconds of one pass over one layer."""

    matrices_s: float
    core_s: float
    """Seconds of the scores and their sums: the part that selective recomputation repeats."""


def layer_times(
    workload: Workload, degrees: Degrees, device: Device, interior: Interior
) -> PassTimes:
    """Return the times of one layer on one rank."""
    forward, backward = _forward(workload, degrees, device), _backward(workload, degrees, device)
    tensor_s = _tensor_s(workload, degrees, interior)
    once_s, ring_s = _expert_s(workload, degrees, interior), _ring_s(workload, degrees, interior)
    forward_exchange_s = once_s + device.beside_s(ring_s, forward.core_s)
    forward_exchange_s += _uncovered_s(tensor_s, forward.matrices_s, degrees, device)
    backward_exchange_s = once_s + device.beside_s(2 * ring_s, backward.core_s)
    backward_exchange_s += _uncovered_s(tensor_s, backward.matrices_s, degrees, device)
    forward_s = forward.matrices_s + forward.core_s + forward_exchange_s
    backward_s = backward.matrices_s + backward.core_s + backward_exchange_s
    launches = 2
    if degrees.recompute == "full":
        backward_s, launches = backward_s + forward_s, 3
        backward_exchange_s += forward_exchange_s
    elif degrees.recompute == "selective" and not degrees.fused_attention:
        backward_s += forward.core_s
    return PassTimes(
        max(forward_s, device.launch_s),
        max(backward_s, launches * device.launch_s),
        forward_exchange_s + backward_exchange_s,
    )


def head_times(workload: Workload, degrees: Degrees, device: Device) -> PassTimes:
    """Return the times of logits and loss on a rank of the last stage."""
    tokens, columns = _tokens(workload, degrees), workload.vocabulary / degrees.tensor
    logits_s = device.gemm_s(tokens, workload.hidden, columns, workload.parameter_bytes)
    loss_s = device.stream_s(_LOSS_BYTES * tokens * columns)
    return PassTimes(logits_s + loss_s / 2, 2 * logits_s + loss_s / 2)


def activation_bytes(workload: Workload, degrees: Degrees) -> float:
    """Return the bytes of one micro-batch between two layers: b s h elements."""
    return _tokens(workload, degrees) * workload.hidden * workload.parameter_bytes


def _tokens(workload: Workload, degrees: Degrees) -> float:
    return degrees.micro_batch * workload.sequence / degrees.context


def _forward(workload: Workload, degrees: Degrees, device: Device) -> _Compute:
    matrices_s, core_s = _gemms(workload, degrees, device)
    moved = _moved_elements(workload, degrees, _FORWARD_WHOLE, mlp=3 if workload.gated else 2)
    scores = _FORWARD_SCORES * _score_elements(workload, degrees)
    width = workload.parameter_bytes
    return _Compute(
        matrices_s + device.stream_s(moved * width), core_s + device.stream_s(scores * width)
    )


def _backward(workload: Workload, degrees: Degrees, device: Device) -> _Compute:
    matrices_s, core_s = _gemms(workload, degrees, device)
    moved = _moved_elements(workload, degrees, _BACKWARD_WHOLE, mlp=5 if workload.gated else 3)
    scores = _BACKWARD_SCORES * _score_elements(workload, degrees)
    width = workload.parameter_bytes
    again = 2.5 if degrees.fused_attention else 2.0
    return _Compute(
        2 * matrices_s + device.stream_s(moved * width),
        again * core_s + device.stream_s(scores * width),
    )


def _gemms(workload: Workload, degrees: Degrees, device: Device) -> tuple[float, float]:
    """Return the forward seconds of (matrices, attention scores and their sums)."""
    tokens, hidden, tensor = _tokens(workload, degrees), workload.hidden, degrees.tensor
    width = workload.parameter_bytes
    matrices_s = device.gemm_s(tokens, hidden, (hidden + 2 * workload.kv_width) / tensor, width)
    matrices_s += device.gemm_s(tokens, hidden / tensor, hidden, width)
    local_experts = workload.experts / degrees.expert
    routed = tokens * workload.experts_per_token / local_experts  # per local expert, if balanced
    up = (2 if workload.gated else 1) * workload.mlp_width / tensor
    mlp_s = device.gemm_s(routed, hidden, up, width)
    mlp_s += device.gemm_s(routed, workload.mlp_width / tensor, hidden, width)
    head, rows = hidden / workload.heads, workload.sequence / degrees.context
    if degrees.fused_attention:
        core_s = device.fused_attention_s(rows, workload.sequence, head)
    else:
        core_s = device.gemm_s(rows, head, workload.sequence, width)
        core_s += device.gemm_s(rows, workload.sequence, head, width)
    num_heads = degrees.micro_batch * workload.heads / tensor
    return matrices_s + local_experts * mlp_s, num_heads * core_s


def _moved_elements(workload: Workload, degrees: Degrees, whole: float, mlp: int) -> float:
    """Return the elements that element-wise kernels read and write, but for those of scores.

    `whole` elements of size h are moved at every tensor rank, `mlp` of the MLP's width.
    """
    tokens, tensor = _tokens(workload, degrees), degrees.tensor
    cut = tensor if degrees.sequence_parallel else 1
    heads = 2 * (workload.hidden + 2 * workload.kv_width)  # queries, keys and values, transposed
    activation = mlp * workload.experts_per_token * workload.mlp_width
    return tokens * (whole * workload.hidden / cut + (heads + activation) / tensor)


def _score_elements(workload: Workload, degrees: Degrees) -> float:
    if degrees.fused_attention:
        return 0.0
    return _tokens(workload, degrees) * workload.sequence * workload.heads / degrees.tensor


def _tensor_s(workload: Workload, degrees: Degrees, interior: Interior) -> float:
    """Return the seconds of a pass's collectives in the tensor group."""
    return 2 * all_reduce_s(
        _levels(degrees.tensor, 1, interior), activation_bytes(workload, degrees)
    )


def _uncovered_s(tensor_s: float, matrices_s: float, degrees: Degrees, device: Device) -> float:
    """Return the exposed seconds of a tensor group's collectives.

    Overlapped, each is cut into t pieces, of which the first or the last has nothing to hide
    behind.
    """
    if not degrees.overlap_tensor:
        return tensor_s
    return max(tensor_s / degrees.tensor, device.beside_s(tensor_s, matrices_s))


def _ring_s(workload: Workload, degrees: Degrees, interior: Interior) -> float:
    """Return the seconds that keys and values need round the context group, once."""
    elements = 2 * degrees.micro_batch * workload.sequence * workload.kv_width
    pair_bytes = elements * workload.parameter_bytes / degrees.tensor
    return reduce_scatter_s(_levels(degrees.context, degrees.tensor, interior), pair_bytes)


def _expert_s(workload: Workload, degrees: Degrees, interior: Interior) -> float:
    """Return the seconds of a pass's dispatch and combination of tokens."""
    cut = degrees.tensor if degrees.sequence_parallel else 1
    sent_bytes = activation_bytes(workload, degrees) * workload.experts_per_token / cut
    levels = _levels(degrees.expert, degrees.tensor * degrees.context, interior)
    return 2 * all_to_all_s(levels, sent_bytes)


def _levels(ranks: int, stride: int, interior: Interior) -> list[Level]:
    return levels_of(ranks, stride, interior.node_ranks, interior.node, interior.cluster)
