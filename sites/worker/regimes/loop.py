"""What has averages cross between sites where that is not part of the backward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from isthmus.sites.checkpoint.training_state import OuterState
from isthmus.sites.worker.exchange.rounds import Landing, Round


class RegimeLoop(OuterState, Protocol):
    """One rank's part in a regime other than `sync`. For the training thread."""

    max_norm: float
    """To which the script clips gradients, as far as it is known."""

    def before_end(self, step: int) -> Landing | None:
        """Do what belongs to a step that an optimizer has just taken, counted from 1.

        Returns a round that has ended with it, if such wait for nobody.
        """

    def after_end(self) -> None:
        """Do what is due between two steps, once all have heard of the step."""

    def begin_end(self) -> bool:
        """Come to an end between two steps, for another regime follows: at all ranks alike.

        Returns whether that takes another step, after which this is called again.
        """

    def make_common(self, *, crosses: bool = True) -> bool:
        """Have the same state at all sites after this step, for it is to be written.

        From all ranks of all sites after the same step, before `after_end`. Returns whether there
        is such a state. Unless it `crosses`, nothing is sent: the run is over for this site, and
        maybe not for others, or one of them is in the middle of a step.
        """

    def finish(self) -> None:
        """Wait for what is under way, at the end of a run."""

    def global_parameters(self) -> AbstractContextManager[None]:
        """Return a context in which parameters hold what all sites have: as `Site` has it."""

    def norm(self) -> float:
        """Return the 2-norm of the gradient in `p.grad`; 0: there is none."""

    def take_rounds(self) -> list[Round]:
        """Return the rounds over sites that have landed since the last call."""

    def close(self) -> None:
        """Finish between two steps, for something else is attached from now on."""
