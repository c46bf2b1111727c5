"""A rank's part in a regime, beside what its hooks do in the backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from isthmus.sites.worker.exchange.rounds import Landing, Round
from isthmus.sites.worker.layouts.agreed_hook import AgreedHook
from isthmus.sites.worker.layouts.gradient_hook import GradientHook
from isthmus.sites.worker.regimes.outer_buckets import OuterBuckets

if TYPE_CHECKING:
    from isthmus.sites.checkpoint.training_state import Forms, Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """What is trained together in regimes other than `sync`, and by what it crosses."""

    hook: AgreedHook
    """Averages gradients inside the site."""
    buckets: OuterBuckets
    """What crosses between sites."""
    models: Sequence[nn.Module]
    optimizers: Sequence[Optimizer]
    """The optimizers of the models' parameters, in the order in which they step."""
    counts: Callable[[], bool]
    """Whether this site takes part now; else it only gets results."""
    num_sites: Callable[[int], int]
    """How many sites take part so many steps after the next one, the same at all ranks."""
    warn: Callable[[str], None]
    """Tells people something."""


class RegimeLoop:
    """One rank's part in a regime, and an `OuterState`. For the training thread.

    As it stands it is that of `sync`: gradients cross in the backward pass, and that is all.
    """

    stays_inside = False
    """Hooks average inside the site, and something else crosses between sites."""

    def __init__(self) -> None:
        """Begin between two steps."""
        self.max_norm = math.inf
        """To which the script clips gradients, as far as it is known."""
        self._landed: list[Round] = []
        """Rounds over sites, but those of hooks, since the latest `take_rounds`."""

    def note_clipping(self, max_norm: float) -> None:
        """Note to which norm the script clips gradients."""
        self.max_norm = max_norm

    def before_end(self, step: int) -> Landing | None:
        """Do what belongs to a step that an optimizer has just taken, counted from 1.

        Returns a round that has ended with it, if such wait for nobody.
        """
        del step
        return None

    def after_end(self) -> None:
        """Do what is due between two steps, once all have heard of the step."""

    def begin_end(self) -> bool:
        """Come to an end between two steps, for another regime follows: at all ranks alike.

        Returns whether that takes another step, after which this is called again.
        """
        return False

    def make_common(self, *, crosses: bool = True) -> bool:
        """Have the same state at all sites after this step, for it is to be written.

        From all ranks of all sites after the same step, before `after_end`. Returns whether there
        is such a state. Unless it `crosses`, nothing is sent: the run is over for this site, and
        maybe not for others, or one of them is in the middle of a step.
        """
        del crosses
        return True

    def finish(self) -> None:
        """Wait for what is under way, at the end of a run."""

    def global_parameters(self) -> AbstractContextManager[None]:
        """Return a context in which parameters hold what all sites have: as `Site` has it."""
        return nullcontext()

    def norm(self, hook: GradientHook) -> float:
        """Return the 2-norm of the gradient in `p.grad`, where `hook` has left it; 0: none."""
        return hook.norm()

    def take_rounds(self) -> list[Round]:
        """Return the rounds over sites that have landed since the last call."""
        landed, self._landed = self._landed, []
        return landed

    def close(self) -> None:
        """Finish between two steps, for something else is attached from now on."""

    # ---------------------------------------------------------------- state

    def tensors(self) -> Tensors:
        """Return what all sites have beside the model, after `make_common`: references."""
        return {}

    def to_load(self, stored: Forms) -> Tensors:
        """Return tensors to load what was stored into, of what this rank has a part of."""
        del stored
        return {}

    def take(self, tensors: Tensors) -> None:
        """Go on from what was loaded; nothing: from a run that had nothing of this regime."""
