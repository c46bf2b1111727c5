"""Has a model's passes compute at a guess: where its optimizers would arrive by given gradients.

Parameters hold the guess inside a forward pass with gradients, and inside a backward pass, and
nowhere else. Whatever a script does with them before, between and after, it sees what all sites
have alike. The guess is made in the first such pass, from what parameters and the optimizers'
settings are by then. A parameter that is changed after that is computed at as it is, until the next
gradients are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager

import torch

from isthmus.sites.worker.checks.backward_passes import watch_backward
from isthmus.sites.worker.checks.module_hooks import UntracedModuleHook
from isthmus.sites.worker.exchange.sharding import is_sharded, local_of
from isthmus.sites.worker.regimes.look_ahead import check_known, look_ahead, settings_of
from isthmus.sites.worker.regimes.loop import Attached


class Guesses:
    """One rank's guesses of its parameters. For the training thread."""

    def __init__(self, attached: Attached, copy_state: Callable[[], None]) -> None:
        """Watch all passes from now on.

        `copy_state` is called before a backward pass changes parameters.

        Raises:
            TypeError: nobody knows how to look ahead by one of the optimizers.
        """
        for optimizer in attached.optimizers:
            check_known(optimizer)
        self._hook = attached.hook
        """Is told where passes read other values than those before."""
        self._trained = attached.hook.trained
        self._names = {id(each): name for name, each in self._trained.items()}
        self._optimizers = attached.optimizers
        self._copy_state = copy_state
        self._places: dict[str, torch.Tensor] = {}
        """By which gradients to look ahead, then the guesses; in passes, what all sites have."""
        self._aims: set[str] = set()
        """Parameters whose guess is yet to be made."""
        self._scale = 1.0
        """By what the script's clipping multiplies these gradients."""
        self._made: dict[str, tuple[int, int]] = {}
        """Parameters whose guess is made, and their versions at that time."""
        self._num_passes = 0
        """Passes that go on, one inside another."""
        self._guessing_pass = 0
        """The one that has parameters hold the guess; 0: they do not."""
        self._is_computed = False
        """A forward pass has computed at the guess."""
        self._is_gathered = False
        """The latest forward pass did."""
        self._is_away = False
        """The script wants all passes to compute at what all sites have."""
        self._undo: list[Callable[[], None]] = []
        for model in attached.models:
            self._undo += [
                model.register_forward_pre_hook(
                    UntracedModuleHook(self._begin_forward), prepend=True
                ).remove,
                model.register_forward_hook(
                    UntracedModuleHook(self._end_pass), always_call=True
                ).remove,
            ]
        self._undo.append(watch_backward(self))

    def close(self) -> None:
        """Watch no pass any more."""
        for undo in self._undo:
            undo()

    @contextmanager
    def away(self) -> Iterator[None]:
        """Let passes in this context compute at all sites' parameters, not at a guess."""
        was_away, self._is_away = self._is_away, True
        try:
            yield
        finally:
            self._is_away = was_away

    # ---------------------------------------------------------------- a guess

    @torch.no_grad()
    def aim(self, gradients: Mapping[str, torch.Tensor], names: Set[str], scale: float) -> None:
        """Look ahead in the next pass by these gradients, of one dimension, times `scale`.

        Parameters that have none, which are not in `names`, stay where they are: an optimizer
        leaves them out.
        """
        self._aims, self._made, self._is_computed = set(), {}, False
        self._scale = scale
        for _, parameter, _ in settings_of(self._optimizers):
            name = self._names.get(id(parameter))
            if name is not None and name in names:
                value = local_of(parameter)
                if name not in self._places:
                    self._places[name] = torch.empty_like(value)
                self._places[name].copy_(gradients[name].view(value.shape))
                self._aims.add(name)

    @torch.no_grad()
    def _make(self) -> None:
        """Make the guesses that are to be made, from what parameters are now."""
        for optimizer, parameter, settings in settings_of(self._optimizers if self._aims else ()):
            name = self._names.get(id(parameter))
            if name is None or name not in self._aims:
                continue
            value, place = local_of(parameter), self._places[name]
            state = {
                key: local_of(each) if isinstance(each, torch.Tensor) else each
                for key, each in optimizer.state.get(parameter, {}).items()
            }
            gradient = place if self._scale == 1.0 else place * self._scale
            look_ahead(place, value, gradient, state, optimizer, settings)
            self._made[name] = _version(parameter)
        self._aims = set()

    # ---------------------------------------------------------------- a pass

    def _begin_forward(self, *_: object) -> None:
        """Have a forward pass compute at the guess, if it may be for gradients."""
        self._begin_pass(computes=torch.is_grad_enabled())
        if self._num_passes == 1 and self._is_gathered != bool(self._guessing_pass):
            self._is_gathered = bool(self._guessing_pass)
            self._hook.forget_gathered()
        self._is_computed = self._is_computed or bool(self._guessing_pass)

    def begin_backward(self) -> None:
        """Have a backward pass compute at the guess, if forward passes have: `PassWatcher`."""
        if self._is_computed and self._num_passes == 0:
            self._copy_state()
        self._begin_pass(computes=self._is_computed)
        if self._guessing_pass:
            self._hook.gather_after_changes()

    def end_backward(self, _: Exception | None) -> None:
        """Have parameters hold what all sites have: `PassWatcher`."""
        self._end_pass()

    def _begin_pass(self, *, computes: bool) -> None:
        self._num_passes += 1
        if not computes or self._guessing_pass or self._is_away:
            return
        self._make()
        for name, version in [*self._made.items()]:
            parameter, place = self._trained[name], self._places[name]
            # What has become another kind of tensor stays, for `KindCheck` to refuse.
            is_same_kind = (parameter.dtype, parameter.device) == (place.dtype, place.device)
            if _version(parameter) != version or not is_same_kind:
                del self._made[name]
        if self._made:
            self._guessing_pass = self._num_passes
            self._swap()

    def _end_pass(self, *_: object) -> None:
        """Have parameters hold what all sites have, as before the pass: also if that failed."""
        if self._guessing_pass == self._num_passes:
            self._guessing_pass = 0
            self._swap()
        self._num_passes -= 1

    @torch.no_grad()
    def _swap(self) -> None:
        """Exchange parameters with their guesses. Autograd does not see it, nor do versions.

        Memory changes hands where a parameter has its own; else values do, as of what fully_shard
        gathers from memory that it knows.
        """
        for name in self._made:
            parameter, place = self._trained[name], self._places[name]
            value = local_of(parameter).data
            if is_sharded(parameter) or value.untyped_storage().nbytes() != value.nbytes:
                exchange(value, place)
            else:
                parameter.data, self._places[name] = place, value


def _version(parameter: torch.Tensor) -> tuple[int, int]:
    """Return how often a parameter was changed, as a whole and this rank's part by itself."""
    return parameter._version, local_of(parameter)._version


def exchange(one: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange the values of two tensors."""
    before = one.clone()
    one.copy_(other)
    other.copy_(before)
