"""The regimes `local_sgd` and `diloco`: sites take steps of their own, and then meet.

Each site takes H steps with the script's optimizer, by gradients of its own data. At the end of
the H-th one, before the step is recorded, all sites exchange how far their parameters have moved
from where they began: the pseudo-gradient. Its mean, weighted by the sites' tokens, is what the
outer optimizer steps by. Its result, the global parameters, is what every site goes on from, with
the same bits:

    backward          the site's own mean gradient is in `p.grad`, as the hooks leave it
    the script        clips, calls optimizer.step()
    each H-th step    send (G - theta) tokens; wait; G and M by the outer step; theta := G

Training waits for the round. Gradients and their norms are the site's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from isthmus.protos.errors import ScriptError
from isthmus.sites.worker.checks.use_watch import UseWatch
from isthmus.sites.worker.exchange.rounds import Landing
from isthmus.sites.worker.exchange.sharding import local_of
from isthmus.sites.worker.layouts.gradient_hook import GradientHook
from isthmus.sites.worker.regimes.global_state import GlobalState
from isthmus.sites.worker.regimes.inner_moments import average_moments
from isthmus.sites.worker.regimes.loop import Attached, RegimeLoop
from isthmus.sites.worker.regimes.outer_buckets import written
from isthmus.sites.worker.regimes.outer_shard import OuterShard, Rates
from isthmus.topology.spec.regime import Regime

if TYPE_CHECKING:
    from isthmus.sites.checkpoint.training_state import Forms, Tensors


class LocalSteps(RegimeLoop):
    """One rank's part. For the training thread.

    Its state is a `GlobalState`, which is written after steps with which a round ends. At these the
    moments of the inner optimizer are averaged over the sites, too, so that there is one state of
    all.
    """

    stays_inside = True

    def __init__(self, attached: Attached, regime: Regime) -> None:
        """Count the tokens of what the hook averages inside the site.

        Args:
            attached: what is trained; the optimizers are the inner ones.
            regime: a local kind.
        """
        super().__init__()
        hook = self._hook = attached.hook
        buckets = self._buckets = attached.buckets
        self._regime = regime
        self._num_sites = attached.num_sites
        self._counts = attached.counts
        self._trained = hook.trained
        self._state = GlobalState(buckets, self._trained, has_momentum=regime.full_momentum > 0)
        self._tokens = [0.0] * regime.fragments
        """This rank's tokens since each fragment was last in a round."""
        self._latest_tokens = 0.0
        """This rank's tokens in the latest round."""
        self._step = 0
        """The latest one."""
        self._has_moved = False
        """Parameters are the site's own: the latest step was none with which a round ends."""
        self._is_away = False
        """Parameters hold the global ones for a while, amid a round."""
        self._squares: torch.Tensor | None = None
        """Sum of squares of the site's gradient."""
        self._unfit_step: torch.Tensor | None = None
        """The first step of the round whose gradient of the site was not finite, on its device; 0:
        none was."""
        hook.after_gradients = self._note_gradients
        self._optimizers = attached.optimizers
        self._is_over = False
        """The step has ended for which there were gradients last."""
        self._undo = [
            each.register_step_pre_hook(self._before_step).remove for each in self._optimizers
        ]
        self._undo.append(UseWatch(attached.models, self._own_since, attached.warn).close)

    # ---------------------------------------------------------------- what others ask

    def begin_end(self) -> bool:
        """Have the same state at all sites, the inner optimizer's, too: a round has just ended."""
        self.make_common()
        return False

    def close(self) -> None:
        """End it between two steps, the same ones at all sites: steps of their own count."""
        if self._has_moved and self._buckets.can_wait:
            self._meet()
        for each in self._undo:
            each()
        self._hook.after_gradients = None

    @contextmanager
    def global_parameters(self) -> Iterator[None]:
        """Have parameters hold the global ones. A collective of the site, unless they do."""
        if not self._has_moved or self._is_away:
            yield
            return
        kept = {name: local_of(each).to("cpu", copy=True) for name, each in self._trained.items()}
        self._is_away = True
        with written(self._trained) as flats:
            self._state.give(flats)
        try:
            yield
        finally:
            self._is_away = False
            for name, each in kept.items():
                local_of(self._trained[name]).copy_(each)

    def _own_since(self) -> str:
        """Return since when parameters are the site's own; empty: they are the global ones."""
        if not self._has_moved or self._is_away:
            return ""
        return f"regime {self._regime.kind}: after step {self._step}"

    def norm(self, hook: GradientHook) -> float:
        """Return the 2-norm of the gradient in `p.grad`, the site's own."""
        del hook  # it has had each rank's
        return 0.0 if self._squares is None else math.sqrt(float(self._squares))

    # ---------------------------------------------------------------- a step

    def _note_gradients(self) -> None:
        assert self._hook.latest is not None, "a round has just ended"
        self._is_over = False
        if not self._state.shards:
            self._begin()  # before a script perturbs parameters and puts them back, rounded
        grads = {name: each.grad for name, each in self._trained.items()}
        self._squares = self._buckets.site_squares(
            {name: local_of(each) for name, each in grads.items() if each is not None}
        )
        if self._counts():
            self._tokens = [each + self._hook.latest.tokens for each in self._tokens]

    def _before_step(self, *_: object) -> None:
        """Note what the first step begins with.

        Raises:
            ScriptError: parameters are put back later, or an optimizer steps after the last one.
        """
        if self._is_away:
            raise ScriptError(
                "site.global_parameters: the optimizer steps inside it, and parameters are put "
                "back at its end: step outside"
            )
        if self._is_over and len(self._optimizers) > 1:
            raise ScriptError(
                f"regime {self._regime.kind}: a step ends with the optimizer that site.attach was "
                "given last, and another one has stepped after it: give them in the order in which "
                "they step"
            )
        if not self._state.shards:
            self._begin()

    def _begin(self) -> None:
        """Take the parameters for the global ones, or what there is to go on from."""
        self._state.begin()

    def before_end(self, step: int) -> Landing | None:
        """Meet the other sites, if a round ends with this step."""
        self._note_step(step)
        if self._regime.lands_at(step):
            self._meet()
        return None

    def _note_step(self, step: int) -> None:
        self._step, self._has_moved, self._is_over = step, True, True
        self._state.forget()
        self._note_unfit(step)

    def _note_unfit(self, step: int) -> None:
        """Note the first step of a round whose gradient is not finite; on CUDA nothing waits."""
        if self._squares is None:
            return
        if self._unfit_step is None or (step - 1) % self._regime.sync_every == 0:
            self._unfit_step = torch.zeros_like(self._squares)
        is_first = ~self._squares.isfinite() & (self._unfit_step == 0.0)
        self._unfit_step = torch.where(is_first, float(step), self._unfit_step)

    def _since(self) -> str:
        """Return a clause that names the first step whose gradient was not finite; else empty."""
        step = 0 if self._unfit_step is None else int(self._unfit_step)
        return f"; the site's gradient was not finite first in step {step}" if step else ""

    def _meet(self) -> None:
        """Have parameters be the global ones, by a round of all sites."""
        self._set_rates(self._state.shards)
        self._latest_tokens = max(self._tokens)
        self._tokens = [0.0] * len(self._tokens)
        with written(self._trained) as flats:
            tokens, shards = self._latest_tokens, self._state.shards
            self._landed.append(self._buckets.exchange(tokens, flats, shards, self._since))
        self._has_moved = False

    def _set_rates(self, shards: Sequence[OuterShard]) -> None:
        """Have a round of these shards, which begins now, end with the outer step of this step."""
        rates = Rates(*self._regime.outer_rates(self._step, self._num_sites(0)))
        for each in shards:
            each.rates = rates

    # ---------------------------------------------------------------- state

    def make_common(self, *, crosses: bool = True) -> bool:
        """Have the same state at all sites after this step, if a round has ended with it.

        Averages the inner optimizer's moments over the sites, which do so after the same steps.
        One for which nothing crosses has those of the site that writes it. There is none in a
        script that has destroyed its process groups.
        """
        if self._state.is_noted:
            return True
        if self._has_moved or not self._state.shards or not self._buckets.can_wait:
            return False
        if crosses:
            average_moments(self._buckets, self._trained, self._optimizers, self._latest_tokens)
        self._state.note()
        return True

    def tensors(self) -> Tensors:
        """Return what all sites have beside the model, after `make_common`: references."""
        return self._state.tensors()

    def to_load(self, stored: Forms) -> Tensors:
        """Return tensors to load what was stored into, of what this rank has a part of."""
        return self._state.to_load(stored)

    def take(self, tensors: Tensors) -> None:
        """Go on from what was loaded; nothing: from the parameters."""
        self._state.take(tensors)
