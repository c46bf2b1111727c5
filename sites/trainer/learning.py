"""One optimizer step, its learning rate, and the loss on held-out text.

A rank of many and the one process of the reference training take their steps here alike.

Every site evaluates the same sequences, split over its own ranks. So no scalar has to cross the WAN
and nothing of the training state is touched. All sites hold the same parameters, and find the same
loss, up to the order in which float64 numbers are added.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from isthmus.sites.trainer import sampler
from isthmus.sites.trainer.corpus import Bytes
from isthmus.sites.trainer.ring import Batch, cut_sequences
from isthmus.sites.worker.data.data_positions import Positions
from isthmus.topology.spec.compute import share
from isthmus.topology.spec.job import Optimizer, Trainer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def learning_rate(optimizer: Optimizer, step: int, steps: int) -> float:
    """Return the rate of `step`, which counts from 0 to `steps` - 1.

    Rises linearly to its peak at the last step of the warm-up, then falls along half a cosine to
    the minimum at the last step of all.
    """
    if step < optimizer.warmup_steps:
        return optimizer.learning_rate * (step + 1) / optimizer.warmup_steps
    # The peak stands at the warm-up's last step (or at step 0 without one).
    peak_step = max(0, optimizer.warmup_steps - 1)
    progress = min(1.0, (step - peak_step) / max(1, steps - 1 - peak_step))
    above_minimum = optimizer.learning_rate - optimizer.min_learning_rate
    return optimizer.min_learning_rate + above_minimum * (1 + math.cos(math.pi * progress)) / 2


class DivergedError(ArithmeticError):
    """The gradient is not finite any more, at every site alike: going on would learn nothing."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step was, as this rank saw it."""

    loss_sum: float
    """The sum of the losses of this rank's tokens, in nats; float64."""
    tokens: int
    """Tokens that this rank trained on."""
    grad_norm: float
    """The norm of the global gradient, before it was clipped."""
    learning_rate: float


def make_optimizer(model: nn.Module, config: Optimizer) -> torch.optim.AdamW:
    """Return AdamW that decays matrices only: a norm's scale or shift has no reason to be small."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {
            "params": [parameter for parameter in parameters if parameter.dim() >= 2],
            "weight_decay": config.weight_decay,
        },
        {
            "params": [parameter for parameter in parameters if parameter.dim() < 2],
            "weight_decay": 0.0,
        },
    ]
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=True
    )


def take_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    text: Bytes,
    config: Trainer,
    step: int,
    samples: Positions,
) -> StepResult:
    """Learn from `samples` and update the parameters.

    Args:
        model: A `Gpt`, or DistributedDataParallel around one: then the gradients that the
            optimizer sees are those of the global batch.
        optimizer: From `make_optimizer`.
        text: The training text.
        config: Of the job.
        step: Counts from 0.
        samples: This rank's positions, at least one.

    Raises:
        DivergedError: the global gradient is not finite; the parameters are as before the step.
    """
    optimizer.zero_grad()
    loss_sum, tokens = learn_from(model, text, config, samples)
    clip = partial(clip_gradients, [*model.parameters()])
    norm, rate = apply_gradients(clip, optimizer, config, step)
    return StepResult(float(loss_sum), tokens, norm, rate)


def learn_from(
    model: nn.Module,
    text: Bytes,
    config: Trainer,
    samples: Positions,
    rows: int = 0,
    ring: DeviceMesh | None = None,
) -> tuple[Tensor, int]:
    """Add the gradients of `samples`, as `take_step` has it.

    Args:
        model: As of `take_step`, or what fully_shard was called on.
        text: The training text.
        config: Of the job.
        samples: This rank's positions, at least one.
        rows: Samples of the site's busiest rank, where ranks gather parameters from each other:
            they go through the model equally often, if need be for nothing.
        ring: The ranks that each have a part of every sequence; None: this one has all.

    Returns:
        The sum of the losses of this rank's tokens, float64, shape (), and their number.
    """
    num_starts = len(text) - config.model.context
    device = next(model.parameters()).device
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    tokens = len(samples) * own_tokens(config, ring)
    micro_batches = sampler.micro_batches(samples, config.micro_batch, rows)
    for index, micro_batch in enumerate(micro_batches):
        is_idle = len(micro_batch) == 0
        mine = samples[:1] if is_idle else micro_batch
        starts = sampler.random_starts(config.seed, mine, num_starts)
        is_last = index == len(micro_batches) - 1
        batch = sequences(text, starts, config.model.context, device)
        with local_gradients(model, enabled=not is_last), cut_sequences(batch, ring) as own:
            losses = token_losses(model, own)
            if is_idle:
                losses = losses * 0.0
            # A sum over all tokens of the rank, so that a shorter last micro-batch weighs less.
            (losses.sum() / tokens).backward()  # type: ignore[no-untyped-call]
        loss_sum += losses.detach().sum(dtype=torch.float64)
    return loss_sum, tokens


def apply_gradients(
    clip: Callable[[float], float], optimizer: torch.optim.Optimizer, config: Trainer, step: int
) -> tuple[float, float]:
    """Update the parameters; return the gradient's norm before it was clipped, and the rate.

    Args:
        clip: Scales the gradients down to a norm where they are longer; returns what it was.
        optimizer: From `make_optimizer`.
        config: Of the job.
        step: Counts from 0.

    Raises:
        DivergedError: as of `take_step`.
    """
    rate = set_learning_rate(optimizer, config, step)
    norm = clip(config.optimizer.clip_norm)
    if not math.isfinite(norm):
        raise DivergedError(
            f"step {step + 1}: the gradient's norm is {norm}; lower "
            "trainer.optimizer.learning_rate or raise warmup_steps. No parameter was changed by it"
        )
    optimizer.step()
    return norm, rate


def own_tokens(config: Trainer, ring: DeviceMesh | None) -> int:
    """Return how many tokens of each sequence a rank has."""
    return config.model.context // (1 if ring is None else ring.size())


def sequences(text: Bytes, starts: np.ndarray, context: int, device: torch.device) -> Batch:
    """Return the `context` bytes from each start, and the one after each."""
    window = torch.from_numpy(sampler.windows(text, starts, context)).to(device)
    return Batch(window[:, :-1], window[:, 1:])


def token_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of every predicted byte: float32, shape (B T,), nats."""
    logits = model(batch.inputs, batch.places)
    flat = logits.flatten(0, 1).float()
    return functional.cross_entropy(flat, batch.targets.flatten(), reduction="none")


def clip_gradients(parameters: Iterable[Tensor], clip_norm: float) -> float:
    """Scale the gradients down to `clip_norm` where they are longer; return their norm.

    The norm is summed in float64 and the scale rounded to float32: accelerators that add in
    another order then still get the same scale, and sites stay bit-identical. Without gradients,
    as in the first step of the regime `delayed`, it is 0.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return 0.0
    squares = torch.stack([gradient.double().square().sum() for gradient in gradients])
    norm = float(squares.sum().sqrt())
    if norm > clip_norm:
        scale = float(np.float32(clip_norm / norm))
        for gradient in gradients:
            gradient.mul_(scale)
    return norm


def set_learning_rate(optimizer: torch.optim.Optimizer, config: Trainer, step: int) -> float:
    """Set and return the rate of `step`, which counts from 0."""
    rate = learning_rate(config.optimizer, step, config.steps)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


@contextlib.contextmanager
def local_gradients(model: nn.Module, *, enabled: bool) -> Iterator[None]:
    """Let DDP and fully_shard keep gradients to themselves in this context, if `enabled`."""
    # Not by its class, which takes torch half a second to import.
    synchronise = getattr(model, "set_requires_gradient_sync", None)
    if not enabled:
        yield
    elif isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    elif synchronise is not None:
        synchronise(False)
        yield
        synchronise(True)
    else:
        yield


@torch.no_grad()
def evaluate(
    model: nn.Module,
    text: Bytes,
    config: Trainer,
    *,
    ranks: int,
    rank: int,
    micro_batch: int | None = None,
    ring: DeviceMesh | None = None,
) -> tuple[float, int]:
    """Return the sum of the losses of this rank's share, in nats, and its number of tokens.

    Args:
        model: Whole, or what fully_shard was called on; not the DistributedDataParallel around it.
        text: Held out, longer than the context.
        config: `evaluation_batches` batches of `micro_batch` sequences are spread over the text.
        ranks: With a share of the sequences, inside the site.
        rank: This one among them; its share may be empty.
        micro_batch: Sequences at once; None: the job's.
        ring: As of `learn_from`.
    """
    context = config.model.context
    device = next(model.parameters()).device
    own, rows = evaluated(text, config, ranks=ranks, rank=rank)
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    # All go through the model equally often: where it is sharded, they gather it from each other.
    for starts in sampler.micro_batches(own, micro_batch or config.micro_batch, rows):
        is_idle = len(starts) == 0
        some = np.zeros(1, np.int64) if is_idle else starts
        with cut_sequences(sequences(text, some, context, device), ring) as batch:
            losses = token_losses(model, batch)
        if not is_idle:
            loss_sum += losses.sum(dtype=torch.float64)
    return float(loss_sum), len(own) * own_tokens(config, ring)


def evaluated(
    text: Bytes, config: Trainer, *, ranks: int, rank: int
) -> tuple[npt.NDArray[np.int64], int]:
    """Return where a rank's sequences begin, and how many the busiest rank has; as `evaluate`."""
    count = config.evaluation_batches * config.micro_batch
    starts = sampler.even_starts(count, len(text) - config.model.context)
    part = share(count, ranks, rank)
    return starts[part.start : part.stop], -(-count // ranks)
