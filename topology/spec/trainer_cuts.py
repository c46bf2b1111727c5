"""The cuts of its model that the shipped trainer can run, and the cut of a site. Pure.

The planner considers no others, and a placement with another is refused. The limits of a user's own
script are in its `workload.at_most`.
"""

from __future__ import annotations

from isthmus.topology.spec.compute import VOCABULARY
from isthmus.topology.spec.job import Job, Model, Trainer
from isthmus.topology.spec.workload import DescribedModel, Parallel
from isthmus.topology.spec.world import Site

RING_TOKENS_FP32 = 64
"""Tokens by which a rank's part of a sequence has to divide in fp32: torch's memory-efficient
kernel pads what ring attention adds up to 32 (kAlignLSE), and either half of the part goes through
it alone."""


def is_cut(job: Job) -> bool:
    """Whether the shipped trainer's sites share the model among their ranks (FSDP2).

    Else every rank has all of it (DistributedDataParallel). All sites do the same.
    """
    trainer = job.trainer
    is_written = any(each.parallel is not None for each in job.placement)
    return is_written or trainer.precision != "fp32" or trainer.offload


def cut_of(job: Job, site: Site) -> Parallel:
    """Return the cut of a site; by default each rank has a shard of one replica."""
    for each in job.placement:
        if each.site == site.name and each.parallel is not None:
            return each.parallel
    return Parallel(data=site.num_ranks, zero_stage=1, micro_batch=job.trainer.micro_batch)


def described(trainer: Trainer, *, micro_batch: int | None) -> DescribedModel:
    """Return the trainer's model in the form of a described one.

    `micro_batch` is the number of sequences at once; None: the plan decides.
    """
    model = trainer.model
    return DescribedModel(
        layers=model.layers,
        width=model.width,
        heads=model.heads,
        vocabulary=VOCABULARY,
        context=model.context,
        global_batch=trainer.global_batch,
        tied=model.tied,
        experts=model.experts,
        active_experts=model.active_experts,
        precision=trainer.precision,
        micro_batch=micro_batch,
        is_trainers=True,
    )


def why_not(model: Model | DescribedModel, cut: Parallel) -> str | None:
    """Return why the trainer cannot run a cut, naming the degree; None: it can."""
    is_expert = cut.expert > 1
    stages = cut.pipeline * cut.virtual_stages
    wanted = (
        (model.heads % cut.tensor == 0,
         f"tensor: {cut.tensor} does not divide the {model.heads} heads"),
        (model.context // cut.context % cut.tensor == 0,
         f"tensor: {cut.tensor} does not divide the context of {model.context // cut.context}, "
         "which it cuts too"),
        (cut.tensor == 1 or model.experts == 1,
         "tensor: the trainer cuts no model with experts so; want 1"),
        (cut.pipeline == 1 or not model.tied,
         "pipeline: first and last stage would share a matrix; want trainer.model.tied: false"),
        (stages <= model.layers,
         f"pipeline: {stages} stages are more than the {model.layers} layers"),
        (cut.context == 1 or model.context % (2 * cut.context) == 0,
         f"context: 2 x {cut.context} pieces do not divide the {model.context} tokens of a "
         "sequence; want trainer.model.context to be a multiple"),
        (cut.context == 1 or (cut.pipeline == 1 and not is_expert),
         "context: the trainer cuts no sequences in a pipeline, or where ranks share experts; "
         "want 1 with these"),
        (model.experts % cut.expert == 0,
         f"expert: {cut.expert} does not divide the {model.experts} experts"),
        (not is_expert or (cut.data >= 2 * cut.expert and cut.zero_stage > 0),
         "expert: want at least twice as many data ranks, and zero_stage 1 or 3"),
        (cut.zero_stage != 2,
         "zero_stage: 2 is not there, for gradients cross once a step; want 0, 1 or 3"),
        (cut.replicate == 1 or (cut.zero_stage > 0 and not is_expert),
         "replicate: want 1 with experts, or without a zero_stage"),
    )  # fmt: skip
    return next((why for fits, why in wanted if not fits), None)


def why_no_ring(trainer: Trainer, cut: Parallel, site: Site) -> str | None:
    """Return why a site cannot cut sequences so, naming `context`; None: it can, or does not."""
    if cut.context == 1:
        return None
    tokens = RING_TOKENS_FP32 * cut.context
    if "cpu" in site.accelerator.name.lower():
        why = f"{site.name} computes on the host, where torch has no ring attention; want 1"
    elif trainer.compile:
        why = "with trainer.compile it was not tried; want 1, or compile: false"
    elif trainer.precision == "fp32" and trainer.model.context % tokens:
        why = (
            f"torch's kernel for fp32 takes 32 tokens together, so {tokens} do not divide the "
            f"{trainer.model.context} of a sequence; want a multiple, or trainer.precision: bf16"
        )
    else:
        return None
    return f"context: {why}"


def is_planned(model: DescribedModel, cut: Parallel) -> bool:
    """Whether a plan may choose a cut: the trainer can run it with any number of sequences.

    Sequences are cut only where a placement says so: that has run on no card yet.
    """
    is_any = cut.data == 1 or cut.zero_stage > 0
    return why_not(model, cut) is None and is_any and cut.context == 1


def is_uneven(cut: Parallel, sequences: int) -> bool:
    """Whether replicas would have different numbers of sequences although the cut forbids it.

    Replicated parameters and experts are reduced with equal weights, so numbers must be equal.
    """
    return (cut.zero_stage == 0 or cut.expert > 1) and sequences % cut.data > 0
