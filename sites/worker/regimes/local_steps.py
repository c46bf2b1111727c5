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
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from isthmus.protos.errors import ScriptError
from isthmus.sites.worker.checks.refusals import scaler_steps
from isthmus.sites.worker.exchange.rounds import Round, ShardWork
from isthmus.sites.worker.exchange.sharding import local_of
from isthmus.sites.worker.layouts.agreed_hook import AgreedHook
from isthmus.sites.worker.regimes.outer_buckets import OuterBuckets
from isthmus.sites.worker.regimes.outer_shard import OuterShard, Rates, Rounded, Taking
from isthmus.topology.spec.regime import Regime

if TYPE_CHECKING:
    from isthmus.sites.checkpoint.training_state import Forms, Tensors

_ROUNDED = (torch.bfloat16, torch.float16)
"""Dtypes that cannot hold a float32."""


class LocalSteps:
    """One rank's part. For the training thread."""

    def __init__(
        self,
        hook: AgreedHook,
        buckets: OuterBuckets,
        optimizer: Optimizer,
        regime: Regime,
        *,
        num_sites: Callable[[], int],
        counts: Callable[[], bool],
    ) -> None:
        """Count the tokens of what `hook` averages inside the site.

        Args:
            hook: averages gradients inside the site.
            buckets: what crosses.
            optimizer: the inner one.
            regime: a local kind.
            num_sites: returns how many sites take part, the same at all ranks.
            counts: whether this site takes part now; else it only gets results.
        """
        self._hook = hook
        self._buckets = buckets
        self._regime = regime
        self._num_sites = num_sites
        self._counts = counts
        self._trained = {
            name: each
            for name, each in hook.own.items()
            if isinstance(each, nn.Parameter) and each.requires_grad
        }
        self._shards: Sequence[OuterShard] = ()
        """Of each bucket; none before the first step."""
        self._tokens = 0.0
        """This rank's since the latest round."""
        self._landed: list[Round] = []
        self.max_norm = math.inf
        """Gradients are the site's own: nobody asks."""
        self._squares: torch.Tensor | None = None
        """Sum of squares of the site's gradient."""
        hook.after_gradients = self._note_gradients
        self._undo = [optimizer.register_step_pre_hook(self._before_step).remove]

    # ---------------------------------------------------------------- what others ask

    def finish(self) -> None:
        """Nothing is under way between two steps."""

    def close(self) -> None:
        """End it between two steps."""
        for each in self._undo:
            each()
        self._hook.after_gradients = None

    def norm(self) -> float:
        """Return the 2-norm of the gradient in `p.grad`, the site's own."""
        return 0.0 if self._squares is None else math.sqrt(float(self._squares))

    def take_rounds(self) -> list[Round]:
        """Return the rounds over sites that have landed since the last call."""
        landed, self._landed = self._landed, []
        return landed

    # ---------------------------------------------------------------- a step

    def _note_gradients(self) -> None:
        assert self._hook.latest is not None, "a round has just ended"
        grads = {name: each.grad for name, each in self._trained.items()}
        self._squares = self._buckets.site_squares(
            {name: local_of(each) for name, each in grads.items() if each is not None}
        )
        if self._counts():
            self._tokens += self._hook.latest.tokens

    def _before_step(self, *_: object) -> None:
        """Note what the first step begins with.

        Raises:
            ScriptError: a GradScaler may leave a step out at one site, and at another not.
        """
        if scaler_steps():
            raise ScriptError(
                f"regime {self._regime.kind}: a GradScaler leaves out steps at one site and not at "
                "another: train in bf16 without a scaler, or say `regime: sync`"
            )
        if not self._shards:
            self._begin()

    @torch.no_grad()
    def _begin(self) -> None:
        """Take the parameters for the global ones."""
        has_momentum = self._regime.full_momentum > 0.0
        self._shards = [
            OuterShard(
                each.route.shard_numel,
                [Rounded(*part) for part in each.dtypes() if part[2] in _ROUNDED],
                has_momentum=has_momentum,
            )
            for each in self._buckets.buckets
        ]
        flats = {name: _float_of(each) for name, each in self._trained.items()}
        self._buckets.pass_inside(flats, [Taking(each.parameters) for each in self._shards])

    def before_end(self, step: int) -> None:
        """Meet the other sites, if a round ends with this step."""
        if self._regime.lands_at(step):
            self._land(step)

    @torch.no_grad()
    def _land(self, step: int) -> None:
        """Have parameters be the global ones after a round of all sites."""
        rates = Rates(*self._regime.outer_rates(step, self._num_sites()))
        for each in self._shards:
            each.rates = rates
        tokens, self._tokens = self._tokens, 0.0
        flats = {name: local_of(each).contiguous() for name, each in self._trained.items()}
        flat = {name: each.view(-1) for name, each in flats.items()}
        work: Sequence[ShardWork] = self._shards
        self._landed.append(self._buckets.exchange(tokens, flat, work))
        for name, value in flats.items():
            local = local_of(self._trained[name])
            if local.data_ptr() != value.data_ptr():
                local.copy_(value)

    def after_end(self) -> None:
        """Nothing: the round was in the step."""

    # ---------------------------------------------------------------- state

    def make_common(self) -> None:
        """Refuse to write a state: it is not the same at all sites yet."""
        raise RuntimeError(f"regime {self._regime.kind}: its state is not saved yet")

    def tensors(self) -> Tensors:
        """Return none."""
        return {}

    def to_load(self, stored: Forms) -> Tensors:
        """Return none."""
        del stored
        return {}

    def take(self, tensors: Tensors) -> None:
        """Begin from the parameters."""
        del tensors


def _float_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements, flat; a copy in float32 of what that does not hold exactly."""
    flat = local_of(parameter).contiguous().view(-1)
    return flat.float() if flat.dtype == torch.float64 else flat
