"""A run's state beside tensors: optimizer settings, objects of the script, and buckets."""

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
    """An object that a script saves along: a scheduler, a scaler, its own counters."""

    def state_dict(self) -> dict[str, Any]:
        """Return the object's state, equal at all ranks: only the first rank's is saved."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Restore the state that `state_dict` returned."""


class RunObjects:
    """Collects and restores a run's state beside tensors. Holds references only."""

    def __init__(
        self, state: TrainingState, named: Mapping[str, Stateful], exchange: ExchangeState
    ) -> None:
        """`named` are the script's objects (scheduler, extras) by name."""
        self.state = state
        self.exchange = exchange
        self._named = named

    def now(
        self, buckets: list[list[str]], other_state: Mapping[str, Any], copies: Copies
    ) -> dict[str, Any]:
        """Return a copy of the whole state beside tensors.

        It includes the given `buckets` and the optimizer's `other_state` of all parameters.
        `copies` copies tensors inside objects.
        """
        states = {name: each.state_dict() for name, each in self._named.items()}
        exchange = {"buckets": buckets}
        optimizer = self.state.settings(other_state)
        held = {"optimizer": optimizer, "objects": states, "exchange": exchange}
        tensors = {f"objects/{at}": each for at, each in enumerate(tensors_in(held))}
        copied = copies(tensors)
        made: dict[str, Any] = copy.deepcopy(
            held, {id(each): copied[name] for name, each in tensors.items()}
        )
        return made

    def take(self, saved: Mapping[str, Any]) -> None:
        """Restore everything except the optimizer's state.

        Raises:
            ConfigMismatchError: the saved run had other objects.
        """
        for name, each in self._named.items():
            if name not in saved["objects"]:
                raise ConfigMismatchError(f"the checkpoint has no {name}")
            each.load_state_dict(saved["objects"][name])
        self.exchange.resume_buckets(saved["exchange"])
