"""Compute time of the shipped model on an accelerator. Pure.

FLOPs a token, after Chowdhery et al., "PaLM", appendix B, which also defines the MFU that a
topology gives: 6 N + 12 L W T, with N parameters that multiply every token, L layers, width W and
context T. A third of it is the forward pass, two thirds the backward pass. The causal mask is not
credited: attention counts in full. N leaves out what is only looked up, the positions, and counts
the embedding once, for it is the output matrix as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.topology.spec.job import Job, Model
from isthmus.topology.spec.world import Accelerator, Site, Topology

VOCABULARY = 256
"""Number of different bytes: the shipped model reads and predicts bytes."""
_DTYPES = ("bf16", "fp16", "fp32")
"""The dtypes whose peak counts, the preferred one first, where an accelerator has several."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One part of the model, whose gradients are ready together."""

    numels: tuple[int, ...]
    """Elements of its parameters, in the order of the forward pass."""
    flops_per_token: float
    """FLOPs of the forward pass for each token."""


@dataclass(frozen=True, slots=True)
class LayerTime:
    """One layer of one pass on one accelerator."""

    forward_s: float
    backward_s: float


def layers(model: Model) -> tuple[Layer, ...]:
    """Return the embedding, the blocks and the head, in the order of the forward pass.

    The tied embedding belongs to the first, for its gradient is complete only at the end of the
    backward pass; its multiplications belong to the head.
    """
    width, context = model.width, model.context
    norm = (width, width)  # a scale and a shift
    mlp = 4 * width**2
    router = (width * model.experts,) if model.experts > 1 else ()
    block = (
        *(*norm, 3 * width**2, width**2, *norm),
        *(*router, model.experts * mlp, model.experts * mlp),
    )
    met = sum(block) - 2 * (model.experts - model.active_experts) * mlp
    attention = 4 * width * context  # scores and their sums
    output = () if model.tied else (VOCABULARY * width,)
    return (
        Layer((VOCABULARY * width, context * width), 0.0),
        *[Layer(block, 2.0 * met + attention)] * model.layers,
        Layer((*norm, *output), 2.0 * (sum(norm) + VOCABULARY * width)),
    )


def num_parameters(model: Model) -> int:
    """Return the number of float32 parameters, which cross the WAN each step."""
    return sum(sum(layer.numels) for layer in layers(model))


def flops_per_sequence(model: Model) -> float:
    """Return the FLOPs of one forward and backward pass over `context` tokens."""
    return 3 * model.context * sum(layer.flops_per_token for layer in layers(model))


def peak_flops_per_s(accelerator: Accelerator) -> float:
    """Return the peak of the preferred dtype among the known ones."""
    peaks = accelerator.peak_flops_per_s
    dtype = next((each for each in _DTYPES if each in peaks), None)
    return max(peaks.values()) if dtype is None else peaks[dtype]


def rate_flops_per_s(accelerator: Accelerator) -> float:
    """Return the FLOP/s that a step reaches: peak times MFU."""
    return peak_flops_per_s(accelerator) * accelerator.mfu


def sequence_s(job: Job, site: Site) -> float:
    """Return the seconds of one sequence, forward and backward, on one accelerator of `site`."""
    return flops_per_sequence(job.trainer.model) / rate_flops_per_s(site.accelerator)


def layer_times(job: Job, site: Site, num_sequences: int) -> tuple[LayerTime, ...]:
    """Return the seconds of each layer for `num_sequences` on one accelerator of `site`.

    In the order of the forward pass.
    """
    model = job.trainer.model
    tokens_s = num_sequences * model.context / rate_flops_per_s(site.accelerator)
    return tuple(
        LayerTime(layer.flops_per_token * tokens_s, 2 * layer.flops_per_token * tokens_s)
        for layer in layers(model)
    )


def share(global_batch: int, ranks: int, rank: int) -> range:
    """Return a rank's range in a global batch: contiguous and as equal as possible."""
    if not 0 <= rank < ranks:
        raise ValueError(f"rank: want 0 to {ranks - 1}, got {rank}")
    return range(global_batch * rank // ranks, global_batch * (rank + 1) // ranks)


def rank_share(job: Job, topology: Topology, site: Site, rank: int) -> range:
    """Return the range in a global batch of a rank of `site`: contiguous, in site order.

    The job's placement sets the sequences of each site; without one, all ranks of all sites take
    equally many.
    """
    before = topology.sites[: site.index]
    if not job.placement:
        first = sum(each.num_ranks for each in before)
        return share(job.global_batch, topology.num_ranks, first + rank)
    sequences = {each.site: each.sequences for each in job.placement}
    begin = sum(sequences[each.name] for each in before)
    part = share(sequences[site.name], site.num_ranks, rank)
    return range(begin + part.start, begin + part.stop)


def site_shares(job: Job, topology: Topology, site: Site) -> tuple[int, ...]:
    """Return how many sequences of a step each rank of `site` takes."""
    return tuple(len(rank_share(job, topology, site, rank)) for rank in range(site.num_ranks))


def step_compute_s(job: Job, topology: Topology, site: Site) -> float:
    """Return the seconds that the busiest rank of `site` computes in one step."""
    num_sequences = max(site_shares(job, topology, site))
    return sum(
        layer.forward_s + layer.backward_s for layer in layer_times(job, site, num_sequences)
    )
