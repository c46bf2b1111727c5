"""The learning rate of each step. Pure."""

import math

from topology.job import Optimizer


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
