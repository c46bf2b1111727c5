"""A run's checkpoints as one rank sees them: what `Site.checkpoint` sets up.

A checkpoint of step N is what step N + 1 begins with: all that a script does after a step belongs
to it, a scheduler, an average of weights, weights that are clamped, or swapped for an evaluation
and swapped back. So tensors are copied as the next gradients begin to cross. No forward pass is
under way then, nothing else changes weights while a script computes gradients, and the copy is
made before anything may. Buffers and generators, which a forward pass changes, are copied when the
step has ended.

Of several optimizers, those that step after the counted one and before the next step belong to the
same step. The next step begins with the optimizer that was the first of all to step, and in any
case with the counted one. Which optimizer gradients are for shows only as it steps: so a copy is
made anew where another one of the same step was due.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from isthmus.protos.checkpoint.manifest import Manifest
from isthmus.protos.failure import reason_of
from isthmus.sites.checkpoint.exchange_state import ExchangeState
from isthmus.sites.checkpoint.interval import Interval
from isthmus.sites.checkpoint.own_state import generator_states, restore_generators
from isthmus.sites.checkpoint.place import Place, asked_path
from isthmus.sites.checkpoint.reader import CheckpointReader
from isthmus.sites.checkpoint.request_watch import RequestWatch
from isthmus.sites.checkpoint.run_objects import RunObjects
from isthmus.sites.checkpoint.staging import Staging
from isthmus.sites.checkpoint.training_state import Tensors, TrainingState
from isthmus.sites.checkpoint.writer import CheckpointWriter, Snapshot
from isthmus.sites.worker.exchange.missing_sites import MissingSites
from isthmus.topology.spec.job import Checkpoint


@dataclass(slots=True, kw_only=True)
class _Due:
    """The checkpoint of a step that has ended, until the next one begins."""

    step: int
    publishes: bool
    """This site writes what all have."""
    generators: dict[str, Any] = field(default_factory=dict)
    parameters: Tensors = field(default_factory=dict)
    """The very ones, which do not change their places while a step goes on."""
    buffers: Tensors = field(default_factory=dict)
    """Copies."""
    residuals: list[Path] = field(default_factory=list)
    """Files that the gateway was asked for; the last one counts."""
    snapshot: Snapshot | None = None
    """None: there is no copy, or one from before another optimizer's step."""
    problem: str = ""


class Checkpoints:
    """Saves after steps and resumes. For the training thread; a collective of the site to make."""

    def __init__(
        self,
        *,
        settings: Checkpoint,
        place: Place,
        device: torch.device,
        state: TrainingState,
        objects: RunObjects,
        data: Callable[[], dict[str, Any]],
        exchange: ExchangeState,
        missing_sites: MissingSites,
        on_written: Callable[[int, float, int, float], None],
        on_failed: Callable[[int, str], None],
        on_stays: Callable[[int, str], None],
        on_waiting: Callable[[], None],
    ) -> None:
        """Look at what is to be saved.

        Args:
            settings: of the job.
            place: who writes, and where to.
            device: this rank's.
            state: model and optimizer.
            objects: what is saved beside them.
            data: returns what the manifest has of the run's data.
            exchange: what it carries from one round to the next.
            missing_sites: which sites take part.
            on_written: told step, seconds, bytes, and how many seconds training has waited; from
                a thread, where the checkpoint is published.
            on_failed: told step and reason, from a thread, where this rank could not write.
            on_stays: told step and reason, from a thread, where one beyond the newest could not be
                removed.
            on_waiting: told every second that training waits for the checkpoint before.
        """
        self._settings = settings
        self._place = place
        self._device = device
        self._state = state
        self._objects = objects
        self._data = data
        self._exchange = exchange
        self._missing_sites = missing_sites
        self._stall_s = 0.0
        self._on_written = on_written
        self._staging = Staging(device)
        self._writer = CheckpointWriter(
            place,
            self._staging.wait,
            self._tell_written,
            on_failed,
            on_stays,
            on_waiting,
            self._absent,
        )
        self._interval: Interval | None = None
        self._watch: RequestWatch | None = None
        self._last_step = 0
        self._due: _Due | None = None
        self._counted: torch.optim.Optimizer | None = None
        self._first: torch.optim.Optimizer | None = None
        """Which optimizer was the first to step."""
        self._own: dict[str, Any] | None = None
        self._counts_anew = False

    def resume(self) -> Manifest | None:
        """Load what the job says to go on from; None: it says nothing.

        A collective of the site.

        Raises:
            BadCheckpointError: it is damaged.
            ConfigMismatchError: it is of another model, or has other objects.
        """
        if self._settings.resume is None:
            return None
        reader = CheckpointReader(self._settings.resume)
        manifest = reader.verified()
        self._objects.take(reader.load(self._state))
        self._own = reader.own(manifest, self._place)
        self.restore_generators()
        # Chunks are cut for all sites, those included that took no part.
        if self._own is not None and self._own.get("ranks", manifest.ranks) == self._place.ranks:
            self._exchange.resume(self._own["exchange"], reader.residuals(manifest, self._place))
        self._last_step = manifest.step
        return manifest

    def restore_generators(self) -> None:
        """Put the global generators into the states that this rank had, if it was there."""
        if self._own is not None:
            restore_generators(self._own["generators"], self._device)

    def start(self, agree: Callable[[float], float], step: int) -> None:
        """Begin to count the interval after `step`.

        `agree` returns the mean of a number over all ranks.
        """
        self._agree, self._last_step = agree, step
        self._interval = Interval(self._settings, step, agree)
        self._watch = RequestWatch(self._place.store)

    def watch(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[RemovableHandle]:
        """Save what they have made of the model. The first one's steps are the run's.

        Returns what takes the hooks off.
        """
        self._counted, self._first = optimizers[0], None
        return [
            *(each.register_step_pre_hook(self._before_step) for each in optimizers),
            *(each.register_step_post_hook(self._after_any_step) for each in optimizers),
        ]

    def flush(self) -> None:
        """Have what is due written now, for the model may become another one before the next step.

        What has been done to it by now stays out, but for values of parameters that were there.
        """
        self.before_gradients()
        self._save()

    def replace(self, state: TrainingState, objects: RunObjects, exchange: ExchangeState) -> None:
        """Save these from now on, after `flush`."""
        self._state, self._objects, self._exchange = state, objects, exchange

    def let_enter(self) -> None:
        """Sites enter with the next step: count the interval anew after this one, as they do."""
        self._counts_anew = True

    def after_step(self, step: int) -> None:
        """Note whether it is time to save, or asked for. After each counted step, in order."""
        assert self._interval is not None, "started"
        assert self._watch is not None, "started"
        if self._interval.is_due(step) or step == self._watch.step:
            self._begin(step)
        if self._counts_anew:
            self._counts_anew = False
            self._interval = Interval(self._settings, step, self._agree)

    def before_gradients(self) -> None:
        """Copy what is to be saved, if anything is: the gradients of a next step begin to cross."""
        if self._due is not None and self._due.snapshot is None:
            self._copy(self._due)

    def finish(self, step: int) -> None:
        """Save the last step unless it was, and return when all is written."""
        if self._watch is not None:
            self._watch.close()
        if step != self._last_step:
            self._begin(step)
        self._save()
        self._writer.wait()

    def _tell_written(self, step: int, write_s: float, num_bytes: int) -> None:
        self._on_written(step, write_s, num_bytes, self._stall_s)

    def _begin(self, step: int) -> None:
        begin_s = time.monotonic()
        self._last_step = step
        sites = list(self._place.ranks)
        gone = {sites[each] for each in self._missing_sites.gone()}
        if self._place.site in self._absent():
            return  # it catches up, and comes to this step long after the others
        self._writer.wait()  # the copies are written from where the next ones come to lie
        publishes = self._place.site == next(site for site in sites if site not in gone)
        self._due = _Due(step=step, publishes=publishes)
        self._note_end(self._due)
        self._stall_s = time.monotonic() - begin_s

    def _note_end(self, due: _Due) -> None:
        """Take note of what a step leaves that the next forward pass changes, or puts elsewhere."""
        due.snapshot = None
        due.generators = generator_states(self._device)
        if not due.publishes:
            return
        try:
            self._state.refresh()
            tensors = self._state.model_tensors()
            due.parameters = {
                path: each for path, each in tensors.items() if self._state.is_common(path)
            }
            due.buffers = self._staging.copies(
                {path: each for path, each in tensors.items() if path not in due.parameters}
            )
        except Exception as error:  # noqa: BLE001 - told to all ranks: training goes on without
            due.problem = reason_of(error)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._first is None:
            self._first = optimizer
        if self._due is None:
            return
        if optimizer is self._first or optimizer is self._counted:
            self._save()
        else:  # this step is not the next one's first, but of the same one
            self._due.snapshot = None

    def _after_any_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._due is not None and optimizer is not self._counted:
            self._note_end(self._due)

    def _copy(self, due: _Due) -> None:
        """Copy all that is to be saved, now."""
        begin_s = time.monotonic()
        due.residuals.append(
            self._place.staging(due.step) / asked_path(self._place, len(due.residuals))
        )
        snapshot = due.snapshot = Snapshot(
            step=due.step,
            publishes=due.publishes,
            residuals=[*due.residuals] if self._exchange.has_residuals else [],
            absent=self._absent(),
            problem=due.problem,
        )
        try:
            exchange = self._exchange.save(due.residuals[-1])
            snapshot.own = {
                "generators": due.generators,
                "exchange": exchange,
                "ranks": dict(self._place.ranks),
            }
            if due.publishes:
                live = due.parameters | self._state.optimizer_tensors()
                self._state.check_forms(live)
                snapshot.tensors = due.buffers | self._staging.copies(live)
                snapshot.other_state = self._state.other_state()
            snapshot.objects = self._objects.now(exchange["buckets"], {}, self._staging.copies)
            snapshot.data = self._data()
        except Exception as error:  # noqa: BLE001 - told to all ranks: training goes on without
            snapshot.problem = snapshot.problem or reason_of(error)
        self._staging.mark()  # a script's own objects may have been copied on the device
        self._stall_s += time.monotonic() - begin_s

    def _save(self) -> None:
        """Have what is due written, before a step changes anything."""
        due, self._due = self._due, None
        if due is None:
            return
        if due.snapshot is None:
            self._copy(due)
        assert due.snapshot is not None
        self._staging.order()
        self._writer.begin(due.snapshot)

    def _absent(self) -> frozenset[str]:
        sites = list(self._place.ranks)
        return frozenset(sites[each] for each in self._missing_sites.absent())
