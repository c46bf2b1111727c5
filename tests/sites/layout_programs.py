"""What ranks run in tests of sites with different layouts: one small model, laid out in many ways.

The model has what each kind of parallelism cuts: an embedding, layers of two matrices, and experts.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from torch import nn
from torch.autograd import backward
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from isthmus.sites.worker.api.site import Site
from isthmus.sites.worker.exchange.collectives import Collectives
from isthmus.sites.worker.exchange.routes import Holders
from isthmus.sites.worker.exchange.sharding import local_of, whole_of
from isthmus.sites.worker.regimes.streaming import Streaming
from isthmus.topology.spec.regime import Regime, Rung
from tests.fakes.ranks import wait_for_all_ranks
from tests.sites.worker_programs import join_site

VOCABULARY, WIDTH, HIDDEN, EXPERTS, LAYERS = 11, 32, 64, 4, 2
SAMPLES, LENGTH = 12, 5
LEARNING_RATE = 0.2
CLIP_NORM = 0.3
MICRO_BATCHES = {"pp": 2, "pp4": 4, "pp6": 6, "interleaved": 4}
LONE = {"lone": 1, "lone-tp": 2, "lone-pp": 4}
"""Layouts that nothing wraps, and their ranks, which share one batch."""

RANKS = {"fsdp3": 3, "fsdp2": 2, "tp": 4, "ep": 4, "moe": 4, "hsdp": 4, "ddp": 2, "recomputed": 2}
RANKS["offloaded"] = 2
RANKS |= dict.fromkeys(MICRO_BATCHES, 4)
DATA_RANKS = {**RANKS, "tp": 2, **dict.fromkeys(MICRO_BATCHES, 2), **dict.fromkeys(LONE, 1)}
RANKS |= LONE
SUM = "-sum"
"""Behind a layout's name: its loss is a sum over tokens, and fully_shard divides by nothing."""
for _each in [*RANKS]:
    RANKS[_each + SUM], DATA_RANKS[_each + SUM] = RANKS[_each], DATA_RANKS[_each]


class Experts(nn.Module):
    """Every token goes to all experts, weighed by a gate; ranks of `mesh` have some experts each.

    All of them then compute for the tokens of all of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)
        self.mesh: DeviceMesh | None = None

    def forward(self, inputs: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        if self.mesh is None:
            return self._own(inputs, gate, self.up, self.down, 0)
        group, rank, size = self.mesh.get_group(), self.mesh.get_local_rank(), self.mesh.size()
        every_input, every_gate = (
            _sum(torch.cat([each if rank == place else each * 0 for place in range(size)]), group)
            for each in (inputs, gate)
        )
        up, down = (local_with_grad(each) for each in (self.up, self.down))
        part = self._own(every_input, every_gate, up, down, rank * len(up))
        outputs = _sum(part, group)
        return outputs[rank * len(inputs) : (rank + 1) * len(inputs)]

    @staticmethod
    def _own(
        inputs: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, first: int
    ) -> torch.Tensor:
        hidden = torch.tanh(torch.einsum("blw,ewh->eblh", inputs, up))
        outputs = torch.einsum("eblh,ehw->eblw", hidden, down)
        return torch.einsum("eblw,ble->blw", outputs, gate[..., first : first + len(up)])


def _sum(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Add up over the ranks; backward adds up gradients, too."""
    reduce: Any = collectives.all_reduce
    result: torch.Tensor = reduce(values, group=group)
    return result


def local_with_grad(parameter: torch.Tensor) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    local: torch.Tensor = parameter.to_local()
    return local


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        normed = self.norm(inputs)
        inner = inputs + self.down(torch.tanh(self.up(normed)))
        result: torch.Tensor = inner + self.experts(normed, self.router(normed).softmax(-1))
        return result


class Net(nn.Module):
    """The whole model; a pipeline's part lacks some of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding: nn.Module | None = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(index): Layer() for index in range(LAYERS)})
        self.head: nn.Module | None = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("table", torch.arange(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        values = inputs if self.embedding is None else self.embedding(inputs)
        for layer in self.layers.values():
            values = layer(values)
        result: torch.Tensor = values if self.head is None else self.head(values)
        return result


class Tied(Net):
    """Reads out by the matrix that embeds: the first part of a pipeline has it, and the last."""

    def __init__(self) -> None:
        super().__init__()
        self.head = None
        self.is_first = self.is_last = True

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        values = inputs
        if self.is_first:
            assert self.embedding is not None
            values = self.embedding(inputs)
        for layer in self.layers.values():
            values = layer(values)
        if self.is_last:
            assert isinstance(self.embedding, nn.Embedding)
            values = nn.functional.linear(values, self.embedding.weight)
        return values


def net(seed: int, *, is_tied: bool = False) -> Net:
    torch.manual_seed(seed)
    return Tied() if is_tied else Net()


def data(step: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of one data-parallel rank among those of all sites, and what follows."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    tokens = torch.randint(VOCABULARY, (2, SAMPLES, LENGTH), generator=generator)
    return tokens[0], tokens[1]


def tokens_of(layout: str, step: int, place: int) -> int:
    """Return what a data-parallel rank counts; ranks with means that share experts count alike."""
    return 2 + step % 3 if layout in {"ep", "moe"} else 1 + 2 * place + step % 2


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.reshape(-1, VOCABULARY), targets.reshape(-1))


@dataclass
class Laid:
    """A model as one rank has it."""

    models: list[nn.Module]
    """Or its parts, where this rank has several of a pipeline."""
    place: int
    """The place of this rank among those of the site that have data of their own."""
    step: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    """Computes gradients of the loss times a number, and returns the loss, on ranks that have it;
    else nothing."""
    data_mesh: DeviceMesh | None = None
    """The ranks of the site with data of their own, this one among them; None: all."""

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for each in self.models for parameter in each.parameters()]


def lay_out(layout: str, model: Net) -> Laid:
    """Lay the model out over all ranks of the site."""
    name = layout.removesuffix(SUM)
    ways = {
        "ddp": _ddp,
        "tp": _tp,
        "ep": _ep,
        "moe": _moe,
        "hsdp": _hsdp,
        "recomputed": _recomputed,
        "offloaded": _offloaded,
        "lone": _lone,
        "lone-tp": _lone_tp,
        "lone-pp": _lone_pp,
    }
    laid = pipelined(name, model) if name in MICRO_BATCHES else ways.get(name, _fsdp)(model)
    if layout.endswith(SUM):
        for each in [module for part in laid.models for module in part.modules()]:
            if isinstance(each, FSDPModule):
                each.set_gradient_divide_factor(1.0)
                each.set_force_sum_reduction_for_comms(True)  # for Gloo
    return laid


def _whole(model: nn.Module) -> Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]:
    def step(inputs: torch.Tensor, targets: torch.Tensor, weight: float) -> torch.Tensor:
        loss = loss_of(model(inputs), targets)
        backward(loss * weight)
        return loss.detach()

    return step


def _shard(model: Net, mesh: DeviceMesh) -> None:
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _ddp(model: Net) -> Laid:
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.004)
    return Laid([wrapped], dist.get_rank(), _whole(wrapped))


def _fsdp(model: Net) -> Laid:
    _shard(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    return Laid([model], dist.get_rank(), _whole(model))


def _hsdp(model: Net) -> Laid:
    _shard(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return Laid([model], dist.get_rank(), _whole(model))


def _tp(model: Net) -> Laid:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    _parallelize(model, mesh["tp"])
    _shard(model, mesh["dp"])
    return Laid([model], mesh["dp"].get_local_rank(), _whole(model), mesh["dp"])


def _parallelize(model: Net, mesh: DeviceMesh) -> None:
    for layer in model.layers.values():
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _lone(model: Net) -> Laid:
    return Laid([model], 0, _whole(model))


def _lone_tp(model: Net) -> Laid:
    _parallelize(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    return Laid([model], 0, _whole(model))


def _lone_pp(model: Net) -> Laid:
    """A pipeline whose stages nothing wraps, each by tensor parallelism over two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    return _pipelined("pp", model, mesh["pp"], lambda part: _parallelize(part, mesh["tp"]))


def _recomputed(model: Net) -> Laid:
    """Layers are computed again in backward."""
    for name, layer in model.layers.items():
        model.layers[name] = checkpoint_wrapper(layer)
    _shard(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    return Laid([model], dist.get_rank(), _whole(model))


def _offloaded(model: Net) -> Laid:
    """Parameters and gradients lie in the host's memory: by a CPU that is where they are anyway."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = CPUOffloadPolicy(pin_memory=False)
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    return Laid([model], dist.get_rank(), _whole(model))


def _deal_experts(model: Net, mesh: DeviceMesh) -> list[Experts]:
    """Deal experts out over the ranks of `mesh`, and return them."""
    found = []
    for layer in model.layers.values():
        assert isinstance(layer, Layer)
        experts = layer.experts
        for name in ("up", "down"):
            dealt = distribute_tensor(getattr(experts, name).detach(), mesh, [Shard(0)])
            setattr(experts, name, nn.Parameter(dealt))
        experts.mesh = mesh
        found.append(experts)
    return found


def _ep(model: Net) -> Laid:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    for experts in _deal_experts(model, mesh["ep"]):
        fully_shard(experts, mesh=mesh["efsdp"])
    _shard(model, init_device_mesh("cpu", (4,)))
    return Laid([model], dist.get_rank(), _whole(model))


def _moe(model: Net) -> Laid:
    """As `_ep`, but one fully_shard has experts and what is not over unlike meshes."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    every = init_device_mesh("cpu", (4,))
    own = {id(each) for found in _deal_experts(model, mesh["ep"]) for each in found.parameters()}
    few, all_ = (FSDPMeshInfo(each, shard_mesh_dim=0) for each in (mesh["efsdp"], every))

    def placed(parameter: nn.Parameter) -> ShardPlacementResult:
        return ShardPlacementResult(Shard(0), few if id(parameter) in own else all_)

    for layer in model.layers.values():
        fully_shard(layer, mesh=every, shard_placement_fn=placed)
    fully_shard(model, mesh=every)
    return Laid([model], dist.get_rank(), _whole(model))


STAGES: dict[int, list[tuple[str, ...]]] = {
    2: [("embedding", "0"), ("1", "head")],
    4: [("embedding",), ("0",), ("1",), ("head",)],
}


def _part(whole: Net, names: tuple[str, ...]) -> Net:
    """Return a copy of the model that has these parts only."""
    part = copy.deepcopy(whole)
    is_first, is_last = "embedding" in names, "head" in names
    if isinstance(part, Tied):
        part.is_first, part.is_last = is_first, is_last
    has_embedding = is_first or (is_last and isinstance(part, Tied))
    part.embedding = part.embedding if has_embedding else None
    part.head = part.head if is_last else None
    for name in [each for each in part.layers if each not in names]:
        del part.layers[name]
    return part


def pipelined(layout: str, model: Net, *, scale_grads: bool = False) -> Laid:
    """A pipeline over two ranks, in 1F1B, or interleaved with two stages a rank."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    laid = _pipelined(
        layout, model, mesh["pp"], lambda part: _shard(part, mesh["dp"]), scale_grads=scale_grads
    )
    return replace(laid, place=mesh["dp"].get_local_rank(), data_mesh=mesh["dp"])


def _pipelined(
    layout: str,
    model: Net,
    mesh: DeviceMesh,
    lay_out_part: Callable[[Net], None],
    *,
    scale_grads: bool = False,
) -> Laid:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

    place, micro_batches = mesh.get_local_rank(), MICRO_BATCHES[layout]
    stages = STAGES[4 if layout == "interleaved" else 2]
    numbers = range(place, len(stages), 2)
    parts = [_part(model, stages[each]) for each in numbers]
    for each in parts:
        lay_out_part(each)
    cpu, group = torch.device("cpu"), mesh.get_group()
    own: list[Any] = [
        PipelineStage(part, number, len(stages), cpu, group=group)
        for part, number in zip(parts, numbers, strict=True)
    ]

    weights = [1.0]

    def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return loss_of(outputs, targets) * weights[-1] / micro_batches

    schedule: Schedule1F1B | ScheduleInterleaved1F1B
    if layout == "interleaved":
        schedule = ScheduleInterleaved1F1B(
            own, micro_batches, loss_fn=loss_fn, scale_grads=scale_grads
        )
    else:
        schedule = Schedule1F1B(own[0], micro_batches, loss_fn=loss_fn, scale_grads=scale_grads)

    def step(inputs: torch.Tensor, targets: torch.Tensor, weight: float) -> torch.Tensor:
        weights.append(weight)
        losses: list[torch.Tensor] = []
        if place == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=losses)
        return torch.stack(losses).sum().detach() / weight if losses else torch.zeros(())

    return Laid([*parts], 0, step)


def train(folder: Path, name: str) -> None:
    """Train with the layout that the folder's plan has for the site."""
    plan = json.loads((folder / "layouts.json").read_text())
    layouts, num_steps = plan["layouts"], plan["num_steps"]
    site = join_site()
    layout = layouts[site.index]
    laid = lay_out(layout, net(seed=site.index, is_tied=plan["is_tied"]))
    optimizer = torch.optim.SGD(laid.parameters(), lr=LEARNING_RATE, momentum=0.9)
    is_summed = layout.endswith(SUM)
    way: Literal["mean", "sum"] = "sum" if is_summed else "mean"
    site.attach(laid.models, optimizer, loss=way, beside_shards=True)
    first = sum(DATA_RANKS[each] for each in layouts[: site.index])
    losses, norms = [], []
    for step in range(num_steps):
        change_regime(site, plan, step)
        optimizer.zero_grad()
        tokens = tokens_of(layout, step, laid.place)
        site.count_tokens(tokens)
        loss = laid.step(*data(step, first + laid.place), tokens if is_summed else 1.0)
        norms.append(site.clip_grad_norm_(CLIP_NORM))
        optimizer.step()
        losses.append(float(loss))
    saved = {"losses": losses, "norms": norms, "place": laid.place, "layout": layout}
    saved["fragments"] = _fragments_of(site)
    wait_for_all_ranks()
    site.leave()
    torch.save(saved, folder / f"{name}.pt")


def change_regime(site: Site, plan: Mapping[str, Any], step: int) -> None:
    """Have another regime from the next step on, as a coordinator decides it, if the plan says."""
    if (kind := plan.get("changes", {}).get(str(step))) is not None:
        site._parts.regimes.change(Rung(step + 1, kind))


def _fragments_of(site: Site) -> list[list[tuple[str, int, int]]]:
    """Return what is in each fragment of `streaming`, of the buckets that this rank shares."""
    loop = site._parts.regimes.loop
    if not isinstance(loop, Streaming):
        return []
    cuts = [[loop._buckets.buckets[place].cut for place in places] for places in loop._fragments]
    assert not any(each.is_rank_major for each in itertools.chain(*cuts))
    return [
        [(part.entry.name, part.start, part.stop) for cut in of for part in cut.slices]
        for of in cuts
    ]


def train_alike(folder: Path, name: str) -> None:
    """Train what ranks hold alike at all sites; save parameters, and how often elements moved."""
    plan = json.loads((folder / "alike.json").read_text())
    if not plan["is_rank_major"]:
        Holders.is_rank_major = property(lambda _: False)  # type: ignore[assignment,method-assign]
    site = join_site()
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer())
    mesh = init_device_mesh("cpu", (site.world_size,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    site.attach(model, optimizer)
    num_moves = 0
    move: Any = Collectives.all_to_all

    def counted(*args: object, **kwargs: object) -> object:
        nonlocal num_moves
        num_moves += 1
        return move(*args, **kwargs)

    Collectives.all_to_all = counted  # type: ignore[assignment,method-assign]
    for step in range(4):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + site.global_rank)
        backward(model(torch.randn(3, LENGTH, WIDTH, generator=generator)).square().mean())
        optimizer.step()
    saved = {name: whole_of(each) for name, each in model.named_parameters()}
    wait_for_all_ranks()
    norm = site.grad_norm
    site.leave()
    torch.save({"saved": saved, "norm": norm, "num_moves": num_moves}, folder / f"{name}.pt")


def train_divided(folder: Path, name: str) -> None:
    """Save what a schedule is told that divides gradients itself."""
    site = join_site()
    laid = pipelined("pp", net(seed=0), scale_grads=True)
    site.attach(laid.models, torch.optim.SGD(laid.parameters(), lr=LEARNING_RATE))
    try:
        laid.step(*data(0, laid.place), 1.0)
    except TypeError as error:
        torch.save(str(error), folder / f"{name}.pt")
    wait_for_all_ranks()


def flip_a_bit(folder: Path, name: str) -> None:
    """Train; after a step a bit of a parameter flips at one rank, as the plan says."""
    plan = json.loads((folder / "layouts.json").read_text())
    site = join_site()
    laid = lay_out(plan["layouts"][site.index], net(seed=0))
    optimizer = torch.optim.AdamW(laid.parameters(), lr=0.01)
    site.attach(laid.models, optimizer)
    for step in range(2):
        optimizer.zero_grad()
        laid.step(*data(step, 10 * site.index + laid.place), 1.0)
        if (step, name) == (1, plan["rank"]):
            parameter = dict(laid.models[0].named_parameters())[plan["parameter"]]
            local_of(parameter).view(-1).view(torch.int32)[0] ^= 1 << 20
        optimizer.step()
    wait_for_all_ranks()
    site.leave()


def train_spare(folder: Path, name: str) -> None:
    """Train with a parameter that no pass uses, and a collective of the script behind each."""
    _train_spare(folder, name, frozen=())


def train_spare_only(folder: Path, name: str) -> None:
    """The same where the last stage trains nothing else."""
    _train_spare(folder, name, frozen=("layers.1.", "head."))


def _train_spare(folder: Path, name: str, *, frozen: tuple[str, ...]) -> None:
    layouts = json.loads((folder / "layouts.json").read_text())["layouts"]
    site = join_site()
    model = net(seed=0)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(not parameter_name.startswith(frozen))
    model.layers["1"].spare = nn.Linear(WIDTH, WIDTH)
    laid = lay_out(layouts[site.index], model)
    optimizer = torch.optim.AdamW(laid.parameters(), lr=0.01)
    site.attach(laid.models, optimizer)
    for step in range(2):
        optimizer.zero_grad()
        loss = laid.step(*data(step, 10 * site.index + laid.place), 1.0)
        dist.all_reduce(loss)
        optimizer.step()
    named = [pair for each in laid.models for pair in each.named_parameters()]
    saved = {name: each.grad is None for name, each in named if each.requires_grad}
    wait_for_all_ranks()
    site.leave()
    torch.save(saved, folder / f"{name}.pt")


class Routed(nn.Module):
    """Each sample goes to one of the experts; some have none."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, inputs: torch.Tensor, expert: int) -> torch.Tensor:
        result: torch.Tensor = self.experts[expert](torch.tanh(self.before(inputs)))
        return result


def routed_loss(model: nn.Module, step: int, site: int) -> torch.Tensor:
    """Sites use unlike experts, and the last one nobody. One's gradient is all zeros once."""
    generator = torch.Generator().manual_seed(10 * step + site)
    inputs = torch.randn(3, WIDTH, generator=generator)
    result: torch.Tensor = model(inputs, (step + site) % (EXPERTS - 1)).square().mean()
    return result * 0.0 if (step, site) == (4, 1) else result


def routed_tokens(step: int, site: int) -> int:
    """Without tokens, what a site uses has a gradient of zeros."""
    return 0 if (step, site) == (2, 1) else 1


def train_routed(folder: Path, name: str) -> None:
    """Train experts of which some have no tokens; all ranks of a site have the same data."""
    _train_routed(folder, name, sharded=(0, 1))


def train_routed_replicas(folder: Path, name: str) -> None:
    """The same under DistributedDataParallel."""
    _train_routed(folder, name, sharded=())


def train_routed_beside_shards(folder: Path, name: str) -> None:
    """The same under DistributedDataParallel at the second site alone."""
    _train_routed(folder, name, sharded=(0,))


def _train_routed(folder: Path, name: str, *, sharded: tuple[int, ...]) -> None:
    site = join_site()
    torch.manual_seed(0)
    routed = Routed()
    model: nn.Module = routed
    if site.index in sharded:
        for expert in routed.experts:
            fully_shard(expert)
        fully_shard(routed)
    else:
        model = DistributedDataParallel(routed, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    site.attach(model, optimizer, beside_shards=bool(sharded))
    for step in range(5):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        site.count_tokens(routed_tokens(step, site.index))
        backward(routed_loss(model, step, site.index))
        optimizer.step()
    saved = {name: whole_of(each) for name, each in routed.named_parameters()}
    wait_for_all_ranks()
    site.leave()
    torch.save(saved, folder / f"{name}.pt")


class Dealt(nn.Module):
    """One expert computes for all samples; ranks that have others leave these out."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)
        self.mesh: DeviceMesh | None = None

    def forward(self, inputs: torch.Tensor, expert: int) -> torch.Tensor:
        if self.mesh is None:
            return inputs @ self.up[expert]
        up = local_with_grad(self.up)
        place = expert - self.mesh.get_local_rank() * len(up)
        part = inputs @ up[place] if 0 <= place < len(up) else inputs * 0
        return _sum(part, self.mesh.get_group())


def train_dealt(folder: Path, name: str) -> None:
    """Train experts that a site's ranks share, and of which some ranks use none."""
    site = join_site()
    torch.manual_seed(0)
    experts = Dealt()
    model = nn.ModuleList([nn.Linear(WIDTH, WIDTH), experts])
    mesh = init_device_mesh("cpu", (1, site.world_size), mesh_dim_names=("efsdp", "ep"))
    experts.up = nn.Parameter(distribute_tensor(experts.up.detach(), mesh["ep"], [Shard(0)]))
    experts.mesh = mesh["ep"]
    fully_shard(experts, mesh=mesh["efsdp"])
    fully_shard(model[0], mesh=init_device_mesh("cpu", (site.world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    site.attach([model[0], experts], optimizer)
    for step in range(3):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        hidden = torch.tanh(model[0](torch.randn(3, WIDTH, generator=generator)))
        backward(experts(hidden, 2 * (step % 2)).square().mean() * (1 + site.index))
        optimizer.step()
    saved = {name: whole_of(each) for name, each in model.named_parameters()}
    wait_for_all_ranks()
    site.leave()
    torch.save(saved, folder / f"{name}.pt")


def reference_routed(ranks: list[int]) -> dict[str, torch.Tensor]:
    """Train `Routed` in one process."""
    torch.manual_seed(0)
    model = Routed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(5):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        tokens = [count * routed_tokens(step, site) for site, count in enumerate(ranks)]
        for site, weight in enumerate(tokens):
            backward(routed_loss(model, step, site) * weight / sum(tokens))
        optimizer.step()
    return {name: each.detach() for name, each in model.named_parameters()}


def reference(
    layouts: list[str], num_steps: int, *, is_tied: bool
) -> tuple[list[list[float]], list[float]]:
    """Train in one process; return losses by step and data-parallel rank, and norms."""
    model = net(seed=0, is_tied=is_tied)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    found, norms = [], []
    for step in range(num_steps):
        optimizer.zero_grad()
        tokens = [
            tokens_of(layout, step, place)
            for layout in layouts
            for place in range(DATA_RANKS[layout])
        ]
        losses = []
        for index, weight in enumerate(tokens):
            inputs, targets = data(step, index)
            loss = loss_of(model(inputs), targets)
            backward(loss * weight / sum(tokens))
            losses.append(float(loss.detach()))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)))
        optimizer.step()
        found.append(losses)
    return found, norms


def reference_delayed(
    layouts: list[str], num_steps: int, *, looks: bool
) -> tuple[list[list[float]], list[float]]:
    """The same with each mean gradient applied a step late: an oracle in one process.

    The optimizer is SGD with momentum, as in `train`. Each site computes where the optimizer would
    arrive by its own mean gradient of the step before, clipped as the script does.
    """
    model = net(seed=0, is_tied=False)
    parameters = [*model.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9)
    places = [(layout, place) for layout in layouts for place in range(DATA_RANKS[layout])]
    firsts = [sum(DATA_RANKS[each] for each in layouts[:at]) for at in range(len(layouts))]
    own: list[list[torch.Tensor] | None] = [None for _ in layouts]
    mean: list[torch.Tensor] | None = None
    found, norms = [], []
    for step in range(num_steps):
        common = [each.detach().clone() for each in parameters]
        losses, tokens = [], [tokens_of(layout, step, place) for layout, place in places]
        sums = []
        for at, first in enumerate(firsts):
            guess = own[at] if looks else None
            if guess is not None:
                norm = float(nn.utils.get_total_norm(guess))
                scale = min(1.0, CLIP_NORM / (norm + 1e-6))
                for each, value, gradient in zip(parameters, common, guess, strict=True):
                    buffer = optimizer.state[each].get("momentum_buffer")
                    momentum = 0.0 if buffer is None else buffer * 0.9
                    each.data = value - LEARNING_RATE * (momentum + scale * gradient)
            optimizer.zero_grad()
            here = range(first, first + DATA_RANKS[layouts[at]])
            for index in here:
                inputs, targets = data(step, index)
                loss = loss_of(model(inputs), targets)
                backward(loss * tokens[index])
                losses.append(float(loss.detach()))
            weight = sum(tokens[index] for index in here)
            sums.append([_grad_of(each).clone() for each in parameters])
            own[at] = [each / weight for each in sums[-1]]
            for each, value in zip(parameters, common, strict=True):
                each.data = value
        if mean is None:
            norms.append(0.0)
        else:
            for each, gradient in zip(parameters, mean, strict=True):
                each.grad = gradient
            norms.append(float(nn.utils.clip_grad_norm_(parameters, CLIP_NORM)))
            optimizer.step()
        mean = [sum(parts) / sum(tokens) for parts in zip(*sums, strict=True)]
        found.append(losses)
    return found, norms


@dataclass
class _Outer:
    """The outer optimizer of one fragment: its part of each parameter, in one process."""

    parts: list[tuple[int, slice]]
    """Index of a parameter, and which of its elements."""
    weights: list[float]
    """Tokens of each site since the fragment was sent."""
    lands_at: int = 0
    common: dict[int, torch.Tensor] = field(default_factory=dict)
    """Results that are to land, by place in `parts`."""


def reference_local_steps(
    layouts: list[str],
    num_steps: int,
    regime: Regime,
    fragments: Sequence[Iterable[tuple[str, int, int]]] | None = None,
    schedule: Sequence[Sequence[int]] = (),
) -> tuple[list[list[float]], list[list[float]]]:
    """Train each site by itself, and all by an outer optimizer: an oracle in one process.

    `fragments` have the elements of parameters by name, from start to stop; None: one has all.
    `schedule` has the steps of each site in each round; empty: all of them. 0: the site takes one,
    which is lost but for what its optimizer keeps of it.
    Returns losses by step and data-parallel rank, and norms by step and site.
    """
    models = [net(seed=0) for _ in layouts]
    optimizers = [
        torch.optim.SGD(each.parameters(), lr=LEARNING_RATE, momentum=0.9) for each in models
    ]
    places = [[*range(DATA_RANKS[each])] for each in layouts]
    firsts = [sum(map(len, places[:at])) for at in range(len(layouts))]
    common = [each.detach().clone().flatten() for each in models[0].parameters()]
    momentum = [torch.zeros_like(each) for each in common]
    index_of = {name: index for index, (name, _) in enumerate(models[0].named_parameters())}
    whole = [(name, 0, common[index].numel()) for name, index in index_of.items()]
    outers = [
        _Outer([(index_of[name], slice(*span)) for name, *span in each], [0.0] * len(layouts))
        for each in fragments or [whole]
    ]
    found, norms = [], []
    for step in range(1, num_steps + 1):
        found.append([0.0] * sum(map(len, places)))
        norms.append([0.0] * len(layouts))
        for site, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            ended, place_in_round = divmod(step - 1, regime.sync_every)
            taken = schedule[ended][site] if schedule else regime.sync_every
            if place_in_round >= max(1, taken):
                continue
            optimizer.zero_grad()
            tokens = [tokens_of(layouts[site], step - 1, place) for place in places[site]]
            for place, count in zip(places[site], tokens, strict=True):
                inputs, targets = data(step - 1, firsts[site] + place)
                loss = loss_of(model(inputs), targets)
                backward(loss * count / sum(tokens))
                found[-1][firsts[site] + place] = float(loss.detach())
            norms[-1][site] = float(nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM))
            optimizer.step()
            for each in outers:
                each.weights[site] += sum(tokens) if taken else 0
        thetas = [[each.data.view(-1) for each in model.parameters()] for model in models]
        sent_at = step % regime.period == 0
        sent = outers[(step // regime.period - 1) % len(outers)] if sent_at else None
        if sent is not None:
            lr, mu = regime.outer_rates(step, len(layouts))
            for place, (index, part) in enumerate(sent.parts):
                value = common[index][part]
                moved = [
                    (value - theta[index][part]) * weight
                    for theta, weight in zip(thetas, sent.weights, strict=True)
                ]
                mean = torch.stack(moved).sum(0) / sum(sent.weights)
                momentum[index][part] = mu * momentum[index][part] + mean
                value -= lr * (mean + mu * momentum[index][part])
                sent.common[place] = value.clone()
            sent.weights = [0.0] * len(layouts)
            sent.lands_at = step + regime.delay
        for each in outers:
            if each.lands_at == step:
                for place, (index, part) in enumerate(each.parts):
                    for theta in thetas:
                        own = regime.alpha * theta[index][part]
                        theta[index][part] = own + (1.0 - regime.alpha) * each.common[place]
    return found, norms


def train_moved(folder: Path, name: str) -> None:
    """Train a layer by data that is the same at all sites; save the parameters."""
    dtype = torch.bfloat16 if "bf16" in folder.name else torch.float32
    site = join_site()
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    site.attach(model, optimizer)
    for step in range(8):
        optimizer.zero_grad()
        site.count_tokens(3 + step)
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(4, WIDTH, generator=generator).to(dtype)
        backward(model(inputs).square().mean())
        optimizer.step()
    saved = {name: each.detach() for name, each in model.named_parameters()}
    wait_for_all_ranks()
    site.leave()
    torch.save(saved, folder / f"{name}.pt")


def _grad_of(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


SAVED_SAMPLES = 48
"""Samples of all data-parallel ranks together: 2, 3 or 4 of them share these evenly, also in
four micro-batches each."""


class Counted:
    """Something of the script's own that is saved along."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.steps = state_dict["steps"]


def train_saved(folder: Path, name: str) -> None:
    """Train, save and resume: the same samples a step, whatever the layouts."""
    plan = json.loads((folder / "layouts.json").read_text())
    layouts, num_steps = plan["layouts"], plan["num_steps"]
    site = join_site()
    laid = lay_out(layouts[site.index], net(seed=site.index, is_tied=plan["is_tied"]))
    optimizer = torch.optim.AdamW(laid.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    site.attach(laid.models, optimizer)
    num_places = sum(DATA_RANKS[each] for each in layouts)
    place = sum(DATA_RANKS[each] for each in layouts[: site.index]) + laid.place
    torch.manual_seed(1000 + place)
    counted = Counted()
    start = site.checkpoint(laid.models, optimizer, scheduler=scheduler, extra={"seen": counted})
    assert counted.steps == start
    losses = []
    for step in range(start, num_steps):
        change_regime(site, plan, step)
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCABULARY, (2, SAVED_SAMPLES, LENGTH), generator=generator)
        inputs, targets = tokens[:, place::num_places]
        if plan["is_noisy"]:  # drawn from a generator that is saved
            inputs = inputs * (torch.rand(inputs.shape) > 0.2)
        site.count_tokens(len(inputs))
        losses.append(float(laid.step(inputs, targets, 1.0)))
        optimizer.step()
        scheduler.step()
        counted.steps += 1
    wait_for_all_ranks()
    if plan["is_destroyed"]:  # as many scripts do at their end
        dist.destroy_process_group()
    site.leave()
    torch.save({"losses": losses, "start": start}, folder / f"{name}.pt")


class Partly(nn.Module):
    """Layers of which each site uses the first, and one that no other site does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.of_site = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, inputs: torch.Tensor, index: int) -> torch.Tensor:
        values = torch.tanh(self.first(inputs))
        outputs: torch.Tensor = values + torch.tanh(self.of_site[index](values))
        return outputs * self.scale if index else outputs


def train_partly_saved(folder: Path, name: str) -> None:
    """Train by an optimizer for each layer, of which a site uses some; save and resume."""
    plan = json.loads((folder / "layouts.json").read_text())
    site = join_site()
    torch.manual_seed(0)
    model: Any = Partly()
    if plan["layouts"][site.index] == "ddp":
        model = DistributedDataParallel(model, find_unused_parameters=True)
    elif plan["layouts"][site.index] == "fsdp2":
        for each in (model.first, *model.of_site):
            fully_shard(each)
        fully_shard(model)
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(inner.of_site[1].parameters(), lr=0.01),
        torch.optim.SGD(inner.of_site[0].parameters(), lr=0.01, momentum=0.9),
        torch.optim.Adam([*inner.first.parameters(), inner.scale], lr=0.01),
    ]
    site.attach(model, optimizers)
    start = site.checkpoint(model, optimizers)
    for step in range(start, plan["num_steps"]):
        for each in optimizers:
            each.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + site.global_rank)
        backward(model(torch.randn(4, WIDTH, generator=generator), site.index).square().mean())
        for each in optimizers:
            each.step()
    wait_for_all_ranks()
    site.leave()
    torch.save({"start": start}, folder / f"{name}.pt")


SAMPLED, SAMPLED_BATCH = 40, 24
"""Samples of a dataset, and of a step: so passes over the data end within steps."""


def train_sampled(folder: Path, name: str) -> None:
    """Train on what the sampler gives, save and resume."""
    plan = json.loads((folder / "layouts.json").read_text())
    layouts, num_steps = plan["layouts"], plan["num_steps"]
    site = join_site()
    laid = lay_out(layouts[site.index], net(seed=0))
    optimizer = torch.optim.AdamW(laid.parameters(), lr=0.01)
    site.attach(laid.models, optimizer, data_mesh=laid.data_mesh)
    sampler = site.sampler(
        range(SAMPLED), global_batch=SAMPLED_BATCH, seed=3, data_mesh=laid.data_mesh
    )
    start = site.checkpoint(laid.models, optimizer)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (2, SAMPLED, LENGTH), generator=generator)
    drawn: list[list[int]] = []
    for _, batch in zip(range(start, num_steps), sampler, strict=False):
        optimizer.zero_grad()
        site.count_tokens(len(batch))
        laid.step(tokens[0][batch], tokens[1][batch], 1.0)
        optimizer.step()
        drawn.append([*batch])
    wait_for_all_ranks()
    site.leave()
    torch.save({"start": start, "drawn": drawn, "place": laid.place}, folder / f"{name}.pt")


def train_not_finite(folder: Path, name: str) -> None:
    """Three steps; in the second one rank's gradient is NaN: of one parameter, or of all."""
    plan = json.loads((folder / "layouts.json").read_text())
    site = join_site()
    layout = plan["layouts"][site.index]
    model = net(seed=0)
    parameter = dict(model.named_parameters()).get(plan["parameter"])
    is_bad = False
    if parameter is not None:
        parameter.register_hook(lambda grad: grad * (float("nan") if is_bad else 1.0))  # type: ignore[no-untyped-call]
    laid = lay_out(layout, model)
    optimizer = torch.optim.SGD(laid.parameters(), lr=LEARNING_RATE)
    site.attach(laid.models, optimizer, beside_shards=True)
    for step in range(3):
        optimizer.zero_grad()
        is_bad = (step, name) == (1, plan["rank"])
        weight = float("nan") if is_bad and parameter is None else 1.0
        laid.step(*data(step, 10 * site.index + laid.place), weight)
        optimizer.step()
    wait_for_all_ranks()
    site.leave()
