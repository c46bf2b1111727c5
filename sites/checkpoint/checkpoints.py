"""A run's checkpoints as one rank sees them: what `Site.checkpoint` sets up."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from protos.checkpoint.manifest import Manifest
from sites.checkpoint.exchange_state import ExchangeState
from sites.checkpoint.interval import Interval
from sites.checkpoint.own_state import generator_states, restore_generators
from sites.checkpoint.place import Place, residuals_path
from sites.checkpoint.reader import CheckpointReader
from sites.checkpoint.request_watch import RequestWatch
from sites.checkpoint.run_objects import RunObjects
from sites.checkpoint.training_state import TrainingState
from sites.checkpoint.writer import CheckpointWriter, LateState, Snapshot
from sites.worker.missing_sites import MissingSites
from topology.job import Checkpoint


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
        self._writer = CheckpointWriter(
            place, device, self._tell_written, on_failed, on_stays, on_waiting, self._absent
        )
        self._interval: Interval | None = None
        self._watch: RequestWatch | None = None
        self._last_step = 0
        self._exchange_now: dict[str, Any] = {}
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

    def let_enter(self) -> None:
        """Sites enter with the next step: count the interval anew after this one, as they do."""
        self._counts_anew = True

    def after_step(self, step: int) -> None:
        """Save if it is time to, or asked for. After each step, in order."""
        assert self._interval is not None, "started"
        assert self._watch is not None, "started"
        if self._interval.is_due(step) or step == self._watch.step:
            self._save(step)
        if self._counts_anew:
            self._counts_anew = False
            self._interval = Interval(self._settings, step, self._agree)

    def finish(self, step: int) -> None:
        """Save the last step unless it was, and return when all is written."""
        if self._watch is not None:
            self._watch.close()
        if step != self._last_step:
            self._save(step)
        self.complete()
        self._writer.close()

    def _tell_written(self, step: int, write_s: float, num_bytes: int) -> None:
        self._on_written(step, write_s, num_bytes, self._stall_s)

    def _save(self, step: int) -> None:
        begin_s = time.monotonic()
        self._last_step = step
        sites = list(self._place.ranks)
        gone = {sites[each] for each in self._missing_sites.gone()}
        if self._place.site in self._absent():
            return  # it follows, and comes to this step long after the others
        publishes = self._place.site == next(site for site in sites if site not in gone)
        residuals = self._place.staging(step) / residuals_path(self._place)
        self._exchange_now = self._exchange.save(residuals)
        self._writer.begin(
            Snapshot(
                step=step,
                publishes=publishes,
                tensors=self._state.tensors() if publishes else {},
                other_state=self._objects.other_state() if publishes else {},
                own={
                    "generators": generator_states(self._device),
                    "exchange": self._exchange_now,
                    "ranks": dict(self._place.ranks),
                },
                has_residuals=self._exchange.has_residuals,
            )
        )
        self._stall_s = time.monotonic() - begin_s

    def complete(self) -> None:
        """Take what a script changes after the optimizer's step, as its scheduler; then go on."""
        begin_s = time.monotonic()
        self._writer.complete(self._late_state)
        self._stall_s += time.monotonic() - begin_s

    def _late_state(self) -> LateState:
        """Return what is known, or as it is to be saved, only once the next step begins."""
        objects = self._objects.now(self._exchange_now["buckets"], {})
        return LateState(objects, self._data(), self._absent())

    def _absent(self) -> frozenset[str]:
        sites = list(self._place.ranks)
        return frozenset(sites[each] for each in self._missing_sites.absent())
