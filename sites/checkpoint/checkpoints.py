"""A run's checkpoints as one rank sees them: what `Site.checkpoint` sets up."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from protos.checkpoint.manifest import Manifest
from protos.errors import ConfigMismatchError
from sites.checkpoint.entry_state import wait_for_entry
from sites.checkpoint.exchange_state import ExchangeState
from sites.checkpoint.interval import Interval
from sites.checkpoint.own_state import generator_states, restore_generators
from sites.checkpoint.reader import CheckpointReader
from sites.checkpoint.request_watch import RequestWatch
from sites.checkpoint.training_state import TrainingState
from sites.checkpoint.writer import CheckpointWriter, LateState, Place, Snapshot, residuals_path
from sites.worker.attendance import Attendance
from sites.worker.member_history import Entering
from topology.job import Checkpoint


class Stateful(Protocol):
    """What a script may have saved along: a scheduler, a scaler, counts of its own."""

    def state_dict(self) -> dict[str, Any]:
        """Return it; equal at all ranks, for the first one's is saved."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Take what `state_dict` returned."""


class Checkpoints:
    """Saves after steps and resumes. For the training thread; a collective of the site to make."""

    def __init__(
        self,
        *,
        settings: Checkpoint,
        place: Place,
        device: torch.device,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        objects: Mapping[str, Stateful],
        data: Callable[[], dict[str, Any]],
        exchange: ExchangeState,
        attendance: Attendance,
        on_written: Callable[[int, float, int, float], None],
    ) -> None:
        """Look at what is to be saved.

        Args:
            settings: of the job.
            place: who writes, and where to.
            device: this rank's.
            model: as `Site.checkpoint` takes it.
            optimizer: of its parameters.
            objects: by name, scheduler and extras.
            data: returns what the manifest has of the run's data.
            exchange: what it carries from one round to the next.
            attendance: which sites take part.
            on_written: told step, seconds, bytes, and how many seconds training has waited; from
                a thread, where the checkpoint is published.
        """
        self._settings = settings
        self._place = place
        self._device = device
        self._state = TrainingState(model, optimizer)
        self._objects = objects
        self._data = data
        self._exchange = exchange
        self._attendance = attendance
        self._stall_s = 0.0
        self._on_written = on_written
        self._writer = CheckpointWriter(place, device, self._tell_written)
        self._interval: Interval | None = None
        self._watch: RequestWatch | None = None
        self._last_step = 0
        self._exchange_now: dict[str, Any] = {}
        self._own: dict[str, Any] | None = None
        self._entering: Entering | None = None
        optimizer.register_step_pre_hook(lambda *_: self._complete())

    def resume(self) -> Manifest | None:
        """Load what the job says to go on from; None: it says nothing.

        A collective of the site.

        Raises:
            BadCheckpointError: it is damaged.
            ConfigMismatchError: it is of another model, or has other objects.
        """
        if self._settings.resume is None:
            return None
        return self._load(CheckpointReader(self._settings.resume, self._writer.group))

    def take_state(self, epoch: int, within_s: float) -> Manifest:
        """Load what the others have saved for this site, which comes back with an epoch.

        A collective of the site. Waits until it is there.

        Raises:
            DeadlineExceededError: it did not come.
            BadCheckpointError: it is damaged.
        """
        found = wait_for_entry(self._place.store, epoch, within_s)
        return self._load(CheckpointReader(found, self._writer.group))

    def _load(self, reader: CheckpointReader) -> Manifest:
        manifest = reader.verified()
        objects = reader.load(self._state)
        for name, each in self._objects.items():
            if name not in objects["objects"]:
                raise ConfigMismatchError(f"the checkpoint has no {name}")
            each.load_state_dict(objects["objects"][name])
        self._own = reader.own(manifest, self._place)
        self.restore_generators()
        self._exchange.resume_buckets(objects["exchange"])
        if self._own is not None and manifest.ranks == self._place.ranks:
            self._exchange.resume(self._own["exchange"], reader.residuals(manifest, self._place))
        self._last_step = manifest.step
        return manifest

    def restore_generators(self) -> None:
        """Put the global generators into the states that this rank had, if it was there."""
        if self._own is not None:
            restore_generators(self._own["generators"], self._device)

    def start(self, agree: Callable[[float], float]) -> None:
        """Begin to count the interval. `agree` returns the mean of a number over all ranks."""
        self._agree = agree
        self._interval = Interval(self._settings, self._last_step, agree)
        self._watch = RequestWatch(self._place.store)

    def after_step(self, step: int) -> None:
        """Save if it is time to, or asked for. After each step, in order."""
        assert self._interval is not None, "started"
        assert self._watch is not None, "started"
        if self._entering is not None:
            self._save(step)
            # As the interval of those that enter.
            self._interval = Interval(self._settings, step, self._agree)
            return
        if self._interval.is_due(step) or step == self._watch.step:
            self._save(step)

    def let_enter(self, entering: Entering) -> None:
        """Sites enter with the next step: save after this one, whatever is due."""
        self._entering = entering

    def before_gradients(self) -> int:
        """Return the epoch that begins with these gradients; 0: none.

        Whoever enters waits for the checkpoint, and the others for them: so it waits for nothing.
        """
        if self._entering is None:
            return 0
        self._writer.add(self._late_state)
        entering, self._entering = self._entering, None
        return entering.epoch

    def finish(self, step: int) -> None:
        """Save the last step unless it was, and return when all is written."""
        if self._watch is not None:
            self._watch.close()
        if step != self._last_step:
            self._save(step)
        self._complete()
        self._writer.close()

    def _tell_written(self, step: int, write_s: float, num_bytes: int) -> None:
        self._on_written(step, write_s, num_bytes, self._stall_s)

    def _save(self, step: int) -> None:
        begin_s = time.monotonic()
        self._last_step = step
        sites = list(self._place.ranks)
        entering = self._entering.sites if self._entering else ()
        gone = {sites[each] for each in self._attendance.gone()}.union(entering)
        publishes = self._place.site == next(site for site in sites if site not in gone)
        residuals = self._place.staging(step) / residuals_path(self._place)
        self._exchange_now = self._exchange.save(residuals)
        self._writer.begin(
            Snapshot(
                step=step,
                publishes=publishes,
                tensors=self._state.tensors() if publishes else {},
                own={
                    "generators": generator_states(self._device),
                    "exchange": self._exchange_now,
                },
                has_residuals=self._exchange.has_residuals,
                epoch=self._entering.epoch if self._entering else 0,
            )
        )
        self._stall_s = time.monotonic() - begin_s

    def _complete(self) -> None:
        """Take what a script changes after the optimizer's step, as its scheduler; then go on."""
        begin_s = time.monotonic()
        self._writer.complete(self._late_state)
        self._stall_s += time.monotonic() - begin_s

    def _late_state(self) -> LateState:
        """Return what is known, or as it is to be saved, only once the next step begins."""
        sites = list(self._place.ranks)
        entering = self._entering.sites if self._entering else ()
        absent = frozenset(sites[each] for each in self._attendance.absent()).union(entering)
        return LateState(self._objects_now(), self._data(), absent)

    def _objects_now(self) -> dict[str, Any]:
        states = {name: each.state_dict() for name, each in self._objects.items()}
        buckets = {"buckets": self._exchange_now["buckets"]}
        held = {"optimizer": self._state.settings(), "objects": states, "exchange": buckets}
        return copy.deepcopy(held)
