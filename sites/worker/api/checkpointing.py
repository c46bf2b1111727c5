"""What `Site.checkpoint` sets up: saving, resuming, and the state for sites that rejoin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from isthmus.protos import metrics
from isthmus.protos.checkpoint.manifest import Manifest
from isthmus.protos.checkpoint.store import stores_of
from isthmus.sites.local.rank_messages import Moved, StateProgress
from isthmus.sites.worker.api.attachment import Attachment
from isthmus.sites.worker.api.averaging import Averaging
from isthmus.sites.worker.api.rank import Rank
from isthmus.sites.worker.api.records import Records
from isthmus.sites.worker.api.regimes import Regimes
from isthmus.sites.worker.api.rejoining import Rejoining
from isthmus.sites.worker.checks.arguments import check_optimizer
from isthmus.sites.worker.data.learning_rates import LearningRates
from isthmus.sites.worker.data.run_data import RunData
from isthmus.sites.worker.exchange.collectives import local_rank
from isthmus.sites.worker.exchange.gateway_link import Link
from isthmus.topology.spec.job import Checkpoint

if TYPE_CHECKING:
    from isthmus.sites.checkpoint.checkpoints import Checkpoints
    from isthmus.sites.checkpoint.entry_state import Entered, EntryState
    from isthmus.sites.checkpoint.exchange_state import ExchangeState
    from isthmus.sites.checkpoint.run_objects import RunObjects, Stateful


class Checkpointing:
    """Saves one rank's part of a run, and goes on from what was saved. For the training thread."""

    def __init__(
        self,
        rank: Rank,
        averaging: Averaging,
        regimes: Regimes,
        attachment: Attachment,
        data: RunData,
        rates: LearningRates,
        rejoining: Rejoining,
    ) -> None:
        """Save nothing yet."""
        self._context, self._link = rank.context, rank.link
        self._steps, self._records = rank.steps, rank.records
        self._averaging, self._regimes, self._attachment = averaging, regimes, attachment
        self._data, self._rates, self._rejoining = data, rates, rejoining
        self._entry: EntryState | None = None
        """The state for sites that rejoin."""
        self._checkpoints: Checkpoints | None = None
        """What the job has saved; None: it has no `checkpoint` section."""
        self._is_stale = False
        """A model was attached since the script called `checkpoint`."""
        self._hooks: list[RemovableHandle] = []
        """In the optimizers that are saved."""

    # ---------------------------------------------------------------- what a script calls

    def checkpoint(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        named: Mapping[str, Stateful],
    ) -> int:
        """Go on from what there is, and save from now on: `Site.checkpoint`.

        `named` are the scheduler and the extras, by name.
        """
        for each in optimizers:
            check_optimizer("site.checkpoint", each)
        objects = [*named.values()]
        more = [each for each in objects if isinstance(each, Optimizer)]
        watched = list(dict.fromkeys([*self._attachment.optimizers, *optimizers, *more]))
        self._check_all_saved([*optimizers, *objects])
        self._rates.hold(watched, objects, scales_new=self._is_stale)
        job = self._context.spec.job
        is_alone = self._context.num_sites == 1 and job.checkpoint is None
        if is_alone or self._context.exchange_is_off:
            return 0
        if not self._averaging.has_begun or (self._entry is not None and not self._is_stale):
            raise RuntimeError(
                "site.checkpoint: call it once, after site.attach or site.average_gradients, "
                "and again only where one of these was called again"
            )
        from isthmus.sites.checkpoint.run_objects import RunObjects
        from isthmus.sites.checkpoint.training_state import TrainingState

        is_split, loop = self._attachment.is_split, self._regimes.loop
        state = TrainingState(models, optimizers, is_split=is_split, outer=loop)
        run_objects = RunObjects(state, named, self._exchange_state())
        if self._entry is None:
            self._begin(run_objects, watched)
        else:
            self._entry.replace(run_objects)
            if self._checkpoints is not None:
                self._checkpoints.replace(run_objects)
            self._watch_saved(self._entry, watched)
            self._is_stale = False
        return self._steps.num_steps

    def _make_common(self, *, crosses: bool = True) -> bool:
        """Have the same state at all sites, for it is to be written; return whether it can be."""
        return self._regimes.loop.make_common(crosses=crosses)

    def _mean_step_s(self, own_s: float) -> float:
        """Return how long steps take on average, the same at all ranks; `own_s`: here."""
        landing = self._steps.landing
        return self._averaging.mean(own_s) if landing is None else landing.step_s

    def finish(self) -> None:
        """Save the last step, and return when all is written."""
        if self._checkpoints is not None:
            self._checkpoints.finish(self._steps.num_steps)
        if self._entry is not None:
            self._entry.close()

    # ---------------------------------------------------------------- what others call

    def before_change(self) -> None:
        """Have written what is due: something else is attached from now on."""
        if self._checkpoints is not None:
            self._checkpoints.flush()
        if self._entry is not None:
            self._entry.publish()
        self._is_stale = self._entry is not None

    def check_not_stale(self, _: int) -> None:
        """Refuse a step of a model that is not the one that is saved.

        Raises:
            RuntimeError: it was attached since `checkpoint` was called.
        """
        if self._is_stale:
            raise RuntimeError(
                "site.checkpoint: call it again where site.attach or site.average_gradients is "
                "called again, right after it: it would save the model of before"
            )

    def _before_gradients(self) -> None:
        """Copy what is to be saved."""
        if self._entry is not None:
            self._entry.publish()
        if self._checkpoints is not None:
            self._checkpoints.before_gradients()

    # ---------------------------------------------------------------- the first call

    def _begin(self, objects: RunObjects, watched: Sequence[Optimizer]) -> None:
        """Go on from what there is, and save from now on."""
        from isthmus.sites.checkpoint.entry_state import EntryState

        steps, settings = self._steps, self._context.spec.job.checkpoint
        lists, reports = self._attachment.lists, _StateReports(self._link, self._records)
        self._entry = entry = EntryState(objects, self._data.state_for_rejoining, lists, reports)
        if settings is not None:
            self._checkpoints = self._make_checkpoints(settings, objects)
        checkpoints = self._checkpoints
        self._rejoining.begin(
            entry, self._make_common, checkpoints.let_enter if checkpoints else lambda: None
        )
        self._watch_saved(entry, watched)
        if self._context.rank == 0:
            self._records.record(metrics.STATE, steps.num_steps, {})
        self._go_on(entry)
        self._regimes.gradient_averages.before_gradients = self._before_gradients
        self._averaging.pipeline.take_epoch = self._rejoining.take_epoch
        if checkpoints is not None:
            checkpoints.start(self._mean_step_s, steps.num_steps)
            steps.listen(checkpoints.after_step)

    def _go_on(self, entry: EntryState) -> None:
        """Load what there is to go on from: the others' state, or the job's checkpoint."""
        found: Entered | Manifest | None = None
        checkpoints, agreement = self._checkpoints, self._attachment.agreement
        if self._context.rejoins:
            adopt = None if agreement is None else agreement.adopt
            found = self._rejoining.take_state(entry, adopt)
        elif checkpoints is not None:
            found = checkpoints.resume()
        if found is None:
            return
        self._steps.resume(found.step)
        self._data.resume(
            found.data, checkpoints.restore_generators if checkpoints else lambda: None
        )

    def _make_checkpoints(self, settings: Checkpoint, objects: RunObjects) -> Checkpoints:
        from isthmus.sites.checkpoint.checkpoints import Checkpoints  # brings much of torch
        from isthmus.sites.checkpoint.place import Place

        context, welcome = self._context, self._context.welcome
        return Checkpoints(
            settings=settings,
            places=[
                Place(
                    store=store,
                    local=context.run_folder / "checkpoints" / context.site,
                    run=context.run,
                    job=context.spec.job.name,
                    generation=context.generation,
                    site=context.site,
                    rank=context.rank,
                    local_rank=local_rank(),
                    ranks=dict(zip(welcome.sites, welcome.ranks_per_site, strict=True)),
                    keep=settings.keep,
                )
                for store in stores_of(settings.to, context.run)
            ],
            device=context.device,
            objects=objects,
            data=self._data.state,
            missing_sites=self._link.missing_sites,
            make_common=self._make_common,
            landing=lambda: self._steps.landing,
            sync_every=lambda: self._regimes.now.sync_every,
            on_written=self._record_written,
            on_failed=partial(self._records.record_problem, metrics.CHECKPOINT_FAILED),
            on_store_failed=partial(self._records.record_problem, metrics.STORE_FAILED),
            on_stays=partial(self._records.record_problem, metrics.CHECKPOINT_STAYS),
            on_waiting=lambda: self._link.send(Moved()),
        )

    def _record_written(self, step: int, write_s: float, num_bytes: int, stall_s: float) -> None:
        values = {
            metrics.WRITE_S: write_s,
            metrics.STALL_S: stall_s,
            metrics.CHECKPOINT_BYTES: num_bytes,
        }
        self._records.record(metrics.CHECKPOINT, step, values)

    # ---------------------------------------------------------------- every call

    def _exchange_state(self) -> ExchangeState:
        from isthmus.sites.checkpoint.exchange_state import ExchangeState

        context, attached = self._context, self._attachment
        has_residuals = context.num_sites > 1 and context.spec.job.exchange.error_feedback
        return ExchangeState(
            self._link if has_residuals else None,
            self._averaging.encoder,
            attached.replica_hook,
            attached.agreement,
        )

    def _watch_saved(self, entry: EntryState, optimizers: Sequence[Optimizer]) -> None:
        """Have what is to be saved copied before one of these optimizers steps, and no other."""
        for handle in self._hooks:
            handle.remove()
        self._hooks = []
        if self._checkpoints is not None:
            self._hooks += self._checkpoints.watch(optimizers)
        publish = entry.publish
        self._hooks += [each.register_step_pre_hook(lambda *_: publish()) for each in optimizers]

    def _check_all_saved(self, objects: Sequence[object]) -> None:
        """Refuse to save a run of which a part would be lost.

        Raises:
            TypeError: an optimizer that steps in it would begin anew.
        """
        saved = {id(each) for each in objects}
        for index, each in enumerate(self._attachment.optimizers):
            if id(each) not in saved:
                raise TypeError(
                    f"site.checkpoint: optimizer {index} of site.attach would not be saved: "
                    "name all of them, as site.checkpoint([a, b], [optimizer_a, optimizer_b])"
                )


class _StateReports:
    """Tells the gateway how writing a state for others goes, and people that it failed."""

    def __init__(self, link: Link, records: Records) -> None:
        self._link = link
        self._records = records

    def progress(self, epoch: int, done_bytes: int, problem: str = "") -> None:
        self._link.send(StateProgress(epoch=epoch, done_bytes=done_bytes, problem=problem))

    def failed(self, step: int, reason: str) -> None:
        self._records.record_problem(metrics.STATE_FAILED, step, reason)

    def waiting(self) -> None:
        self._link.send(Moved())
