"""What all hooks have in common that hand gradients over: their rounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch

from isthmus.protos.errors import IsthmusError, ScriptError
from isthmus.protos.failure import reason_of
from isthmus.sites.worker.checks.backward_passes import watch_backward
from isthmus.sites.worker.checks.torch_calls import calls
from isthmus.sites.worker.exchange.rounds import Round
from isthmus.sites.worker.exchange.step_records import TokenCount

MAX_ROUNDS = 1024
"""The record of a step tells of so many rounds, the last ones: gradients may pile up for ever."""


class GradientHook:
    """Averages gradients in rounds, and keeps those of the present step."""

    def __init__(self, tokens: TokenCount, *, is_summed: bool) -> None:
        """Take what counts this rank's weight. `is_summed`: losses are sums over tokens."""
        self._tokens = tokens
        self._is_summed = is_summed
        if is_summed:
            tokens.require()
        self._rounds: deque[Round] = deque(maxlen=MAX_ROUNDS)
        self._latest: Round | None = None
        self.crossed: set[int] = set()
        """Ids of the parameters whose gradients cross, as far as rounds have brought them."""
        self.after_round: Callable[[], None] = lambda: None
        """Called at the end of each backward pass that has synchronised."""
        self.after_gradients: Callable[[], None] | None = None
        """Called after that, once the averages are in `p.grad`; None: nobody has to know."""
        self._broken_by: Exception | None = None
        """What broke off a backward pass amid a round."""
        self._undo: list[Callable[[], None]] = [watch_backward(self)]
        """Take what was hooked in off again."""

    @property
    def latest(self) -> Round | None:
        """The latest round; None: there was none."""
        return self._latest

    def close(self) -> None:
        """Take all hooks off, between two backward passes."""
        for each in self._undo:
            each()
        self._undo.clear()

    def finish(self, *_: object) -> None:
        """End a round that is still open: what an optimizer calls before each step.

        Raises:
            ScriptError: as `check_unbroken`.
        """
        self.check_unbroken()

    def check_unbroken(self, *_: object) -> None:
        """Refuse to go on after a pass that was broken off: what models call before each pass.

        Raises:
            ScriptError: and what to do.
        """
        if self._broken_by is None:
            return
        raise ScriptError(
            "a backward pass was broken off while its gradients crossed, and the script went on; "
            f"the other ranks still wait for the rest of them. It was {reason_of(self._broken_by)}. "
            "One rank cannot leave out a step whose backward pass has begun: have it fit (smaller "
            "micro-batches under site.no_sync, activation checkpointing), or let the error end "
            "the script"
        ) from self._broken_by

    def begin_backward(self) -> None:
        """Do nothing: `PassWatcher`."""

    def end_backward(self, error: Exception | None) -> None:
        """Note what has broken a pass off amid a round: `PassWatcher`."""
        if error is not None and not isinstance(error, IsthmusError) and self._is_amid_round():
            self._broken_by = error

    def _is_amid_round(self) -> bool:
        """Whether a backward pass that has just ended has left a round unfinished."""
        return False

    def gradients(self) -> list[torch.Tensor]:
        """Return what this rank holds of each gradient of the latest round: views."""
        raise NotImplementedError

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes accumulate gradients, and nothing crosses."""
        raise NotImplementedError

    def parameters_now(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the parameters that the models have now, new ones too, with their names."""
        raise NotImplementedError

    def norm(self) -> float:
        """Return the 2-norm of the whole gradient of the latest round: `Round.norm`.

        Raises:
            RuntimeError: there was no round.
        """
        self.finish()
        if self._latest is None:
            raise RuntimeError("site.grad_norm: no backward pass has synchronised gradients yet")
        return self._latest.norm

    def _end_round(self, finished: Round) -> None:
        self._rounds.append(finished)
        self._latest = finished
        self.after_round()

    def take_rounds(self) -> list[Round]:
        """Return the rounds since the last call: one for each time that gradients were averaged."""
        rounds = [*self._rounds]
        self._rounds.clear()
        return rounds


def check_is_outermost(num_models: int) -> None:
    """Refuse to end a round of several models in a backward pass that another one began.

    Reentrant checkpointing computes parts of a model's gradients in nested passes. Of one model
    the last part ends the round. Of several, nobody knows whether the outer pass brings more.

    Raises:
        ScriptError: there are several, and this pass is nested.
    """
    if num_models > 1 and is_nested():
        raise ScriptError(
            "several models are attached, and gradients come from a backward pass inside "
            "another one, as of reentrant activation checkpointing: give "
            "torch.utils.checkpoint use_reentrant=False"
        )


def is_nested() -> bool:
    """Whether a backward pass is at its end that another one began."""
    return any(each.f_code.co_name == "backward" and "ctx" in each.f_locals for each in calls())
