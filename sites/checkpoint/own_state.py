"""Saves and restores a rank's random number generators."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def generator_states(device: torch.device) -> dict[str, Any]:
    """Return the states of Python's, numpy's and torch's global generators."""
    kind, words, *rest = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(words).astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_generators(states: dict[str, Any], device: torch.device) -> None:
    """Put the generators into the states that `generator_states` returned."""
    random.setstate(states["python"])
    kind, words, *rest = states["numpy"]
    np.random.set_state((kind, words.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
