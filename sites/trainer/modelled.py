"""Forward and backward as time that passes, with real gradients: `trainer.compute: modelled`.

The layers of the model form a chain of autograd functions that compute nothing. Each waits as long
as its accelerator would need, then hands out gradients that one real backward pass left, so that
DistributedDataParallel's hooks fire layer by layer, with real values, when they would. All waits
are for absolute times of one clock, so being woken late is made up for and never adds up.

Real and part of no modelled time: the optimizer's step, accumulation, digests, records. The
step's clock starts where the step before had its gradients, so they run within the time that
the next forward pass takes, as long as that is enough.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import backward

from isthmus.sites.trainer import sampler
from isthmus.sites.trainer.corpus import Bytes
from isthmus.sites.trainer.gpt import Gpt
from isthmus.sites.trainer.learning import (
    local_gradients,
    sequences,
    set_learning_rate,
    token_losses,
)
from isthmus.sites.worker.data.data_positions import Positions
from isthmus.topology.spec.compute import LayerTime
from isthmus.topology.spec.job import Trainer


class ComputeClock:
    """Lets computing time pass."""

    def __init__(
        self,
        now_s: Callable[[], float] = time.perf_counter,
        sleep_s: Callable[[float], None] = time.sleep,
    ) -> None:
        self._now_s = now_s
        self._sleep_s = sleep_s
        self._reached_s = now_s()

    def begin(self) -> None:
        """Count from now on."""
        self._reached_s = self._now_s()

    def compute(self, duration_s: float) -> None:
        """Return when `duration_s` more have passed since `begin`; at once if they have already."""
        self._reached_s += duration_s
        remaining_s = self._reached_s - self._now_s()
        if remaining_s > 0:
            self._sleep_s(remaining_s)


class ModelledGpt(nn.Module):
    """The model's parameters, in layers that only take their time."""

    def __init__(self, model: Gpt, times: Sequence[LayerTime], clock: ComputeClock) -> None:
        """Keep the gradients that a real backward pass has left in `model`, and clear them.

        Args:
            model: owned from now on.
            times: of one sequence, in the order of the forward pass:
                isthmus.topology.spec.compute.layer_times.
            clock: lets time pass.
        """
        super().__init__()
        self.model = model
        self._clock = clock
        parts: list[list[nn.Module]] = [
            [model.embedding, model.position],
            *([block] for block in model.blocks),
            [model.norm, *([] if model.output is None else [model.output])],
        ]
        self._layers = [
            _Layer([each for module in part for each in module.parameters()], layer_time)
            for part, layer_time in zip(parts, times, strict=True)
        ]
        model.zero_grad()

    def forward(self, num_sequences: int) -> Tensor:
        """Return a scalar whose backward pass takes its time and gives all parameters gradients."""
        passed = torch.zeros((), device=self._layers[0].parameters[0].device)
        for layer in self._layers:
            passed = _Pass.apply(  # type: ignore[no-untyped-call] # torch's own
                passed, self._clock, num_sequences, layer, *layer.parameters
            )
        return passed


class _Layer:
    """One layer's parameters, what their gradients were, and its time for one sequence."""

    def __init__(self, parameters: list[nn.Parameter], layer_time: LayerTime) -> None:
        self.parameters = parameters
        self.layer_time = layer_time
        self.gradients = [each.grad for each in parameters if each.grad is not None]
        assert len(self.gradients) == len(parameters), "a backward pass has been made"


class _Pass(torch.autograd.Function):
    """One layer of one forward and backward pass."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's own
        passed: Tensor,
        clock: ComputeClock,
        num_sequences: int,
        layer: _Layer,
        *_parameters: Tensor,
    ) -> Tensor:
        ctx.pass_ = (clock, num_sequences, layer)
        clock.compute(num_sequences * layer.layer_time.forward_s)
        return passed.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: ANN401 - torch's own
        clock, num_sequences, layer = ctx.pass_
        # Copies, for autograd adds further micro-batches to what it was given first. Made before
        # the wait, in which they cost nothing.
        own = [each.clone() for each in layer.gradients]
        clock.compute(num_sequences * layer.layer_time.backward_s)
        return gradients[0], None, None, None, *own


def real_pass(model: Gpt, text: Bytes, config: Trainer, samples: Positions) -> float:
    """Leave real gradients in `model`: those of the first micro-batch of `samples`.

    Scaled as in a real step, by the number of all tokens of `samples`.

    Returns:
        The mean loss of that micro-batch, in nats a byte.
    """
    starts = sampler.random_starts(
        config.seed, samples[: config.micro_batch], len(text) - config.model.context
    )
    device = next(model.parameters()).device
    losses = token_losses(model, sequences(text, starts, config.model.context, device))
    backward(losses.sum() / (len(samples) * config.model.context))
    return float(losses.detach().mean())


def take_modelled_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    clock: ComputeClock,
    config: Trainer,
    step: int,
    samples: Positions,
) -> float:
    """Let the time of a step pass, exchange its gradients, and update the parameters.

    The gradient is not clipped: its norm would be read for nothing that is learnt.

    Args:
        model: A `ModelledGpt`, or DistributedDataParallel around one.
        optimizer: Of its parameters.
        clock: The model's; at return, the next step's compute has begun.
        config: Of the job.
        step: Counts from 0.
        samples: This rank's positions, at least one.

    Returns:
        The learning rate.
    """
    rate = set_learning_rate(optimizer, config, step)
    optimizer.zero_grad()
    micro_batches = sampler.micro_batches(samples, config.micro_batch)
    for index, micro_batch in enumerate(micro_batches):
        with local_gradients(model, enabled=index < len(micro_batches) - 1):
            backward(model(len(micro_batch)))
    clock.begin()
    optimizer.step()
    return rate
