"""What computes inside a site, and what joins it; the constants of the model. Pure.

A kernel takes the time of its FLOPs plus that of the bytes it moves (a roofline whose two parts add
up, for no kernel overlaps them all the way). Three figures are fitted, to measured A100 steps:
GEMM_PASSES, and the A100's `gemm_efficiency` and `launch_s`; CONTENTION is chosen by published ones
(docs/cost-model.md: how, and what they miss). The others are from data sheets and published
microbenchmarks, named where they stand.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from topology.cost.collectives import Channel
from topology.cost.compute import peak_flops_per_s
from topology.world import Accelerator, Site

GEMM_PASSES = 1.6
"""Times that a matrix multiplication moves its operands and its result: tiles read the same operand
more than once, and those at the edges are partly empty. Fitted."""
STREAM_EFFICIENCY = 0.8
"""Of the memory's bandwidth, in element-wise kernels (STREAM on A100 reaches 0.8 to 0.9)."""
NODE_EFFICIENCY = 0.78
"""Of a node's fabric: nccl-tests' busbw of a large all-reduce, 235 of an A100's 300 GB/s."""
CLUSTER_EFFICIENCY = 0.85
"""Of the fabric between nodes, likewise."""
CONTENTION = 0.4
"""Of a collective that goes on beside multiplications: what it delays them by, for it takes
processors and memory bandwidth from them. Chosen to a tenth; 0.3 to 0.7 predict about as well."""
CAUSAL_BLOCK = 128
"""Tokens: fused attention skips what the causal mask hides by blocks of so many."""
NODE_LATENCY_S = 3.4e-6
CLUSTER_LATENCY_S = 14e-6
"""Of one step of a ring, within a node and between nodes: what NCCL reckons with (`hwLat` of its
src/graph/tuning.cc, protocol Simple)."""
NODE_HALF_BYTES = 1e6
CLUSTER_HALF_BYTES = 0.25e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, as kernels see it."""

    peak_flops_per_s: float
    """Of the matrix units, in the dtype that trains."""
    gemm_efficiency: float
    """Share of the peak that a large matrix multiplication reaches."""
    memory_bytes_per_s: float = math.inf
    """Of the data sheet; infinite: only FLOPs take time."""
    gemm_passes: float = GEMM_PASSES
    fused_efficiency: float | None = None
    """Share of the peak that fused attention reaches in forward and backward pass together, of the
    FLOPs that the causal mask leaves; None: of all of them `gemm_efficiency`, as any
    multiplication."""
    launch_s: float = 0.0
    """That the host needs to launch one layer's pass; the device is never ahead of it."""
    contention: float = 0.0
    """Of a collective beside compute, what it delays the compute by; 0 to 1."""

    def __post_init__(self) -> None:
        if not (self.peak_flops_per_s > 0 and self.memory_bytes_per_s > 0):
            raise ValueError(
                "Device: want peak_flops_per_s and memory_bytes_per_s > 0, got "
                f"{self.peak_flops_per_s} and {self.memory_bytes_per_s}"
            )
        if not 0 < self.gemm_efficiency <= 1 or self.launch_s < 0:
            raise ValueError(
                "Device: want gemm_efficiency in (0, 1] and launch_s >= 0, got "
                f"{self.gemm_efficiency} and {self.launch_s}"
            )
        if not 0 <= self.contention <= 1:
            raise ValueError(f"Device.contention: want 0 to 1, got {self.contention}")

    def gemm_s(self, m: float, k: float, n: float, element_bytes: int = 2) -> float:
        """Return the seconds of an m by k matrix times a k by n one."""
        moved_bytes = element_bytes * (m * k + k * n + m * n)
        flops_s = 2 * m * k * n / (self.peak_flops_per_s * self.gemm_efficiency)
        return flops_s + self.gemm_passes * self.stream_s(moved_bytes)

    def fused_attention_s(self, rows: float, sequence: float, head: float) -> float:
        """Return the seconds of a head's attention whose scores stay on the chip: only FLOPs count.

        Args:
            rows: queries, of a sequence's.
            sequence: keys; a query sees those before it, of a causal model.
            head: width of a head.
        """
        flops = 4 * rows * sequence * head
        if self.fused_efficiency is None:
            return flops / (self.peak_flops_per_s * self.gemm_efficiency)
        seen = min(1.0, (1 + CAUSAL_BLOCK / sequence) / 2)
        return seen * flops / (self.peak_flops_per_s * self.fused_efficiency)

    def beside_s(self, collective_s: float, compute_s: float) -> float:
        """Return what a collective adds to the compute that it goes on beside.

        What does not fit beside it, and of what does the `contention`.
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
    launch_s=2.2e-3,
    contention=CONTENTION,
)
"""A100 SXM 80 GB, bf16 or fp16 (NVIDIA's data sheet). cuBLAS reaches 270 to 280 TFLOP/s,
FlashAttention-2 about 175. `launch_s` is that of the software which the steps were measured with,
Megatron-LM of 2021 and 2022."""
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
"""By the names of topology/catalogue/accelerators.yaml."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interior:
    """The network inside a site."""

    node_ranks: int
    """Accelerators of a node."""
    node: Channel
    """Between them."""
    cluster: Channel
    """Between nodes; its bandwidth is one accelerator's share."""


def flat_device(accelerator: Accelerator) -> Device:
    """Return a device on which FLOPs take what the topology's peak and MFU say, and nothing else.

    The same as `topology.cost.compute`, so that plans agree with `trainer.compute: modelled`.
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
    """Return the network of nodes from data sheet figures.

    Args:
        node_ranks: accelerators of a node.
        node_bytes_per_s: of one accelerator towards the others of its node, one direction.
        cluster_bytes_per_s: of a whole node towards other nodes, one direction.
        cluster_latency_s: of a message between nodes.
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
