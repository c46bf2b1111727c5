"""What a run's state consists of beside tensors: settings, what the script names, and buckets."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from isthmus.protos.errors import ConfigMismatchError
from isthmus.sites.checkpoint.exchange_state import ExchangeState
from isthmus.sites.checkpoint.staging import tensors_in
from isthmus.sites.checkpoint.training_state import Tensors, TrainingState

Copies = Callable[[Tensors], Tensors]
"""Returns copies of tensors, by name."""


class Stateful(Protocol):
    """What a script may have saved along: a scheduler, a scaler, counts of its own."""

    def state_dict(self) -> dict[str, Any]:
        """Return the object's state; equal at all ranks, for the first one's is saved."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Restore the state that `state_dict` returned."""


class RunObjects:
    """Gathers what a run has beside tensors, and puts it back. Holds references only."""

    def __init__(
        self, state: TrainingState, named: Mapping[str, Stateful], exchange: ExchangeState
    ) -> None:
        """Look after the scheduler and extras, `named`, by name."""
        self._state = state
        self._named = named
        self._exchange = exchange

    @property
    def buckets(self) -> list[list[str]]:
        """How gradients were cut in the latest round."""
        return self._exchange.buckets

    def other_state(self) -> dict[str, dict[str, Any]]:
        """Return what the optimizer has of this rank's parameters that is no tensor."""
        return self._state.other_state()

    def now(
        self, buckets: list[list[str]], other_state: Mapping[str, Any], copies: Copies
    ) -> dict[str, Any]:
        """Return a copy of all of it.

        With the buckets into which gradients were cut, and what the optimizer has of all parameters
        that is no tensor. `copies` makes those of the tensors.
        """
        states = {name: each.state_dict() for name, each in self._named.items()}
        exchange = {"buckets": buckets}
        optimizer = self._state.settings(other_state)
        held = {"optimizer": optimizer, "objects": states, "exchange": exchange}
        tensors = {f"objects/{at}": each for at, each in enumerate(tensors_in(held))}
        copied = copies(tensors)
        made: dict[str, Any] = copy.deepcopy(
            held, {id(each): copied[name] for name, each in tensors.items()}
        )
        return made

    def take(self, saved: Mapping[str, Any]) -> None:
        """Put back what is not the optimizer's.

        Raises:
            ConfigMismatchError: the run that was saved had other objects.
        """
        for name, each in self._named.items():
            if name not in saved["objects"]:
                raise ConfigMismatchError(f"the checkpoint has no {name}")
            each.load_state_dict(saved["objects"][name])
        self._exchange.resume_buckets(saved["exchange"])
