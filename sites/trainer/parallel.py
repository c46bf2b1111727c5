"""Lays the model out over a site's ranks: tensor, pipeline, context, data and expert parallelism.

Each site may do it in its own way; `site.attach` finds out what a rank holds. The order is
torch's own: stages are cut out first, then come tensor and expert parallelism, recomputation,
compilation, and fully_shard last, around what each rank has by then.

Ranks are numbered as plans count them: neighbours belong to one tensor group, then come context,
data and pipeline. Ranks that share sequences hold no copies for that: to fully_shard they are as
replicas, each with the gradient of its own tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from isthmus.sites.trainer.compiling import compile_blocks
from isthmus.sites.trainer.experts import Experts
from isthmus.sites.trainer.gpt import Attention, Block, Gpt, Part
from isthmus.sites.trainer.pipeline import Pipeline
from isthmus.topology.spec.job import Trainer
from isthmus.topology.spec.model_shape import part_layers
from isthmus.topology.spec.workload import Parallel


@dataclass(frozen=True, slots=True)
class Laid:
    """The model as one rank has it."""

    parts: list[nn.Module]
    """The whole model, or this rank's stages of it."""
    data_mesh: DeviceMesh
    """The ranks with sequences of their own, of which this is one."""
    counted_mesh: DeviceMesh
    """The ranks with tokens of their own, of which this is one."""
    ring: DeviceMesh | None
    """The ranks that share this one's sequences; None: it has all of each."""
    pipeline: Pipeline | None
    """What takes micro-batches through the stages, if there are any."""


def lay_out(model: Gpt, cut: Parallel, config: Trainer, device: torch.device) -> Laid:
    """Lay the model out over all ranks of the site. A collective.

    Args:
        model: Whole, the same at all ranks; used up.
        cut: Its degrees multiply to the site's ranks.
        config: Says what blocks compute with.
        device: Of this rank.
    """
    mesh = site_mesh(cut, device, cut.replicate, 1)
    parts: list[nn.Module] = [model]
    stages = my_stages(cut, mesh)
    if cut.pipeline > 1:
        num_stages = cut.pipeline * cut.virtual_stages
        parts = [Part(model, _layers(model, stage, num_stages)) for stage in stages]
    for part in parts:
        if cut.tensor > 1:
            cut_tensors(part, mesh["tensor"])
        if cut.expert > 1:
            deal_experts(part, cut, config, device)
        rework_blocks(part, cut.recompute, compiled=config.compile)
        shard(part, cut, config, mesh)
    pipeline = None
    if cut.pipeline > 1:
        pipeline = Pipeline(parts, stages, cut, mesh["pipeline"].get_group(), device)
    counted = mesh["replicate", "shard"]
    if cut.context == 1:
        return Laid(parts, counted, counted, None, pipeline)
    sharing = sharing_mesh(cut, device)
    return Laid(parts, sharing["data"], counted, sharing["context"], pipeline)


def site_mesh(cut: Parallel, device: torch.device, replicate: int, expert: int) -> DeviceMesh:
    """Return all ranks of the site as a mesh; of ranks that share experts, one has some each."""
    data = cut.data * cut.context // expert
    replicate = data if cut.zero_stage == 0 else replicate
    sizes = (cut.pipeline, replicate, data // replicate, expert, cut.tensor)
    names = ("pipeline", "replicate", "shard", "expert", "tensor")
    return init_device_mesh(device.type, sizes, mesh_dim_names=names)


def sharing_mesh(cut: Parallel, device: torch.device) -> DeviceMesh:
    """Return all ranks of the site as a mesh, in which ranks that share sequences are a dim."""
    sizes = (cut.pipeline, cut.data, cut.context, cut.tensor)
    names = ("pipeline", "data", "context", "tensor")
    return init_device_mesh(device.type, sizes, mesh_dim_names=names)


def my_stages(cut: Parallel, mesh: DeviceMesh) -> list[int]:
    """Return this rank's stages: of interleaved ones every so many."""
    num_stages = cut.pipeline * cut.virtual_stages
    return [*range(mesh["pipeline"].get_local_rank(), num_stages, cut.pipeline)]


def _layers(model: Gpt, stage: int, num_stages: int) -> range:
    """Return the blocks of a stage: as many as plans count."""
    counts = part_layers(len(model.blocks), num_stages)
    first = sum(counts[:stage])
    return range(first, first + counts[stage])


def cut_tensors(part: nn.Module, mesh: DeviceMesh) -> None:
    """Cut heads and hidden widths over the ranks, and the sequence between them.

    What lies between the cut matrices, norms and the residual stream, is cut along the sequence.
    """
    along = Shard(1)
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=along),
        "position": RowwiseParallel(input_layouts=Replicate(), output_layouts=along),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=along, output_layouts=Replicate()),
    }
    here = {name for name, _ in part.named_children()}
    parallelize_module(part, mesh, {name: each for name, each in plan.items() if name in here})
    for block in blocks_of(part):
        parallelize_module(
            block,
            mesh,
            {
                "norm_attention": SequenceParallel(),
                "attention": PrepareModuleInput(
                    input_layouts=along, desired_input_layouts=Replicate()
                ),
                "attention.project_in": ColwiseParallel(),
                "attention.project_out": RowwiseParallel(output_layouts=along),
                "norm_feed": SequenceParallel(),
                "feed_in": ColwiseParallel(input_layouts=along),
                "feed_out": RowwiseParallel(output_layouts=along),
            },
        )
    if isinstance(part, Gpt) and part.output is None:  # logits by the embedding, cut by bytes
        whole = PrepareModuleOutput(
            output_layouts=along, desired_output_layouts=Replicate(), use_local_output=False
        )
        parallelize_module(part.norm, mesh, whole)
        logits = PrepareModuleOutput(output_layouts=Shard(2), desired_output_layouts=Replicate())
        parallelize_module(part, mesh, logits)
    # What DTensor returns is a view, of which fully_shard warns: its hook hangs at the tensor.
    part.register_forward_hook(lambda _module, _inputs, output: output.clone())


def deal_experts(part: nn.Module, cut: Parallel, config: Trainer, device: torch.device) -> None:
    """Give each rank of an expert group some of the experts, and shard these over the others."""
    mesh = site_mesh(cut, device, 1, cut.expert)
    for block in blocks_of(part):
        experts = block.experts
        assert isinstance(experts, Experts), "a model with experts"
        mlps = experts.mlps
        for name, whole in [*mlps.named_parameters()]:
            dealt = distribute_tensor(whole.detach(), mesh["expert"], [Shard(0)])
            setattr(mlps, name, nn.Parameter(dealt))
        mlps.mesh = mesh["expert"]
        _fully_shard(mlps, cut, config, mesh["shard"])


def rework_blocks(part: nn.Module, recompute: str, *, compiled: bool) -> None:
    """Let blocks compute activations again in the backward pass, and compile them."""
    again: dict[str, tuple[type[nn.Module], ...]] = {"selective": (Attention,), "full": (Block,)}
    for name, module in [*part.named_modules()]:
        if isinstance(module, again.get(recompute, ())):
            part.set_submodule(name, checkpoint_wrapper(module))
    if compiled:
        compile_blocks(part.get_submodule("blocks").children())


def shard(part: nn.Module, cut: Parallel, config: Trainer, mesh: DeviceMesh) -> None:
    """Call fully_shard on each block, and on the rest."""
    data = mesh["shard"] if mesh["replicate"].size() == 1 else mesh["replicate", "shard"]
    for block in part.get_submodule("blocks").children():
        _fully_shard(block, cut, config, data)
    _fully_shard(part, cut, config, data)


def _fully_shard(module: nn.Module, cut: Parallel, config: Trainer, mesh: DeviceMesh) -> FSDPModule:
    low = torch.bfloat16 if config.precision == "bf16" else None
    return fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=cut.zero_stage == 3,
        mp_policy=MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32),
        offload_policy=CPUOffloadPolicy() if config.offload else OffloadPolicy(),
    )


def blocks_of(part: nn.Module) -> Iterator[Block]:
    """Yield the blocks of a model, or of a pipeline's part of one."""
    for module in part.modules():
        if isinstance(module, Block):
            yield module
