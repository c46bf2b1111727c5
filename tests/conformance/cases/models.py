"""Models."""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from tests.conformance.case import APART, AVERAGE, BOTH, DDP, EQUAL, LONE, STEPS, Refused, case
from tests.conformance.cases.loops import sgd
from tests.conformance.world import HIDDEN, OUTPUTS, WIDTH, F, World, loss_of, net

NOT_ATTACHED = "NOT_ATTACHED"


def train(world: World, model: Any, steps: int = STEPS, **options: Any) -> Any:
    """Train a model of the small one's inputs and outputs."""
    wrapped = world.wrap(model, **options)
    optimizer = torch.optim.SGD([each for each in wrapped.parameters() if each.requires_grad], 0.1)
    world.start(wrapped, optimizer)
    for batch in world.batches(steps):
        optimizer.zero_grad()
        loss_of(wrapped, batch).backward()
        optimizer.step()
    return wrapped


# ---------------------------------------------------------------- what is trained


@case(BOTH, quick=True)
def frozen(world: World) -> Any:
    """Layers that are frozen from the start"""
    model = net()
    model[0].requires_grad_(False)
    return train(world, model)


@case((*BOTH, *LONE), Refused(NOT_ATTACHED, r"0\.weight"), quick=DDP)
def thawed_later(world: World) -> Any:
    """A layer that is thawed after `attach`"""
    model = net()
    model[0].requires_grad_(False)
    wrapped = world.wrap(model)
    optimizer = sgd(wrapped)
    world.start(wrapped, optimizer)
    for step, batch in enumerate(world.batches(STEPS)):
        if step == 2:
            model[0].requires_grad_(True)
        optimizer.zero_grad()
        loss_of(wrapped, batch).backward()
        optimizer.step()
    return wrapped


@case((*BOTH, *LONE), quick=DDP)
def thawed_and_attached_again(world: World) -> Any:
    """A layer that is thawed, and `attach` again with a new wrapper"""
    model = net()
    model[0].requires_grad_(False)
    wrapped = world.wrap(model)
    optimizer = sgd(wrapped)
    world.start(wrapped, optimizer)
    for step, batch in enumerate(world.batches(STEPS)):
        if step == 2:
            model[0].requires_grad_(True)
            if world.way == "ddp":
                wrapped = world.wrap(model)
            world.start(wrapped, optimizer)
        optimizer.zero_grad()
        loss_of(wrapped, batch).backward()
        optimizer.step()
    return wrapped


@case(
    BOTH,
    {"ddp": Refused("STEP_WITHOUT_ROUND", "has not crossed"), "fsdp2": EQUAL},
)
def frozen_later(world: World) -> Any:
    """A layer that is frozen after `attach`"""
    model = net()
    wrapped = world.wrap(model)
    optimizer = sgd(wrapped)
    world.start(wrapped, optimizer)
    for step, batch in enumerate(world.batches(STEPS)):
        if step == 2:
            model[0].requires_grad_(False)
        optimizer.zero_grad()
        loss_of(wrapped, batch).backward()
        optimizer.step()
    return wrapped


@case(BOTH)
def frozen_later_with_its_last_gradient(world: World) -> Any:
    """A layer that is frozen later, whose last gradient each further step takes again"""
    model = net()
    wrapped = world.wrap(model, find_unused_parameters=True)
    optimizer = sgd(wrapped)
    world.start(wrapped, optimizer)
    for step, batch in enumerate(world.batches(STEPS)):
        if step == 2:
            model[0].requires_grad_(False)
        for each in model[2 if step >= 2 else 0 :].parameters():
            each.grad = None
        loss_of(wrapped, batch).backward()
        optimizer.step()
    return wrapped


@case(
    DDP,
    Refused(NOT_ATTACHED, r"0\.weight"),
    beside=dict.fromkeys(
        ("delayed", "diloco", "streaming"), Refused("ScriptError", r"not reduce .* of 0\.bias")
    ),
)
def thawed_after_it_was_wrapped(world: World) -> Any:
    """A layer that is thawed between DistributedDataParallel and `attach`"""
    model = net()
    model[0].requires_grad_(False)
    wrapped = world.wrap(model)
    model[0].requires_grad_(True)
    optimizer = sgd(wrapped)
    world.start(wrapped, optimizer)
    for batch in world.batches(STEPS):
        optimizer.zero_grad()
        loss_of(wrapped, batch).backward()
        optimizer.step()
    return wrapped


@case(DDP, Refused(NOT_ATTACHED, r"4\.weight"))
def swapped_head(world: World) -> Any:
    """A head of the same shape put in the place of the first one, and in the optimizer"""
    model = net()
    wrapped = world.wrap(model, find_unused_parameters=True)
    optimizer = sgd(wrapped)
    world.start(wrapped, optimizer)
    for step, batch in enumerate(world.batches(STEPS)):
        if step == 2:
            model[4] = nn.Linear(HIDDEN, OUTPUTS)
            optimizer.param_groups[0]["params"][4:] = [*model[4].parameters()]
        optimizer.zero_grad()
        loss_of(wrapped, batch).backward()
        optimizer.step()
    return wrapped


@case(BOTH, quick=DDP)
def group_added_later(world: World) -> Any:
    """Layers that the optimizer gets later (`add_param_group`), and that were wrapped all along"""
    model = world.wrap(net())
    every = [*model.parameters()]
    optimizer = torch.optim.SGD(every[4:], lr=0.1)
    world.start(model, optimizer)
    for step, batch in enumerate(world.batches(STEPS)):
        if step == 2:
            optimizer.add_param_group({"params": every[:4], "lr": 0.05})
        model.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return model


@case(DDP)
def pruned_later(world: World) -> Any:
    """A layer that is pruned after `attach` (`torch.nn.utils.prune`)"""
    model = net()
    wrapped = world.wrap(model)
    optimizer = sgd(wrapped)
    world.start(wrapped, optimizer)
    for step, batch in enumerate(world.batches(STEPS)):
        if step == 2:
            prune.L1Unstructured.apply(model[2], "weight", amount=0.4)  # type: ignore[no-untyped-call]
        optimizer.zero_grad()
        loss_of(wrapped, batch).backward()
        optimizer.step()
    return wrapped


def _reset(world: World, generator: torch.Generator) -> Any:
    model = net()
    wrapped = world.wrap(model)
    optimizer = sgd(wrapped)
    world.start(wrapped, optimizer)
    for step, batch in enumerate(world.batches(STEPS)):
        if step == 2:
            with torch.no_grad():
                model[0].weight[3].normal_(generator=generator)
        optimizer.zero_grad()
        loss_of(wrapped, batch).backward()
        optimizer.step()
    return wrapped


@case(DDP)
def reset_units(world: World) -> Any:
    """Units that are drawn anew, by a generator that is seeded alike"""
    return _reset(world, torch.Generator().manual_seed(1))


@case(DDP, Refused("PARAMETERS_DIFFER", r"0\.weight"))
def reset_units_by_each(world: World) -> Any:
    """Units that each rank draws anew by itself"""
    return _reset(world, torch.Generator().manual_seed(world.rank))


class Growing(nn.Module):
    """May get a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()
        self.head: nn.Module = nn.Identity()

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.head(self.body(inputs))


@case((*BOTH, *LONE), Refused(NOT_ATTACHED, r"head"))
def added_layer(world: World) -> Any:
    """A layer and a parameter group added after `attach`"""
    model = Growing()
    wrapped = world.wrap(model)
    optimizer = sgd(wrapped)
    world.start(wrapped, optimizer)
    for step, batch in enumerate(world.batches(STEPS)):
        if step == 2:
            model.head = nn.Linear(OUTPUTS, OUTPUTS)
            optimizer.add_param_group({"params": [*model.head.parameters()]})
        optimizer.zero_grad()
        loss_of(wrapped, batch).backward()
        optimizer.step()
    return wrapped


@case(DDP)
def added_layer_and_attached_again(world: World) -> Any:
    """A layer added, wrapped anew, and `attach` again"""
    model = Growing()
    wrapped = world.wrap(model)
    optimizer = sgd(wrapped)
    world.start(wrapped, optimizer)
    for step, batch in enumerate(world.batches(STEPS)):
        if step == 2:
            model.head = nn.Linear(OUTPUTS, OUTPUTS)
            with torch.no_grad():
                for each in model.head.parameters():
                    each.fill_(0.1)  # as the first site has it anyhow
            wrapped = world.wrap(model)
            optimizer = sgd(wrapped)
            world.start(wrapped, optimizer)
        optimizer.zero_grad()
        loss_of(wrapped, batch).backward()
        optimizer.step()
    return wrapped


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank, as LoRA has it."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, inner.in_features) / 3)
        self.up = nn.Parameter(torch.zeros(inner.out_features, 2))

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.inner(inputs) + inputs @ self.down.T @ self.up.T


@case(BOTH, quick=DDP)
def lora(world: World) -> Any:
    """LoRA adapters on a frozen model"""
    layers = [Adapted(each) if isinstance(each, nn.Linear) else each for each in net()]
    return train(world, nn.Sequential(*layers))


@case(
    DDP,
    Refused(NOT_ATTACHED, r"down|up"),
)
def lora_added_later(world: World) -> Any:
    """LoRA adapters added after `attach`, the rest frozen"""
    model = net()
    wrapped = world.wrap(model, find_unused_parameters=True)
    optimizer = sgd(wrapped)
    world.start(wrapped, optimizer)
    for step, batch in enumerate(world.batches(STEPS)):
        if step == 2:
            model[4] = Adapted(model[4])
            adapter = [each for each in model[4].parameters() if each.requires_grad]
            optimizer.add_param_group({"params": adapter})
        optimizer.zero_grad()
        loss_of(wrapped, batch).backward()
        optimizer.step()
    return wrapped


@case(DDP, Refused(NOT_ATTACHED, r"4\.(down|up)"))
def adapters_in_an_optimizer_of_their_own(world: World) -> Any:
    """LoRA adapters added after `attach`, with an optimizer that it was not given"""
    model = net()
    wrapped = world.wrap(model, find_unused_parameters=True)
    optimizer = sgd(wrapped)
    world.start(wrapped, optimizer)
    adapters = None
    for step, batch in enumerate(world.batches(STEPS)):
        if step == 2:
            model[4] = Adapted(model[4])
            adapters = torch.optim.SGD([model[4].down, model[4].up], lr=0.1)
        wrapped.zero_grad()
        loss_of(wrapped, batch).backward()
        optimizer.step()
        if adapters is not None:
            adapters.step()
    return wrapped


@case(
    BOTH,
    Refused(NOT_ATTACHED, r"0\.weight"),
)
def assigned_state(world: World) -> Any:
    """`load_state_dict(assign=True)` between steps, the optimizer pointed to what is new"""
    model = net()
    wrapped = world.wrap(model)
    optimizer = sgd(wrapped)
    world.start(wrapped, optimizer)
    for step, batch in enumerate(world.batches(STEPS)):
        if step == 2:
            state = {name: each.clone() for name, each in model.state_dict().items()}
            model.load_state_dict(state, assign=True)
            optimizer.param_groups[0]["params"] = [*model.parameters()]
        optimizer.zero_grad()
        loss_of(wrapped, batch).backward()
        optimizer.step()
    return wrapped


@case(BOTH)
def loaded_state(world: World) -> Any:
    """`load_state_dict` between steps"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    states = []
    for batch in world.batches(STEPS):
        states.append(copy.deepcopy(model.state_dict()))
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        if len(states) == 3:
            model.load_state_dict(states[1])
    return model


@case(
    DDP,
    Refused("TypeError", r"parameter 0\.weight is of torch\.float64"),
)
def other_dtype_later(world: World) -> Any:
    """Another dtype after `attach` (`model.double()`)"""
    model = world.wrap(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world.start(model, optimizer)
    for step, (inputs, targets) in enumerate(world.batches(STEPS)):
        if step == 2:
            model.double()
        if step >= 2:
            inputs, targets = inputs.double(), targets.double()
        optimizer.zero_grad()
        loss_of(model, (inputs, targets)).backward()
        optimizer.step()
    return model


@case(DDP)
def moved_later(world: World) -> Any:
    """`model.to(device)` again after `attach`, to where it is"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for batch in world.batches(STEPS):
        model.to(world.site.device)
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return model


# ---------------------------------------------------------------- graphs


class Tied(nn.Module):
    """Reads out by the matrix that reads in."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(torch.tanh(self.inner(self.embedding(tokens))))


def tokens_of(batch: Any) -> Any:
    """Return tokens and labels made of a batch of numbers."""
    inputs, targets = batch
    labels = (targets[:, :1].abs() * 5).long().expand(-1, WIDTH) % 7
    return (inputs.abs() * 5).long() % 7, labels


@case(BOTH, quick=DDP)
def tied_embedding(world: World) -> Any:
    """An embedding that the head is tied to"""
    model = world.wrap(Tied(), as_one=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    world.start(model, optimizer)
    for batch in world.batches(STEPS):
        tokens, labels = tokens_of(batch)
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).transpose(1, 2), labels).backward()
        optimizer.step()
    return model


class Experts(nn.Module):
    """Each sample goes through one of the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, HIDDEN) for _ in range(3))
        self.head = nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, inputs: torch.Tensor, which: int) -> Any:
        return self.head(self.experts[which](inputs).tanh())


def by_parts(world: World, batch: Any) -> Any:
    """Return each rank's part of a batch, in one process."""
    return zip(*(each.chunk(world.num_ranks) for each in batch), strict=True)


def _experts_alone(world: World) -> Any:
    model = Experts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank, (inputs, targets) in enumerate(by_parts(world, world.batch(step))):
            outputs = model(inputs, (step + rank) % 2)
            (F.mse_loss(outputs, targets) / world.num_ranks).backward()
        optimizer.step()
    return model


@case(BOTH, quick=True, oracle=_experts_alone, beside=APART)
def unused_experts(world: World) -> Any:
    """Experts of which each site uses another one, and one that nobody uses"""
    model = world.wrap(Experts(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    world.start(model, optimizer)
    for step, (inputs, targets) in enumerate(world.batches(STEPS)):
        optimizer.zero_grad()
        outputs = model(inputs, (step + world.rank) % 2)
        F.mse_loss(outputs, targets).backward()
        optimizer.step()
    return model


@case(DDP, Refused("STEP_WITHOUT_ROUND", "find_unused_parameters"), steps=None)
def unused_unsaid(world: World) -> Any:
    """Parameters that nobody uses, without `find_unused_parameters=True`"""
    model = world.wrap(Experts())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    world.start(model, optimizer)
    for inputs, targets in world.batches(STEPS):
        optimizer.zero_grad()
        F.mse_loss(model(inputs, 0), targets).backward()
        optimizer.step()
    return model


class Deep(nn.Module):
    """Layers of a residual network, each of which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, OUTPUTS)

    def forward(self, inputs: torch.Tensor, kept: list[bool]) -> Any:
        values = inputs
        for layer, is_kept in zip(self.layers, kept, strict=True):
            values = values + layer(values).tanh() if is_kept else values
        return self.head(values)


def _kept(step: int, rank: int) -> list[bool]:
    return [bool((step + rank + layer) % 3) for layer in range(4)]


def _depth_alone(world: World) -> Any:
    model = Deep()
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank, (inputs, targets) in enumerate(by_parts(world, world.batch(step))):
            (F.mse_loss(model(inputs, _kept(step, rank)), targets) / world.num_ranks).backward()
        optimizer.step()
    return model


@case(BOTH, oracle=_depth_alone, beside=APART)
def stochastic_depth(world: World) -> Any:
    """Stochastic depth: each rank leaves out other layers"""
    model = world.wrap(Deep(), find_unused_parameters=True)
    optimizer = sgd(model)
    world.start(model, optimizer)
    for step, (inputs, targets) in enumerate(world.batches(STEPS)):
        optimizer.zero_grad()
        F.mse_loss(model(inputs, _kept(step, world.rank)), targets).backward()
        optimizer.step()
    return model


class Branches(nn.Module):
    """Two layers, of which the data says which comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.one = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, OUTPUTS)

    def forward(self, inputs: torch.Tensor, is_swapped: bool) -> Any:
        order = [self.other, self.one] if is_swapped else [self.one, self.other]
        values = self.inner(inputs)
        for each in order:
            values = each(values).tanh()
        return self.head(values)


def _branches_alone(world: World) -> Any:
    model = Branches()
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank, (inputs, targets) in enumerate(by_parts(world, world.batch(step))):
            (F.mse_loss(model(inputs, rank == 1), targets) / world.num_ranks).backward()
        optimizer.step()
    return model


@case(BOTH, oracle=_branches_alone, quick=DDP, beside=APART)
def order_of_backward(world: World) -> Any:
    """A backward pass whose order depends on the data"""
    return _train_branches(world)


@case(DDP, oracle=_branches_alone, ranks=(1, 2))
def order_of_backward_with_views(world: World) -> Any:
    """A backward pass whose order depends on the data, with `gradient_as_bucket_view=True`"""
    return _train_branches(world, gradient_as_bucket_view=True)


def _train_branches(world: World, **options: Any) -> Any:
    model = world.wrap(Branches(), **options)
    optimizer = sgd(model)
    world.start(model, optimizer)
    for inputs, targets in world.batches(STEPS):
        optimizer.zero_grad()
        F.mse_loss(model(inputs, world.rank == 1), targets).backward()
        optimizer.step()
    return model


@case(BOTH)
def two_forwards_one_backward(world: World) -> Any:
    """A siamese model: two forward passes, one backward pass"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for inputs, targets in world.batches(STEPS):
        optimizer.zero_grad()
        F.mse_loss(model(inputs) - model(inputs.flip(1)), targets).backward()
        optimizer.step()
    return model


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(2, HIDDEN, batch_first=True)
        self.head = nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, inputs: torch.Tensor) -> Any:
        outputs, _ = self.cell(inputs.view(-1, WIDTH // 2, 2))
        return self.head(outputs[:, -1])


@case(BOTH)
def recurrent(world: World) -> Any:
    """A recurrent model, whose parameters are used several times"""
    return train(world, Recurrent())


@case(DDP)
def gradient_penalty(world: World) -> Any:
    """A gradient penalty: a double backward pass"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for inputs, targets in world.batches(STEPS):
        optimizer.zero_grad()
        inputs.requires_grad_()
        outputs = model(inputs)
        (grad,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        penalty = (grad.norm(dim=1) - 1).square().mean()
        (F.mse_loss(outputs, targets) + penalty).backward()
        optimizer.step()
    return model


class Recomputed(nn.Module):
    """Each part is computed again in backward, the last one, too."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, HIDDEN)
        widths = [HIDDEN, HIDDEN, HIDDEN, OUTPUTS]
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Tanh(), nn.Linear(*each)) for each in itertools.pairwise(widths)
        )
        self._use_reentrant = use_reentrant

    def forward(self, inputs: torch.Tensor) -> Any:
        values = self.first(inputs)
        for each in self.parts:
            values = checkpoint(each, values, use_reentrant=self._use_reentrant)
        return values


def _recomputed(world: World, use_reentrant: bool) -> Any:
    model = world.wrap(Recomputed(use_reentrant))
    optimizer = sgd(model)
    world.start(model, optimizer)
    for batch in world.batches(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        world.note(torch.tensor(world.site.clip_grad_norm_(0.1)))
        optimizer.step()
    return model


@case(BOTH)
def recomputed(world: World) -> Any:
    """Activation checkpointing, not reentrant, and clipping"""
    return _recomputed(world, use_reentrant=False)


@case(BOTH)
def recomputed_reentrant(world: World) -> Any:
    """Reentrant activation checkpointing, and clipping"""
    return _recomputed(world, use_reentrant=True)


@case(BOTH)
def compiled_model(world: World) -> Any:
    """`torch.compile` of the model, inside the wrapper"""
    torch._dynamo.reset()
    model: Any = torch.compile(net(), backend="aot_eager")
    return train(world, model, bucket_cap_mb=25)


@case(DDP)
def compiled_wrapper(world: World) -> Any:
    """`torch.compile` of the wrapper"""
    torch._dynamo.reset()
    wrapped = world.wrap(net(), bucket_cap_mb=25)
    optimizer = sgd(wrapped)
    compiled: Any = torch.compile(wrapped, backend="aot_eager")
    world.start(compiled, optimizer)
    for batch in world.batches(STEPS):
        optimizer.zero_grad()
        loss_of(compiled, batch).backward()
        optimizer.step()
    return wrapped


def _compiled_by(world: World, **settings: Any) -> Any:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(**({} if world.is_oracle else settings)):
        wrapped = world.wrap(net(), bucket_cap_mb=25)
        optimizer = sgd(wrapped)
        world.start(wrapped, optimizer)
        compiled: Any = torch.compile(wrapped, backend="aot_eager")
        for batch in world.batches(STEPS):
            optimizer.zero_grad()
            loss_of(compiled, batch).backward()
            optimizer.step()
    return wrapped


@case(DDP)
def compiled_autograd(world: World) -> Any:
    """Compiled autograd"""
    return _compiled_by(world, compiled_autograd=True)


@case(
    DDP,
    Refused("TypeError", 'optimize_ddp is "python_reducer"'),
)
def python_reducer(world: World) -> Any:
    """`torch._dynamo.config.optimize_ddp = "python_reducer"`"""
    return _compiled_by(world, optimize_ddp="python_reducer")


# ---------------------------------------------------------------- past the wrapper


STEP_WITHOUT_ROUND = Refused("STEP_WITHOUT_ROUND", "has not crossed")


@case(
    DDP,
    STEP_WITHOUT_ROUND,
    steps=None,
    quick=True,
)
def functional_call_past_wrapper(world: World) -> Any:
    """`torch.func.functional_call` of the inner module, past the wrapper"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for inputs, targets in world.batches(STEPS):
        optimizer.zero_grad()
        parameters = dict(model.module.named_parameters())
        outputs = torch.func.functional_call(model.module, parameters, (inputs,))
        F.mse_loss(outputs, targets).backward()
        optimizer.step()
    return model


@case(DDP, STEP_WITHOUT_ROUND, steps=None)
def inner_module(world: World) -> Any:
    """A forward pass of `model.module`"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for batch in world.batches(STEPS):
        optimizer.zero_grad()
        loss_of(model.module, batch).backward()
        optimizer.step()
    return model


@case(DDP, STEP_WITHOUT_ROUND, steps=None)
def grad_past_hooks(world: World) -> Any:
    """`torch.autograd.grad` in place of `backward`: no hook runs"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for batch in world.batches(STEPS):
        grads = torch.autograd.grad(loss_of(model, batch), [*model.parameters()])
        for each, grad in zip(model.parameters(), grads, strict=True):
            each.grad = grad
        optimizer.step()
    return model


@case(("average",))
def torch_func(world: World) -> Any:
    """`torch.func.grad`, and `site.average_gradients`"""
    model: Any = net()
    optimizer = sgd(model)
    world.start(model, optimizer)

    def loss(parameters: Any, batch: Any) -> Any:
        return F.mse_loss(torch.func.functional_call(model, parameters, (batch[0],)), batch[1])

    for batch in world.batches(STEPS):
        named = {name: each.detach() for name, each in model.named_parameters()}
        for name, grad in torch.func.grad(loss)(named, batch).items():
            model.get_parameter(name).grad = grad
        optimizer.step()
    return model


# ---------------------------------------------------------------- parameters and buffers


@case(BOTH)
def weight_norm(world: World) -> Any:
    """`parametrizations.weight_norm`"""
    model = net()
    nn.utils.parametrizations.weight_norm(model[0])
    return train(world, model)


@case(BOTH)
def spectral_norm(world: World) -> Any:
    """`parametrizations.spectral_norm`, whose buffers change in the forward pass"""
    model = net()
    nn.utils.parametrizations.spectral_norm(model[2])
    return train(world, model)


@case(BOTH, quick=DDP)
def batch_norm(world: World) -> Any:
    """BatchNorm, of each rank's own samples"""
    inner = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.BatchNorm1d(HIDDEN), *net()[1:])
    return train(world, inner, by_rank=True)


@case(DDP)
def batch_norm_left_alone(world: World) -> Any:
    """BatchNorm with `broadcast_buffers=False`"""
    inner = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.BatchNorm1d(HIDDEN), *net()[1:])
    return train(world, inner, by_rank=True, broadcast_buffers=False)


@case(DDP)
def counting_buffers(world: World) -> Any:
    """Buffers that are changed alike everywhere"""
    model = net()
    model.register_buffer("seen", torch.zeros(1))
    wrapped = world.wrap(model)
    optimizer = sgd(wrapped)
    world.start(wrapped, optimizer)
    for batch in world.batches(STEPS):
        optimizer.zero_grad()
        loss_of(wrapped, batch).backward()
        optimizer.step()
        model.seen += 1.0
    return dict(model.state_dict())


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(2, 4, 3, padding=1)
        self.head = nn.Linear(4 * WIDTH, OUTPUTS)

    def forward(self, inputs: torch.Tensor) -> Any:
        images = inputs.repeat(1, 2).view(-1, 2, 2, WIDTH // 2)
        return self.head(self.inner(images).flatten(1))


@case(DDP)
def channels_last(world: World) -> Any:
    """`channels_last` at all sites"""
    return train(world, Images().to(memory_format=torch.channels_last))  # type: ignore[call-overload]


@case((*DDP, *AVERAGE), quick=DDP)
def channels_last_at_one_site(world: World) -> Any:
    """`channels_last` at one site only"""
    model: Any = Images()
    return train(world, model.to(memory_format=torch.channels_last) if world.rank else model)


@case((*DDP, *AVERAGE))
def transposed_at_one_site(world: World) -> Any:
    """A weight that is stored transposed at one site only"""
    model = net()
    if world.rank == 1:
        inner: Any = model[2]
        inner.weight = nn.Parameter(inner.weight.detach().t().contiguous().t())
    return train(world, model)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(WIDTH, HIDDEN, dtype=torch.complex64) / 3)
        self.last = nn.Parameter(torch.randn(HIDDEN, OUTPUTS, dtype=torch.complex64) / 3)
        self.spare = nn.Parameter(torch.randn(OUTPUTS, dtype=torch.complex64))

    def forward(self, inputs: torch.Tensor, is_spare: bool = False) -> Any:
        outputs = (inputs.to(torch.complex64) @ self.first).tanh() @ self.last
        return (outputs * self.spare if is_spare else outputs).abs()


COMPLEX_SHARDS = Refused("TypeError", "complex64, which does not cross in shards")


@case(
    (*BOTH, *AVERAGE),
    {"ddp": EQUAL, "fsdp2": COMPLEX_SHARDS, "average": EQUAL},
    resumes_at=STEPS // 2,
)
def complex_parameters(world: World) -> Any:
    """Complex parameters, and a run that goes on with them"""
    model = Complex()
    model.spare.requires_grad_(False)
    wrapped = world.wrap(model)
    optimizer = torch.optim.SGD([model.first, model.last], lr=0.1)
    world.start(wrapped, optimizer)
    start = world.site.checkpoint(wrapped, optimizer)
    for step in range(start, STEPS):
        optimizer.zero_grad()
        loss_of(wrapped, world.batch(step)).backward()
        optimizer.step()
    return wrapped


def _complex_alone(world: World) -> Any:
    model = Complex()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank, (inputs, targets) in enumerate(by_parts(world, world.batch(step))):
            (F.mse_loss(model(inputs, rank == 1), targets) / world.num_ranks).backward()
        optimizer.step()
    return model


@case(DDP, oracle=_complex_alone)
def complex_unused(world: World) -> Any:
    """Complex parameters that one site does not use"""
    model = world.wrap(Complex(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world.start(model, optimizer)
    for inputs, targets in world.batches(STEPS):
        optimizer.zero_grad()
        F.mse_loss(model(inputs, world.rank == 1), targets).backward()
        optimizer.step()
    return model


@case(DDP)
def float64_model(world: World) -> Any:
    """A model in float64"""
    model = world.wrap(net().double())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for inputs, targets in world.batches(STEPS):
        optimizer.zero_grad()
        loss_of(model, (inputs.double(), targets.double())).backward()
        optimizer.step()
    return model


@case(
    DDP,
    Refused("TypeError", "embedding is an Embedding of sparse gradients.*sparse=False"),
)
def sparse_gradients(world: World) -> Any:
    """An embedding with sparse gradients"""
    model = Tied()
    model.embedding = nn.Embedding(7, WIDTH, sparse=True)
    wrapped = world.wrap(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    world.start(wrapped, optimizer)
    for batch in world.batches(STEPS):
        tokens, labels = tokens_of(batch)
        optimizer.zero_grad()
        F.cross_entropy(wrapped(tokens).transpose(1, 2), labels).backward()
        optimizer.step()
    return wrapped


# ---------------------------------------------------------------- hooks


@case(DDP)
def tensor_hooks(world: World) -> Any:
    """Hooks of tensors and modules that scale gradients"""
    model = net()
    model[0].weight.register_hook(lambda grad: grad * 0.5)
    model[2].register_full_backward_hook(lambda _, grads, __: tuple(2 * each for each in grads))
    return train(world, model)


@case(
    BOTH,
    {"ddp": "equal", "fsdp2": Refused("TypeError", r"has a hook that runs when its gradient")},
)
def reading_hooks(world: World) -> Any:
    """Hooks that run when a gradient is there (`register_post_accumulate_grad_hook`), and read"""
    model = world.wrap(net())
    seen: list[float] = []
    for each in model.parameters():
        each.register_post_accumulate_grad_hook(lambda each: seen.append(float(each.grad.sum())))
    optimizer = sgd(model)
    world.start(model, optimizer)
    for batch in world.batches(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return model


@case(BOTH)
def teacher(world: World) -> Any:
    """A teacher that is a moving average of the model, and whose outputs are learnt, too"""
    inner = nn.Sequential(OrderedDict(student=net()))
    guide = copy.deepcopy(inner)
    model = world.wrap(inner)
    optimizer = sgd(model)
    world.start(model, optimizer)
    world.site.broadcast(guide)
    for inputs, targets in world.batches(STEPS):
        optimizer.zero_grad()
        outputs = model(inputs)
        with torch.no_grad():
            wanted = guide(inputs)
        (F.mse_loss(outputs, targets) + F.mse_loss(outputs, wanted)).backward()
        optimizer.step()
        with torch.no_grad():
            for mean, each in zip(guide.parameters(), model.parameters(), strict=True):
                mean.lerp_(each.full_tensor() if world.is_sharded else each, 0.3)
    return [model, guide]


def _in_another_order(world: World, *, is_swapped: bool) -> Any:
    names = ["second", "first"] if is_swapped else ["first", "second"]
    model = nn.Sequential(OrderedDict((name, nn.Linear(WIDTH, WIDTH)) for name in names))
    model.append(nn.Linear(WIDTH, OUTPUTS))
    return train(world, model)


IN_ANOTHER_ORDER = Refused(
    "LAYOUT_MISMATCH", r"tensor 0 is second\.weight .* and first\.weight .* at the first site"
)


@case(DDP, IN_ANOTHER_ORDER, quick=True, steps=None)
def another_order_at_a_site(world: World) -> Any:
    """Parameters are registered in another order at one site"""
    return _in_another_order(world, is_swapped=world.rank == 1)


@case(DDP, IN_ANOTHER_ORDER, ranks=(1, 2), steps=None)
def another_order_at_a_rank(world: World) -> Any:
    """Parameters are registered in another order at one rank of a site"""
    return _in_another_order(world, is_swapped=world.rank == 2)


@case(
    DDP,
    Refused("LAYOUT_MISMATCH", r"tensor 2 is 1\.weight \(6, 6\)|shape of 2\.weight"),
    steps=None,
)
def another_size_at_a_site(world: World) -> Any:
    """A layer has another size at one site"""
    size = WIDTH if world.rank == 1 else HIDDEN
    return train(
        world,
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, size), nn.Linear(size, OUTPUTS)),
    )
