"""The regime in which a rank trains: whether it may change, and the loop that belongs to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from isthmus.protos import metrics
from isthmus.sites.worker.api.averaging import Averaging
from isthmus.sites.worker.api.rank import Rank
from isthmus.sites.worker.checks.refusals import refuse_scaler, scaler_refusal, watch_scaler
from isthmus.sites.worker.exchange.rounds import Round
from isthmus.sites.worker.exchange.site_averages import BucketAverages
from isthmus.sites.worker.layouts.agreed_hook import AgreedHook, AgreedTensors
from isthmus.sites.worker.layouts.layout_agreement import LayoutAgreement
from isthmus.sites.worker.regimes.delayed import Delayed
from isthmus.sites.worker.regimes.ladder import Ladder
from isthmus.sites.worker.regimes.local_steps import LocalSteps
from isthmus.sites.worker.regimes.loop import Attached, RegimeLoop
from isthmus.sites.worker.regimes.open_steps import OpenSteps
from isthmus.sites.worker.regimes.outer_buckets import OuterBuckets
from isthmus.sites.worker.regimes.permitted import check_open, why_only_sync
from isthmus.sites.worker.regimes.streaming import Streaming
from isthmus.topology.spec.regime import Regime, Rung

MakeLoop = Callable[[Regime], RegimeLoop]


class Regimes:
    """One rank's part in the regimes of a run. For the training thread."""

    def __init__(self, rank: Rank, averaging: Averaging) -> None:
        """Begin in sync, as long as nothing is attached."""
        self._context, self._members = rank.context, rank.members
        self._steps, self._numbers, self._records = rank.steps, rank.numbers, rank.records
        self._averaging, self._regime = averaging, rank.regime
        self.loop = RegimeLoop()
        """That of the present regime."""
        self._ladder: Ladder | None = None
        """The same loop, where the regime may change; None: it stays as it is."""
        self._make_loop: MakeLoop | None = None
        """Makes the loop of a regime that stays as it is; None: there is none to be made."""
        rank.steps.before_end = lambda step: self.loop.before_end(step)
        rank.steps.after_end = lambda: self.loop.after_end()

    # ---------------------------------------------------------------- what others ask

    @property
    def now(self) -> Regime:
        """The regime of the next step."""
        return self._regime.now

    @property
    def gradient_averages(self) -> BucketAverages:
        """What averages gradients as they come: over all sites, or inside this one."""
        averaging = self._averaging
        return averaging.pipeline if self.now.is_sync else averaging.site_averages

    def values(self) -> dict[str, float]:
        """Return what a step's record has of the regime in which it was taken."""
        rung = None if self._ladder is None else self._ladder.rung
        return {} if rung is None else {metrics.RUNG: float(rung)}

    def global_parameters(self) -> AbstractContextManager[None]:
        """Return a context in which parameters are all sites': `Site.global_parameters`."""
        return self.loop.global_parameters()

    def take_rounds(self, own: Sequence[Round]) -> list[Round]:
        """Return the rounds by which a step has trained, given those of its gradients."""
        landed, landing = self.loop.take_rounds(), self._steps.landing
        if self._ladder is not None and len(own) > 1:
            self._ladder.stay("two backward passes have synchronised in one step")
        is_lost = landing is not None and landing.is_passed_over
        return landed if is_lost else [*own, *landed]

    def finish(self) -> None:
        """Wait for what still crosses, at the end of a run."""
        self.loop.finish()

    # ---------------------------------------------------------------- whether it may change

    def may_change(
        self, optimizers: Sequence[Optimizer], replicas: Sequence[DistributedDataParallel]
    ) -> bool:
        """Whether the run may go over to other regimes while it goes on; if not, say why once."""
        if not self._regime.may_change:
            return False
        why = why_only_sync(optimizers, replicas)
        is_any = not self._members.awaits_state and self._is_any(bool(why))
        if why or is_any:
            self._warn(f"the regime stays sync: {why or 'another site can have no other'}")
            self._regime.stay()
            self._note(self.now)
        return not (why or is_any)

    def _is_any(self, is_here: bool) -> bool:
        """Return whether `is_here` holds at any rank of any site: a collective of all."""
        return bool(self._averaging.largest(int(is_here), limit=1))

    def change(self, rung: Rung) -> None:
        """Go over to another regime once this step has ended: from all ranks of all sites."""
        if self._ladder is not None:
            self._ladder.hear(rung)

    def begin_at(self, rung: Rung) -> None:
        """Begin in the regime that the other sites have."""
        if self._ladder is not None:
            self._ladder.begin_at(rung)

    # ---------------------------------------------------------------- what is attached

    def prepare(
        self,
        hook: AgreedHook,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        *,
        may_change: bool,
    ) -> AgreedTensors:
        """Return what is to cross in the buckets that all sites agree on. Then call `begin`."""
        if self.now.is_sync and not may_change:
            return hook
        averaging, context = self._averaging, self._context
        inside = LayoutAgreement(
            hook, averaging.site_collectives, context, averaging.exactness, is_own=True
        )
        inside.adopt([inside.tensors.to_bytes()])
        assert inside.plan is not None, "it was adopted"
        buckets = OuterBuckets(
            averaging.pipeline,
            hook,
            averaging.site_collectives,
            context.device,
            site=context.index,
            num_sites=context.num_sites,
        )
        attached = Attached(
            hook=hook,
            buckets=buckets,
            models=models,
            optimizers=optimizers,
            counts=lambda: not self._members.is_catching_up,
            num_sites=self._num_sites,
            warn=self._warn,
        )
        make_loop: MakeLoop = partial(self._loop_of, attached)
        if not may_change:
            self._make_loop = make_loop
            return buckets
        self.loop = self._ladder = Ladder(
            attached,
            self._regime,
            across=averaging.pipeline,
            inside=averaging.site_averages,
            plan_inside=inside.plan,
            make_loop=make_loop,
            is_any=self._is_any,
            begun=self._note,
        )
        return self._ladder

    def begin(self, optimizers: Sequence[Optimizer]) -> list[Callable[[], None]]:
        """Begin in the run's regime, once the buckets are agreed on; return what ends that."""
        undo: list[Callable[[], None]] = []
        if self._ladder is not None:
            undo.append(watch_scaler(optimizers, self._ladder.meet_scaler))
            self._ladder.begin()
        elif self._make_loop is not None:
            undo.append(refuse_scaler(optimizers, scaler_refusal(self.now.kind)))
            self.loop = self._make_loop(self.now)
            self._note(self.now)
        return [*undo, self.loop.close]

    def end(self) -> None:
        """Forget what was attached."""
        self.loop, self._ladder, self._make_loop = RegimeLoop(), None, None

    # ---------------------------------------------------------------- a loop

    def _loop_of(self, attached: Attached, regime: Regime) -> RegimeLoop:
        """Have averages cross as the regime says."""
        averaging = self._averaging
        if not regime.is_local:
            return Delayed(
                attached,
                looks=regime.look,
                copy_state=lambda: averaging.site_averages.before_gradients(),
                note_last=averaging.missing_sites.end_delay,
            )
        if regime.kind == "streaming":
            return Streaming(attached, regime)
        if not regime.is_open:
            return LocalSteps(attached, regime)
        check_open(self._context)
        return OpenSteps(
            attached,
            regime,
            link=averaging.link,
            missing_sites=averaging.missing_sites,
            gives_numbers=lambda: self._numbers.are_used,
            deadline_s=averaging.deadline_s,
            tell=self._tell,
        )

    def _note(self, regime: Regime) -> None:
        """Tell whoever counts by the regime that another one begins."""
        is_delayed = regime.kind == "delayed"
        self._averaging.missing_sites.delay_steps = 1 if is_delayed else regime.delay
        self._steps.verify_every = self._context.welcome.verify_every * regime.sync_every

    def _num_sites(self, ahead: int) -> int:
        """Return how many sites take part so many steps after the next one, alike at all ranks."""
        return self._context.num_sites - len(self._averaging.missing_sites.gone(ahead=ahead))

    # ---------------------------------------------------------------- people

    def warn_without_attach(self) -> None:
        """Tell people that the run has one regime, if the job permits others."""
        if self._regime.may_change:
            self._warn(
                "the regime stays sync: another one needs site.attach(model, optimizer) in place "
                "of site.average_gradients"
            )

    def _warn(self, reason: str) -> None:
        """Tell people something, which all sites would say alike."""
        if self._context.index == 0:
            self._tell(reason)

    def _tell(self, reason: str) -> None:
        """Tell people something of this site, from its first rank."""
        if self._context.rank == 0:
            self._records.record_problem(metrics.TROUBLE, self._steps.num_steps, reason)
