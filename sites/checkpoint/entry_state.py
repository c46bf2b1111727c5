"""Writes the training state for sites that rejoin a run, and loads it at such a site.

All ranks agree on a step after which other sites catch up. After it, each node writes the whole
state into its folder (sites/local/entry_folder.py). Tensors are whole and in one order, so the
bytes are the same at all sites, whatever ranks they have. Sites that catch up fetch parts of the
state from all nodes, and go on from there by the results of the rounds since. Tensors are copied
when the next gradients begin to cross, so that all belongs to the state that a script does after
the step; what ranks hold shards of, right after the step. A thread writes the copies, while the
others train on.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from isthmus.sites.checkpoint.entry_writer import (
    EntryWriter,
    Extent,
    Part,
    Reports,
    Written,
    laid_out,
)
from isthmus.sites.checkpoint.patience import TELL_EVERY_S
from isthmus.sites.checkpoint.run_objects import RunObjects
from isthmus.sites.checkpoint.training_state import Tensors
from isthmus.sites.local.entry_folder import OBJECTS, TENSORS
from isthmus.sites.worker.exchange.collectives import APART, local_rank
from isthmus.sites.worker.exchange.member_history import CatchingUp
from isthmus.sites.worker.exchange.sharding import is_sharded, whole_of, write_whole
from isthmus.sites.worker.exchange.tensor_hashes import as_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered:
    """The position of a run that a rejoining site takes over, beside the tensors."""

    step: int
    """Number of optimizer steps taken."""
    data: Mapping[str, Any]
    """The place in the data; empty: the script manages its data itself."""
    lists: Sequence[bytes]
    """Each site's description of its sharded tensors; empty: tensors are not sharded."""


@dataclass(frozen=True, slots=True)
class _Beside:
    """State other than the tensors, copied right after a step."""

    buffers: Tensors
    """Buffers may differ between sites, so they are not fetched from several sites."""
    other_state: Mapping[str, Any]
    """The optimizer's per-parameter state that is no tensor."""
    buckets: list[list[str]]


def _on_host(tensors: Tensors) -> Tensors:
    return {name: each.detach().to("cpu", copy=True) for name, each in tensors.items()}


class EntryState:
    """Writes or takes over the state at one rank. Use it in the training thread.

    `write` and `take` are collectives of the site.
    """

    def __init__(
        self,
        objects: RunObjects,
        data: Callable[[], dict[str, Any]],
        lists: Callable[[], Sequence[bytes]],
        reports: Reports,
    ) -> None:
        """Set up; nothing is written yet.

        Args:
            objects: the run's objects, with model and optimizer.
            data: returns the place in the data at the beginning of the next step.
            lists: returns each site's description of its sharded tensors, if they are sharded.
            reports: receives the progress of writing.
        """
        self._objects = objects
        self._data = data
        self._lists = lists
        self._local_rank = local_rank()
        self._num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        self._group: dist.ProcessGroup | None = None
        self._reports = reports
        self._writer: EntryWriter | None = None
        """Writer of the latest state."""
        self._make_objects: Callable[[], dict[str, Any]] = dict
        self._live: Tensors = {}
        """Tensors of this rank's part that are not copied yet."""
        self._copies: Tensors = {}
        self._problem: Exception | None = None
        """Why `_live` is incomplete; None: it is complete."""
        self._told_s = float("-inf")

    def replace(self, objects: RunObjects) -> None:
        """Write another model and objects from now on; call after `publish`."""
        self._objects = objects

    def write(self, catching_up: CatchingUp, step: int) -> None:
        """Note what there is to write, right after the step before sites catch up.

        Sharded tensors are gathered at once.
        """
        self.discard()
        if self._writer is not None:
            self._writer.wait_settled()
        state, rank, num_ranks = self._objects.state, self._local_rank, self._num_local_ranks
        self._problem = None
        try:
            state.refresh()
        except TypeError as error:  # an optimizer's value cannot be saved: training goes on
            self._problem = error
        tensors = state.tensors()
        common = {path: each for path, each in tensors.items() if state.is_common(path)}
        self._open_group()
        self._say_waiting()
        buffers = {path: each.cpu() for path, each in tensors.items() if path not in common}
        other_state = state.other_state()
        forms = {path: (each.shape, each.dtype) for path, each in common.items()}
        holders = {path: [*range(dist.get_world_size())] for path in forms}
        if state.is_split:
            of_ranks = self._all((forms, buffers, other_state))
            for part_forms, part_buffers, part_state in reversed(of_ranks):
                forms, buffers = forms | part_forms, buffers | part_buffers
                other_state = other_state | part_state
            holders = {
                path: [at for at, (part, *_) in enumerate(of_ranks) if path in part]
                for path in forms
            }
        extents, num_bytes = laid_out(forms)
        live: Tensors = {}
        copies: Tensors = {}
        self._live, self._copies = live, copies
        for number, (path, extent) in enumerate(extents.items()):
            self._say_waiting()
            own = common.get(path)
            whole = self._whole_of(own, extent, holders[path])
            if number % num_ranks == rank:
                if own is None or is_sharded(own):
                    copies[path] = whole.cpu()
                else:
                    live[path] = whole
        written = Written(
            folder=catching_up.state,
            epoch=catching_up.epoch,
            step=step,
            extents=extents,
            num_bytes=num_bytes,
        )
        part = Part(
            rank=dist.get_rank(), local_rank=rank, num_local_ranks=num_ranks, tell_all=self._all
        )
        beside = _Beside(buffers, other_state, self._objects.exchange.buckets)
        self._make_objects = lambda: self._objects_of(written, beside)
        self._writer = EntryWriter(written, part, self._reports)

    def _objects_of(self, written: Written, beside: _Beside) -> dict[str, Any]:
        """Return the state that others take over beside the tensors."""
        return {
            "step": written.step,
            "data": self._data(),
            "lists": [*self._lists()],
            "objects": self._objects.now(beside.buckets, beside.other_state, _on_host),
            "buffers": beside.buffers,
            "extents": {
                path: (each.offset, list(each.shape), each.dtype)
                for path, each in written.extents.items()
            },
        }

    def _say_waiting(self) -> None:
        """Report every second that this rank gathers tensors, and does not hang."""
        now_s = time.monotonic()
        if now_s >= self._told_s + TELL_EVERY_S:
            self._told_s = now_s
            self._reports.waiting()

    def _whole_of(
        self, own: torch.Tensor | None, extent: Extent, holders: list[int]
    ) -> torch.Tensor:
        """Return a whole tensor, from the ranks of the site that hold its parts."""
        if len(holders) == dist.get_world_size():
            assert own is not None
            return whole_of(own)
        whole = (
            torch.empty(extent.shape, dtype=extent.dtype, device="cpu")
            if own is None
            else whole_of(own).cpu()
        )
        octets = as_bytes(whole)
        if octets.numel():
            dist.broadcast(octets, holders[0], group=self._group)
        return octets.view(extent.dtype).view(extent.shape)

    def publish(self) -> None:
        """Copy the noted state, and write it for others to fetch.

        Call when the next gradients begin, or before the next step; later calls do nothing.
        """
        if self._writer is None or self._writer.has_started:
            return
        live, self._live = self._live, {}
        copies, self._copies = self._copies, {}
        problem = self._problem
        try:
            for path, each in live.items():
                self._say_waiting()
                copies[path] = each.detach().to("cpu", copy=True)
        except Exception as error:  # noqa: BLE001 - told by the thread: training goes on
            problem = error
        self._writer.start(copies, problem)
        self._writer.publish(self._make_objects)

    def discard(self) -> None:
        """Remove the written state: the rejoining site has it, or does not come."""
        if self._writer is not None:
            self._writer.discard()

    def close(self) -> None:
        """Remove the written state, and wait for that, for a limited time."""
        if self._writer is not None:
            self._writer.close()

    def take(self, folder: Path) -> Entered:
        """Load the state in a folder, and remove it.

        Raises:
            ConfigMismatchError: it is of another model, or has other objects.
        """
        saved = torch.load(folder / OBJECTS, map_location="cpu", weights_only=True)
        extents = {
            path: Extent(offset, torch.Size(shape), dtype)
            for path, (offset, shape, dtype) in saved["extents"].items()
        }
        buffers = saved["buffers"]
        forms = {path: (each.shape, each.dtype) for path, each in extents.items()}
        forms |= {path: (each.shape, each.dtype) for path, each in buffers.items()}
        targets = self._objects.state.to_load(forms)
        num_bytes = (folder / TENSORS).stat().st_size
        stored = torch.from_file(
            str(folder / TENSORS), shared=False, size=num_bytes, dtype=torch.uint8
        )
        with torch.no_grad():
            for path, target in targets.items():
                extent = extents.get(path)
                whole = buffers[path] if extent is None else extent.read(stored)
                write_whole(target, whole)
        self._objects.state.adopt(targets, saved["objects"]["optimizer"])
        self._objects.take(saved["objects"])
        self._open_group()
        self._all(None)  # all ranks have read
        if self._local_rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        return Entered(step=saved["step"], data=saved["data"], lists=saved["lists"])

    def _open_group(self) -> None:
        """Make the group that `_all` uses, in the training thread."""
        if self._group is None and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=APART)

    def _all(self, own: Any) -> list[Any]:  # noqa: ANN401 - anything that can be pickled
        """Return `own` of each rank of the site."""
        if dist.get_world_size() == 1:
            return [own]
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, own, group=self._group)
        return found
