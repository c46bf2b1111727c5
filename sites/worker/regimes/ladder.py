"""The regimes that a run goes over to while it trains, and back: one rank's part.

    sync      hooks hand gradients to all sites, in the backward pass
    delayed   hooks average inside the site; the sites' mean is applied one step later
    diloco    hooks average inside the site; how far parameters have moved crosses every H steps

In all of them what crosses are the buckets that all sites have agreed on. All ranks hear of a
change after the same step (exchange/member_history.py), and go over to it when that step has been
recorded, saved, and told. What a regime has under way or to itself has come to its end by then:

    from delayed   one more step, which waits: it applies the gradient under way and its own
    from diloco    a round has ended; the moments of the inner optimizer are averaged once; the
                   outer momentum is dropped
    to delayed     its first step has nothing to apply
    to diloco      parameters are the global ones; the outer momentum begins with zeros

A state that was saved in a lower regime has the gradient under way, or the outer optimizer's. Who
goes on from it in another regime does what the others would do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from isthmus.protos.errors import ScriptError
from isthmus.sites.worker.checks.refusals import scaler_refusal
from isthmus.sites.worker.exchange.collectives import Ranks
from isthmus.sites.worker.exchange.rounds import Landing, Round
from isthmus.sites.worker.exchange.run_regime import RunRegime
from isthmus.sites.worker.exchange.site_averages import BucketAverages
from isthmus.sites.worker.layouts.canonical import Agreed, GradientPlan
from isthmus.sites.worker.layouts.gradient_hook import GradientHook
from isthmus.sites.worker.regimes.delayed import GRADIENT
from isthmus.sites.worker.regimes.loop import Attached, RegimeLoop
from isthmus.topology.spec.regime import Regime, Rung, regime_of

if TYPE_CHECKING:
    from isthmus.sites.checkpoint.training_state import Forms, Tensors


class Ladder(RegimeLoop):
    """A loop that hands over to that of the present regime. For the training thread."""

    def __init__(
        self,
        attached: Attached,
        regime: RunRegime,
        *,
        across: BucketAverages,
        inside: BucketAverages,
        plan_inside: tuple[Agreed, GradientPlan],
        make_loop: Callable[[Regime], RegimeLoop],
        is_any: Callable[[bool], bool],
        begun: Callable[[Regime], None],
    ) -> None:
        """Know no buckets yet: `agree` comes next, and `begin`.

        Args:
            attached: what is trained; its hook hands gradients over to all sites in sync.
            regime: of the run; changed here.
            across: averages gradients over all sites.
            inside: averages them over this one.
            plan_inside: by what buckets.
            make_loop: begins the loop of a regime.
            is_any: returns whether something is so at any rank of any site: a collective of all.
            begun: called when another regime has begun.
        """
        super().__init__()
        hook = self._hook = attached.hook
        self._buckets, self._regime = attached.buckets, regime
        self._averages = (across, inside)
        self._plans: list[tuple[Agreed, GradientPlan] | None] = [None, plan_inside]
        """How gradients cross in sync, which the others may yet have to tell; and inside the
        site."""
        self._make_loop, self._is_any, self._begun = make_loop, is_any, begun
        self._warn = attached.warn
        self._loop = RegimeLoop()
        self._is_ending = False
        """One more step of the present loop is needed for that."""
        self._why_not = ""
        """Why the run can have no other regime than sync; empty: it can."""
        self.own: Mapping[str, torch.Tensor] = hook.own
        self.twins = hook.twins
        self.is_lone = hook.is_lone
        self.data_ranks: Ranks = hook.data_ranks

    # ---------------------------------------------------------------- how gradients cross

    def agree(self, agreed: Agreed, plan: GradientPlan) -> Set[Ranks]:
        """Prepare for the buckets that all sites have agreed on: as `AgreedHook.agree`."""
        self._plans[0] = agreed, plan
        groups = self._buckets.agree(agreed, plan)
        self._prepare()
        return groups

    def shard_in(self, tensors: Sequence[torch.Tensor]) -> str | None:
        """Return the parameter of which one of these is a shard, or of whose gradient."""
        return self._hook.shard_in(tensors)

    def _prepare(self) -> None:
        """Have the hook hand gradients to whom the present loop wants."""
        place = int(self._loop.stays_inside)
        plan = self._plans[place]
        self._hook.average_by(self._averages[place])
        if plan is not None:  # else the others' state tells it
            self._hook.agree(*plan)

    # ---------------------------------------------------------------- changes

    def hear(self, rung: Rung) -> None:
        """Go over to a regime when this step has ended. From all ranks of all sites.

        Where one of them cannot, the run goes back to sync.
        """
        wanted = self._regime.at(rung)
        if not wanted.is_sync and self._is_any(bool(self._why_not)):
            self.stay("another site cannot go over to it")
            wanted = regime_of("sync")
        self._regime.wanted = wanted

    def begin(self) -> None:
        """Begin in the run's regime: something else may have been attached in another than sync."""
        if not (self._regime.now.is_sync and self._regime.wanted.is_sync):
            self._go_over(self._regime.wanted)

    def begin_at(self, rung: Rung) -> None:
        """Begin in the regime that the others have, between two steps."""
        self._regime.wanted = self._regime.at(rung)
        self._go_over(self._regime.wanted)

    def stay(self, why: str) -> None:
        """Have the run keep sync, or go back to it: another regime would not do what is right."""
        if not self._why_not:
            self._why_not = why
            self._warn(f"the regime stays sync: {why}")

    @property
    def rung(self) -> int | None:
        """The place of the present regime among those that the run may have; None: it has one."""
        return None if self._why_not else self._regime.place

    def meet_scaler(self) -> None:
        """Keep sync, for a GradScaler scales.

        Raises:
            ScriptError: the run has another regime by now.
        """
        if self._loop.stays_inside:
            raise ScriptError(scaler_refusal(self._regime.now.kind))
        self.stay("a GradScaler leaves out steps at one site and not at another")

    def _go_over(self, regime: Regime) -> None:
        self._loop.close()
        was_inside, self._regime.now, self._is_ending = self._loop.stays_inside, regime, False
        self._loop = RegimeLoop() if regime.is_sync else self._make_loop(regime)
        self._loop.note_clipping(self.max_norm)
        if was_inside != self._loop.stays_inside:
            self._move_watcher()
            self._prepare()
        self._begun(regime)

    def _move_watcher(self) -> None:
        """Have what waits for gradients be told of those that the hook hands over from now on."""
        across, inside = self._averages
        waiting = across.before_gradients, inside.before_gradients
        inside.before_gradients, across.before_gradients = waiting

    # ---------------------------------------------------------------- a loop

    def note_clipping(self, max_norm: float) -> None:
        """Note to which norm the script clips gradients."""
        super().note_clipping(max_norm)
        self._loop.note_clipping(max_norm)

    def before_end(self, step: int) -> Landing | None:
        """Do what belongs to a step that an optimizer has just taken."""
        return self._loop.before_end(step)

    def after_end(self) -> None:
        """Do what is due between two steps; go over to another regime."""
        self._loop.after_end()
        if self._is_ending or self._regime.wanted != self._regime.now:
            self._is_ending = self._loop.begin_end()
            if not self._is_ending:
                self._go_over(self._regime.wanted)

    def make_common(self, *, crosses: bool = True) -> bool:
        """Have the same state at all sites after this step, for it is to be written."""
        return self._loop.make_common(crosses=crosses)

    def finish(self) -> None:
        """Wait for what is under way, at the end of a run."""
        self._loop.finish()

    def global_parameters(self) -> AbstractContextManager[None]:
        """Return a context in which parameters hold what all sites have."""
        return self._loop.global_parameters()

    def norm(self, hook: GradientHook) -> float:
        """Return the 2-norm of the gradient in `p.grad`; 0: there is none."""
        return self._loop.norm(hook)

    def take_rounds(self) -> list[Round]:
        """Return the rounds over sites that have landed since the last call."""
        return self._loop.take_rounds()

    def close(self) -> None:
        """Finish between two steps, for something else is attached from now on."""
        self._loop.close()
        if self._loop.stays_inside:
            self._move_watcher()

    # ---------------------------------------------------------------- state

    def tensors(self) -> Tensors:
        """Return what all sites have beside model and optimizer: references."""
        return self._loop.tensors()

    def to_load(self, stored: Forms) -> Tensors:
        """Return tensors to load what was stored into, of what this rank has a part of.

        A gradient that was under way is applied, whatever the regime is from now on.
        """
        if self._regime.now.kind != "delayed" and any(path.startswith(GRADIENT) for path in stored):
            self._go_over(regime_of("delayed"))
        return self._loop.to_load(stored)

    def take(self, tensors: Tensors) -> None:
        """Go on from what was loaded."""
        self._loop.take(tensors)
        self._is_ending = self._regime.wanted != self._regime.now and self._loop.begin_end()
