"""How a site could cut a model over its ranks: every way in question, and what fits its memory.

Degrees are divisors of a site's ranks: tensor groups stay within a node, and all ranks take part.
What is left after tensor, pipeline and context is data. Stages may differ by a layer; the widest
one counts. ZeRO 2 and 3 come without a pipeline only: cut gradients or parameters would cross the
fabric again for every micro-batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from topology.cost.memory import memory
from topology.cost.model_shape import Degrees, Workload
from topology.units import format_size
from topology.workload import DescribedModel, Parallel
from topology.world import Site

CONTEXT_TOKENS_MIN = 2048
"""Of a sequence that context parallelism leaves to a rank: kernels of fewer are mostly overhead."""
MICRO_BATCHES = (1, 2, 4, 8, 16)
"""Sequences at once that are tried, where the job does not say."""
VIRTUAL_STAGES_MAX = 16


def every_cut(model: DescribedModel, site: Site) -> Iterator[Degrees]:
    """Yield every way to cut a model over all of a site's ranks, whether it fits memory or not."""
    limits = {
        name: most for name, most in dataclasses.asdict(model.at_most).items() if most is not None
    }
    for degrees in _cuts(model, site):
        if all(getattr(degrees, name) <= most for name, most in limits.items()):
            yield degrees


def _cuts(model: DescribedModel, site: Site) -> Iterator[Degrees]:
    for tensor in _divisors(math.gcd(site.accelerators_per_node, model.heads)):
        for pipeline in _pipelines(model, site.num_ranks // tensor):
            for context in _contexts(model, site.num_ranks // (tensor * pipeline)):
                data = site.num_ranks // (tensor * pipeline * context)
                base = Degrees(
                    tensor=tensor,
                    pipeline=pipeline,
                    context=context,
                    data=data,
                    sequence_parallel=tensor > 1,
                    fused_attention=model.fused_attention,
                    overlap_data=True,
                )
                if data <= model.global_batch:
                    yield from _variants(model, base)


def _variants(model: DescribedModel, base: Degrees) -> Iterator[Degrees]:
    sizes = MICRO_BATCHES if model.micro_batch is None else (model.micro_batch,)
    again = ("none", "full") if model.fused_attention else ("none", "selective", "full")
    for expert in _divisors(math.gcd(model.experts, base.data)):
        for zero_stage in _zero_stages(base):
            for virtual_stages in _virtual_stages(model, base.pipeline):
                for micro_batch in sizes:
                    if micro_batch > 1 and base.data * micro_batch > model.global_batch:
                        continue
                    for recompute in again:
                        yield dataclasses.replace(
                            base,
                            expert=expert,
                            zero_stage=zero_stage,
                            virtual_stages=virtual_stages,
                            micro_batch=micro_batch,
                            recompute=recompute,
                        )


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _contexts(model: DescribedModel, ranks: int) -> list[int]:
    most = max(1, model.context // CONTEXT_TOKENS_MIN)
    return [each for each in _divisors(math.gcd(ranks, model.context)) if each <= most]


def _zero_stages(base: Degrees) -> tuple[int, ...]:
    if base.data * base.context == 1:
        return (0,)
    return (0, 1, 2, 3) if base.pipeline == 1 else (0, 1)


def _pipelines(model: DescribedModel, ranks: int) -> list[int]:
    """Return the numbers of stages, but for those of which fewer have as narrow a widest stage."""
    counts = [each for each in _divisors(ranks) if each <= model.layers]
    return [each for each in counts if math.ceil(model.layers / _widest(model, each)) == each]


def _widest(model: DescribedModel, num_parts: int) -> int:
    return math.ceil(model.layers / num_parts)


def _virtual_stages(model: DescribedModel, pipeline: int) -> list[int]:
    """Return the numbers of parts of a stage that do not make the widest stage wider."""
    if pipeline == 1:
        return [1]
    most = min(VIRTUAL_STAGES_MAX, model.layers // pipeline)
    return [
        each
        for each in range(1, most + 1)
        if each * _widest(model, pipeline * each) == _widest(model, pipeline)
    ]


def parallel_of(degrees: Degrees) -> Parallel:
    """Return a cut as jobs and plans write it."""
    names = [field.name for field in dataclasses.fields(Parallel)]
    return Parallel(**{name: getattr(degrees, name) for name in names})


def in_words(degrees: Degrees) -> str:
    """Return a cut for people: `tensor 8, pipeline 12, data 16, ZeRO 1, micro-batch 1`."""
    words = [f"tensor {degrees.tensor}"]
    if degrees.pipeline > 1:
        words.append(f"pipeline {degrees.pipeline}")
    if degrees.virtual_stages > 1:
        words.append(f"{degrees.virtual_stages} virtual stages")
    if degrees.context > 1:
        words.append(f"context {degrees.context}")
    words.append(f"data {degrees.data}")
    if degrees.expert > 1:
        words.append(f"expert {degrees.expert}")
    if degrees.zero_stage:
        words.append(f"ZeRO {degrees.zero_stage}")
    words.append(f"micro-batch {degrees.micro_batch}")
    if degrees.recompute != "none":
        words.append(f"{degrees.recompute} recompute")
    return ", ".join(words)


def why_not(workload: Workload, degrees: Degrees, site: Site, num_sequences: int) -> str | None:
    """Return why a cut does not fit a site's memory, and what recomputing does; None: it fits."""
    needed = memory(workload, degrees, num_sequences).total
    has = site.accelerator.memory_bytes
    if needed <= has:
        return None
    told = f"{in_words(degrees)} does not fit: needs {_gib(needed)} of {format_size(has)}"
    if degrees.recompute == "full":
        return told
    full = dataclasses.replace(degrees, recompute="full")
    return f"{told}; with full recompute {_gib(memory(workload, full, num_sequences).total)}"


def _gib(num_bytes: float) -> str:
    size = num_bytes / 2**30
    return f"{size:.0f}GiB" if size >= 100 else f"{size:.3g}GiB"
