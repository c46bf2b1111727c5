"""What a script sets for all of torch, and where it calls."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.flop_counter import FlopCounterMode

from tests.conformance.case import AVERAGE, BOTH, DDP, LONE, STEPS, case
from tests.conformance.cases.loops import sgd
from tests.conformance.world import World, learnt, loss_of, net

Surroundings = Callable[[], AbstractContextManager[Any]]


@contextlib.contextmanager
def default_of(
    set_default: Callable[[Any], object], value: object, before: object
) -> Iterator[None]:
    set_default(value)
    try:
        yield
    finally:
        set_default(before)


def dtype_set(dtype: torch.dtype) -> Surroundings:
    return lambda: default_of(torch.set_default_dtype, dtype, torch.float32)


def device_set() -> AbstractContextManager[None]:
    """Have tensors be where nothing can be computed with them, unless they name a device."""
    return default_of(torch.set_default_device, "meta", None)


AfterStep = Callable[[World, nn.Module, torch.optim.Optimizer], None]


def train(
    world: World,
    surroundings: Surroundings = contextlib.nullcontext,
    *,
    inside: bool = True,
    after_step: AfterStep = lambda *_: None,
) -> Any:
    """Train what was made before; all calls of isthmus, and with `inside` all passes, are there."""
    model = world.wrap(net())
    optimizer = sgd(model)
    batches = [*world.batches(STEPS)]
    with surroundings():
        world.start(model, optimizer)
        world.site.checkpoint(model, optimizer)
    for step, batch in enumerate(batches):
        with surroundings() if inside else contextlib.nullcontext():
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
        with surroundings():
            if world.way != "average":
                world.site.clip_grad_norm_(1.0)
        with surroundings() if inside else contextlib.nullcontext():
            optimizer.step()
        after_step(world, model, optimizer)
        with surroundings():
            world.site.log(loss=loss)
            evaluate(world, loss.detach().clone())
            if step == 1:
                world.site.broadcast([torch.full((3,), 0.5, dtype=torch.float32, device="cpu")])
    return model


def evaluate(world: World, loss: torch.Tensor) -> None:
    """Note a loss that all ranks have averaged."""
    with world.site.global_parameters():
        world.site.all_reduce([loss], exact=True)
    world.note(loss)


@case((*BOTH, *AVERAGE, *LONE))
def nothing_set(world: World) -> Any:
    """All of isthmus's calls in a loop"""
    return train(world)


@case((*BOTH, *AVERAGE, *LONE), quick=DDP)
def default_dtype(world: World) -> Any:
    """`torch.set_default_dtype(torch.bfloat16)` for parameters of float32"""
    return train(world, dtype_set(torch.bfloat16))


@case(BOTH, ranks=(1, 2), quick=DDP)
def default_dtype_of_several_ranks(world: World) -> Any:
    """`torch.set_default_dtype(torch.float64)` with two ranks a site"""
    return train(world, dtype_set(torch.float64))


@case((*DDP, *AVERAGE, *LONE), quick=DDP)
def default_device(world: World) -> Any:
    """`torch.set_default_device`"""
    return train(world, device_set)


@case((*DDP, *AVERAGE), ranks=(1, 2))
def default_device_of_several_ranks(world: World) -> Any:
    """`torch.set_default_device` with two ranks a site"""
    return train(world, device_set)


@case(DDP)
def device_context(world: World) -> Any:
    """`with torch.device(...)` around the calls and the loop"""
    return train(world, lambda: torch.device("meta"))


@case((*DDP, *AVERAGE, *LONE))
def calls_under_autocast(world: World) -> Any:
    """All of isthmus's calls under `torch.autocast`"""
    return train(world, lambda: torch.autocast("cpu", torch.bfloat16), inside=False)


@case(BOTH)
def deterministic_algorithms(world: World) -> Any:
    """`torch.use_deterministic_algorithms`, which fills new memory with NaN"""
    return train(world, lambda: default_of(torch.use_deterministic_algorithms, True, False))


@case(BOTH)
def warnings_are_errors(world: World) -> Any:
    """Warnings that are errors, and `numpy.seterr(all="raise")`"""

    @contextlib.contextmanager
    def strict() -> Iterator[None]:
        with warnings.catch_warnings(), np.errstate(all="raise"):
            warnings.simplefilter("error")
            yield

    return train(world, strict)


@case(BOTH)
def counted_flops(world: World) -> Any:
    """Steps under a `TorchDispatchMode`: `FlopCounterMode`"""
    return train(world, lambda: FlopCounterMode(display=False))


@case(BOTH)
def anomaly_detection(world: World) -> Any:
    """`torch.autograd.set_detect_anomaly(True)`"""
    return train(world, lambda: torch.autograd.set_detect_anomaly(True))


# ---------------------------------------------------------------- inference mode


@case((*BOTH, *AVERAGE, *LONE), quick=DDP)
def calls_in_inference_mode(world: World) -> Any:
    """All of isthmus's calls under `torch.inference_mode`"""
    return train(world, torch.inference_mode, inside=False)


@case((*BOTH, *AVERAGE), ranks=(1, 2))
def calls_in_inference_mode_of_several_ranks(world: World) -> Any:
    """All of isthmus's calls under `torch.inference_mode`, with two ranks a site"""
    return train(world, torch.inference_mode, inside=False)


@case((*BOTH, *AVERAGE, *LONE))
def calls_without_gradients(world: World) -> Any:
    """All of isthmus's calls under `torch.no_grad`"""
    return train(world, torch.no_grad, inside=False)


@case((*DDP, *AVERAGE, *LONE), quick=DDP)
def evaluation_in_inference_mode(world: World) -> Any:
    """An evaluation under `torch.inference_mode` before the first step and between steps"""
    model = world.wrap(net())
    optimizer = sgd(model)
    world.start(model, optimizer)
    for step, batch in enumerate(world.batches(STEPS)):
        with torch.inference_mode(), world.site.global_parameters():
            loss = loss_of(model, world.batch(100 + step))
            halves = torch.stack([loss / 2, loss / 2], dim=0)
            world.site.all_reduce([loss, halves[::2]], exact=True)
            if step % 2 == 0:  # in rounds of two steps, parameters between them are older
                world.note(loss)
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return model


@case(BOTH, steps=None)
def tensors_of_inference_mode(world: World) -> Any:
    """Tensors that were made in `torch.inference_mode`, averaged and broadcast outside of it"""
    with torch.inference_mode():
        given = [world.batch(7)[0].mean(dim=0), world.batch(8)[0].mean(dim=0).to(torch.complex64)]
        same = [torch.full((5,), 0.25 if world.is_oracle else 0.25 + world.rank)[1:3]]
    world.site.all_reduce(given, exact=True)
    world.site.broadcast(same)
    return {
        str(at): each for at, each in enumerate([given[0], torch.view_as_real(given[1]), *same])
    }


# ---------------------------------------------------------------- copies


def use(world: World, model: nn.Module) -> None:
    """Compute with a copy in training mode, with gradients."""
    model(world.batch(50)[0])
    loss_of(model, world.batch(51)).backward()
    model.zero_grad()


def read_back(written: bytes) -> Any:
    """Read a pickle, which has to do without isthmus."""
    assert b"isthmus" not in written
    return pickle.loads(written)


@case((*DDP, *LONE), quick=True)
def copies_of_the_model(world: World) -> Any:
    """Copies of an attached model: `copy.deepcopy`, `AveragedModel`, `torch.save`, pickle"""
    averages: list[AveragedModel] = []

    def make_copies(world: World, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        inner = cast("nn.Module", getattr(model, "module", model))
        averages.extend([AveragedModel(inner)][len(averages) :])
        averages[0].update_parameters(inner)
        written = io.BytesIO()
        torch.save(inner, written)
        assert b"isthmus" not in written.getvalue()
        written.seek(0)
        copies = [
            copy.deepcopy(inner),
            copy.deepcopy(averages[0]),
            AveragedModel(inner),
            read_back(pickle.dumps(inner)),
            torch.load(written, weights_only=False),
        ]
        if not world.is_oracle:
            copies += [copy.deepcopy(model), read_back(pickle.dumps(model))]
        for each in copies:
            use(world, each)
        ended, its_optimizer = copy.deepcopy((inner, optimizer))
        for each in ended.parameters():
            each.grad = torch.ones_like(each)
        its_optimizer.step()  # no step of the run

    model = train(world, after_step=make_copies)
    of_copies = {f"average.{name}": each for name, each in averages[0].named_parameters()}
    return {**learnt(model), **of_copies}
