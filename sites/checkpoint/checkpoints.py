"""Saves and resumes a run's checkpoints at one rank; set up by `Site.checkpoint`.

A checkpoint of step N is the state with which step N + 1 begins. It includes everything that a
script does after a step: a scheduler, an average of weights, weights that are clamped, or swapped
for an evaluation and swapped back. So tensors are copied when the next gradients begin to cross: no
forward pass is under way then, and nothing else changes weights. Buffers and generators, which a
forward pass changes, are copied when the step has ended.

With several optimizers, those that step after the counted one and before the next step belong to
the same step. The next step begins with the optimizer that was the first of all to step, or with
the counted one. It is unknown until an optimizer steps which one the gradients are for, so the copy
is repeated if that optimizer still belonged to the same step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from isthmus.protos.checkpoint.manifest import Manifest
from isthmus.protos.failure import reason_of
from isthmus.sites.checkpoint.own_state import generator_states, restore_generators
from isthmus.sites.checkpoint.place import Place
from isthmus.sites.checkpoint.reader import CheckpointReader
from isthmus.sites.checkpoint.run_objects import RunObjects
from isthmus.sites.checkpoint.schedule import Schedule
from isthmus.sites.checkpoint.staging import Staging
from isthmus.sites.checkpoint.training_state import Tensors
from isthmus.sites.checkpoint.writer import CheckpointWriter, Snapshot
from isthmus.sites.worker.exchange.missing_sites import MissingSites
from isthmus.sites.worker.exchange.rounds import Landing
from isthmus.topology.spec.job import Checkpoint


class MakeCommon(Protocol):
    """Has the same state at all sites."""

    def __call__(self, *, crosses: bool = True) -> bool:
        """Do so after a step; return whether it can be. Unless it `crosses`, nothing is sent."""


@dataclass(slots=True, kw_only=True)
class _Due:
    """The pending checkpoint of a step that has ended, until the next step begins."""

    step: int
    publishes: bool
    """Whether this site writes the shared part and the manifest."""
    passed_over: frozenset[str]
    """Sites without a part in it, for the round that has ended waited for nobody."""
    generators: dict[str, Any] = field(default_factory=dict)
    parameters: Tensors = field(default_factory=dict)
    """References to the parameters; their storage stays in place during a step."""
    buffers: Tensors = field(default_factory=dict)
    """Copies of the buffers."""
    residuals: list[Path] = field(default_factory=list)
    """Files requested from the gateway; the last one counts."""
    snapshot: Snapshot | None = None
    """Copy of the state. None: not made yet, or outdated by another optimizer's step."""
    problem: str = ""


class Checkpoints:
    """Saves after steps, and resumes. Use it in the training thread."""

    def __init__(
        self,
        *,
        settings: Checkpoint,
        places: Sequence[Place],
        device: torch.device,
        objects: RunObjects,
        data: Callable[[], dict[str, Any]],
        missing_sites: MissingSites,
        make_common: MakeCommon,
        landing: Callable[[], Landing | None],
        sync_every: Callable[[], int],
        on_written: Callable[[int, float, int, float], None],
        on_failed: Callable[[int, str], None],
        on_store_failed: Callable[[int, str], None],
        on_stays: Callable[[int, str], None],
        on_waiting: Callable[[], None],
    ) -> None:
        """Set up saving. A collective of the site.

        Args:
            settings: checkpoint settings of the job.
            places: this rank's place among the writers, for each store.
            device: device of this rank.
            objects: the run's objects, with model, optimizer and what the exchange keeps.
            data: returns the manifest's entry about the run's data.
            missing_sites: knows which sites take part.
            make_common: has the same state at all sites, after a step whose state is saved.
            landing: returns the round that has ended with the latest step, if such wait for nobody.
            sync_every: returns how many steps lie between those after which it can.
            on_written: called from a thread with step, seconds, bytes, and seconds that training
                waited, at the publishing site.
            on_failed: called from a thread with step and reason if this rank could not write.
            on_store_failed: called from a thread with step and reason if it could not write into
                one of several stores.
            on_stays: called from a thread with step and reason if an old checkpoint could not be
                removed.
            on_waiting: called every second while training waits for the previous checkpoint.
        """
        self._settings = settings
        self._places = places
        self._place = places[0]
        self._device = device
        self._objects = objects
        self._data = data
        self._missing_sites = missing_sites
        self._make_common = make_common
        self._landing = landing
        self._sync_every = sync_every
        self._stall_s = 0.0
        self._on_written = on_written
        self._staging = Staging(device)
        self._writer = CheckpointWriter(
            places,
            self._staging.wait,
            self._tell_written,
            on_failed,
            on_store_failed,
            on_stays,
            on_waiting,
            self._absent,
        )
        self._schedule: Schedule | None = None
        self._last_step = 0
        self._due: _Due | None = None
        self._counted: torch.optim.Optimizer | None = None
        self._first: torch.optim.Optimizer | None = None
        """The optimizer that was the first to step; None before any step."""
        self._own: dict[str, Any] | None = None

    def resume(self) -> Manifest | None:
        """Load the checkpoint that the job names; return None if it names none.

        A collective of the site.

        Raises:
            BadCheckpointError: the checkpoint is damaged.
            ConfigMismatchError: the checkpoint has another model or other objects.
        """
        if self._settings.resume is None:
            return None
        reader = CheckpointReader(self._settings.resume)
        manifest = reader.verified()
        self._objects.take(reader.load(self._objects.state))
        self._own = reader.own(manifest, self._place)
        self.restore_generators()
        # Chunks are cut for all sites, including those that took no part.
        if self._own is not None and self._own.get("ranks", manifest.ranks) == self._place.ranks:
            residuals = reader.residuals(manifest, self._place)
            self._objects.exchange.resume(self._own["exchange"], residuals)
        self._last_step = manifest.step
        return manifest

    def restore_generators(self) -> None:
        """Restore this rank's global generators, if the checkpoint has their states."""
        if self._own is not None:
            restore_generators(self._own["generators"], self._device)

    def start(self, agree: Callable[[float], float], step: int) -> None:
        """Begin to count the interval after `step`.

        `agree` returns the mean of a number over all ranks.
        """
        self._last_step = step
        stores = [place.store for place in self._places]
        self._schedule = Schedule(self._settings, stores, agree, step)

    def watch(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[RemovableHandle]:
        """Save after steps of `optimizers`. The first one's steps are counted as the run's.

        Returns handles that remove the hooks.
        """
        self._counted, self._first = optimizers[0], None
        return [
            *(each.register_step_pre_hook(self._before_step) for each in optimizers),
            *(each.register_step_post_hook(self._after_any_step) for each in optimizers),
        ]

    def flush(self) -> None:
        """Write the pending checkpoint now: the model may be replaced before the next step.

        Changes since the step are left out, except values of existing parameters.
        """
        self.before_gradients()
        self._save()

    def replace(self, objects: RunObjects) -> None:
        """Save another model and objects from now on; call after `flush`."""
        self._objects = objects

    def let_enter(self) -> None:
        """Restart the interval after this step, as sites do that rejoin with the next one."""
        assert self._schedule is not None, "started"
        self._schedule.restart()

    def after_step(self, step: int) -> None:
        """Check whether a checkpoint is due or requested. Call after each step, in order."""
        assert self._schedule is not None, "started"
        if self._schedule.is_due(step, self._sync_every()):
            self._begin(step)

    def before_gradients(self) -> None:
        """Copy the pending checkpoint, if any: gradients of the next step begin to cross."""
        if self._due is not None and self._due.snapshot is None:
            self._copy(self._due)

    def finish(self, step: int) -> None:
        """Save the last step, unless it is saved, and wait until all is written.

        One after which sites do not hold the same is not saved.
        """
        if self._schedule is not None:
            self._schedule.close()
        if step != self._last_step:
            self._begin(step, crosses=False)
        self._save()
        self._writer.wait()

    def _tell_written(self, step: int, write_s: float, num_bytes: int) -> None:
        self._on_written(step, write_s, num_bytes, self._stall_s)

    def _begin(self, step: int, *, crosses: bool = True) -> None:
        begin_s = time.monotonic()
        self._last_step = step
        sites, landing = list(self._place.ranks), self._landing()
        taken = {} if landing is None else landing.taken
        passed_over = frozenset(sites[each] for each, steps in taken.items() if not steps)
        if self._place.site in passed_over:
            return
        if not self._make_common(crosses=crosses and landing is None):
            return
        gone = {sites[each] for each in self._missing_sites.gone()} | passed_over
        if self._place.site in self._absent():
            return  # it catches up, and comes to this step long after the others
        self._writer.wait()  # the next copies overwrite the previous ones
        publishes = self._place.site == next(site for site in sites if site not in gone)
        self._due = _Due(step=step, publishes=publishes, passed_over=passed_over)
        self._note_end(self._due)
        self._stall_s = time.monotonic() - begin_s

    def _note_end(self, due: _Due) -> None:
        """Copy or note the state after a step that the next forward pass changes or moves."""
        due.snapshot = None
        due.generators = generator_states(self._device)
        if not due.publishes:
            return
        try:
            state = self._objects.state
            state.refresh()
            tensors = state.model_tensors()
            due.parameters = {path: each for path, each in tensors.items() if state.is_common(path)}
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
        else:  # another optimizer's step within the same step
            self._due.snapshot = None

    def _after_any_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._due is not None and optimizer is not self._counted:
            self._note_end(self._due)

    def _copy(self, due: _Due) -> None:
        """Copy the whole pending checkpoint now."""
        begin_s, objects = time.monotonic(), self._objects
        due.residuals.append(self._place.asked(due.step, len(due.residuals)))
        snapshot = due.snapshot = Snapshot(
            step=due.step,
            publishes=due.publishes,
            residuals=[*due.residuals] if objects.exchange.has_residuals else [],
            absent=self._absent() | due.passed_over,
            problem=due.problem,
        )
        try:
            exchange = objects.exchange.save(due.residuals[-1])
            snapshot.own = {
                "generators": due.generators,
                "exchange": exchange,
                "ranks": dict(self._place.ranks),
            }
            if due.publishes:
                live = due.parameters | objects.state.optimizer_tensors()
                objects.state.check_forms(live)
                snapshot.tensors = due.buffers | self._staging.copies(live)
                snapshot.other_state = objects.state.other_state()
            snapshot.objects = objects.now(exchange["buckets"], {}, self._staging.copies)
            snapshot.data = self._data()
        except Exception as error:  # noqa: BLE001 - told to all ranks: training goes on without
            snapshot.problem = snapshot.problem or reason_of(error)
        self._staging.mark()  # a script's own objects may have been copied on the device
        self._stall_s += time.monotonic() - begin_s

    def _save(self) -> None:
        """Write the pending checkpoint before a step changes the state."""
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
