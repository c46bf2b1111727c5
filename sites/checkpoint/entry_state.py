"""The training state that sites take over which come back: how a site has it ready, and takes it.

After the step before others follow, each node writes all of it into its folder
(sites/local/entry_folder.py): tensors whole and in one order, so that the bytes are the same at all
sites, whatever ranks they have. Those who follow fetch parts of it from all of them, and go on from
there by the results of the rounds since. The others train on: a thread copies the tensors before
the next step changes them, and writes.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist

from sites.checkpoint.run_objects import RunObjects
from sites.checkpoint.training_state import Forms, Tensors, TrainingState
from sites.local.entry_folder import (
    INDEX,
    OBJECTS,
    TENSORS,
    Index,
    digests_in,
    num_pieces,
)
from sites.worker.collectives import local_rank
from sites.worker.member_history import Following
from sites.worker.sharding import is_sharded, whole_of, write_whole
from sites.worker.tensor_hashes import as_bytes

_log = logging.getLogger(__name__)

_ALIGNMENT = 64
"""Each tensor begins at a multiple of so many bytes: any type can be read there."""
_WRITTEN_S = 10.0
"""Time for a file that nobody wants any more to be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered:
    """What a site that enters has to know beside the state itself."""

    step: int
    """Optimizer steps that had been taken."""
    data: Mapping[str, Any]
    """The place in the data; empty: the script reads its data in another way."""
    lists: Sequence[bytes]
    """What each site has told all others of its tensors; empty: these are not sharded."""


class EntryState:
    """Writes and takes it, at one rank. For the training thread.

    `write` and `take` are collectives of the site.
    """

    def __init__(
        self,
        state: TrainingState,
        objects: RunObjects,
        data: Callable[[], dict[str, Any]],
        lists: Callable[[], Sequence[bytes]],
    ) -> None:
        """Look at what is to be taken over.

        Args:
            state: model and optimizer.
            objects: what there is beside them.
            data: returns the place in the data, as it is when the next step begins.
            lists: returns what each site has told all others of its tensors, if they are sharded.
        """
        self._state = state
        self._objects = objects
        self._data = data
        self._lists = lists
        self._local_rank = local_rank()
        self._num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        self._group: dist.ProcessGroup | None = None
        self._written: Written | None = None
        self._thread: threading.Thread | None = None

    def write(self, following: Following, step: int) -> None:
        """Begin to write the tensors, right after the step before sites follow.

        They are copied while the next gradients are computed: until `wait_copied` nothing may
        change them. What ranks hold shards of is brought together at once.
        """
        self.discard()
        rank, num_ranks = self._local_rank, self._num_local_ranks
        tensors = self._state.tensors()
        common = {path: each for path, each in tensors.items() if self._state.is_common(path)}
        self._open_group()
        buffers = {path: each.cpu() for path, each in tensors.items() if path not in common}
        other_state = self._objects.other_state()
        forms = {path: (each.shape, each.dtype) for path, each in common.items()}
        holders = {path: [*range(dist.get_world_size())] for path in forms}
        if self._state.is_split:
            told = self._all((forms, buffers, other_state))
            for part_forms, part_buffers, part_state in reversed(told):
                forms, buffers = forms | part_forms, buffers | part_buffers
                other_state = other_state | part_state
            holders = {
                path: [at for at, (part, *_) in enumerate(told) if path in part] for path in forms
            }
        places, num_bytes = laid_out(forms)
        live: Tensors = {}
        copies: Tensors = {}
        for number, (path, place) in enumerate(places.items()):
            own = common.get(path)
            whole = self._whole_of(own, place, holders[path])
            if number % num_ranks == rank:
                if own is None or is_sharded(own):
                    copies[path] = whole.cpu()
                else:
                    live[path] = whole
        following.state.mkdir(parents=True, exist_ok=True)
        written = self._written = Written(
            folder=following.state,
            step=step,
            places=places,
            num_bytes=num_bytes,
            buffers=buffers,
            other_state=other_state,
            buckets=self._objects.buckets,
        )
        self._thread = threading.Thread(
            target=self._write, args=(written, live, copies), name="write-entry", daemon=True
        )
        self._thread.start()

    def _whole_of(self, own: torch.Tensor | None, place: Place, holders: list[int]) -> torch.Tensor:
        """Return all of a tensor, which other ranks of the site hold where this one does not."""
        if len(holders) == dist.get_world_size():
            assert own is not None
            return whole_of(own)
        whole = torch.empty(place.shape, dtype=place.dtype) if own is None else whole_of(own).cpu()
        octets = as_bytes(whole)
        if octets.numel():
            dist.broadcast(octets, holders[0], group=self._group)
        return octets.view(place.dtype).view(place.shape)

    def _write(self, written: Written, live: Tensors, copies: Tensors) -> None:
        """Copy this rank's part of the tensors, write it, and add digests of all there is."""
        try:
            copies |= {path: each.detach().to("cpu", copy=True) for path, each in live.items()}
        finally:
            live.clear()
            written.is_copied.set()
        try:
            self._write_copies(written, copies)
        except OSError as error:  # who is to follow gives up after a while
            _log.warning("the state for a site that comes back cannot be written: %s", error)

    def _write_copies(self, written: Written, copies: Tensors) -> None:
        rank, num_ranks = self._local_rank, self._num_local_ranks
        tensors, objects = written.folder / TENSORS, written.folder / OBJECTS
        with open_shared(tensors, written.num_bytes) as file:
            for path, each in copies.items():
                file.seek(written.places[path].offset)
                file.write(bytes_of(each))
        copies.clear()
        self._all(None)  # all ranks have written
        own = digests_in(tensors, range(rank, num_pieces(written.num_bytes), num_ranks))
        digests = {piece: each for part in self._all(own) for piece, each in part.items()}
        written.has_objects.wait()
        if rank != 0 or written is not self._written:
            return
        size = objects.stat().st_size
        found = Index(
            {TENSORS: written.num_bytes, OBJECTS: size},
            {
                TENSORS: tuple(digests[piece] for piece in sorted(digests)),
                OBJECTS: tuple(digests_in(objects, range(num_pieces(size))).values()),
            },
        )
        part = (written.folder / INDEX).with_suffix(".part")
        part.write_bytes(found.to_bytes())
        part.rename(written.folder / INDEX)

    def wait_copied(self) -> None:
        """Wait until an optimizer's step may change the tensors."""
        if self._written is not None:
            self._written.is_copied.wait()

    def publish(self) -> None:
        """Add what a script changes after the step, as its scheduler: then others may fetch it all.

        As the next gradients begin.
        """
        written = self._written
        if written is None or written.has_objects.is_set():
            return
        if self._local_rank == 0:
            held = {
                "step": written.step,
                "data": self._data(),
                "lists": [*self._lists()],
                "objects": self._objects.now(written.buckets, written.other_state),
                "buffers": written.buffers,
                "places": {
                    path: (each.offset, list(each.shape), each.dtype)
                    for path, each in written.places.items()
                },
            }
            torch.save(held, written.folder / OBJECTS)
        written.has_objects.set()

    def discard(self) -> None:
        """Remove what was written: whoever was to follow has it, or does not come."""
        written, self._written = self._written, None
        if written is not None and self._thread is not None:
            written.has_objects.set()
            self._thread.join(_WRITTEN_S)
            if self._local_rank == 0:
                shutil.rmtree(written.folder, ignore_errors=True)

    def take(self, folder: Path) -> Entered:
        """Take over the state that lies in a folder, and remove it.

        Raises:
            ConfigMismatchError: it is of another model, or has other objects.
        """
        saved = torch.load(folder / OBJECTS, map_location="cpu", weights_only=True)
        places = {
            path: Place(offset, torch.Size(shape), dtype)
            for path, (offset, shape, dtype) in saved["places"].items()
        }
        buffers = saved["buffers"]
        forms = {path: (each.shape, each.dtype) for path, each in places.items()}
        forms |= {path: (each.shape, each.dtype) for path, each in buffers.items()}
        targets = self._state.to_load(forms)
        num_bytes = (folder / TENSORS).stat().st_size
        stored = torch.from_file(
            str(folder / TENSORS), shared=False, size=num_bytes, dtype=torch.uint8
        )
        with torch.no_grad():
            for path, target in targets.items():
                place = places.get(path)
                whole = buffers[path] if place is None else place.read(stored)
                write_whole(target, whole)
        self._state.adopt(targets, saved["objects"]["optimizer"])
        self._objects.take(saved["objects"])
        self._open_group()
        self._all(None)  # all ranks have read
        if self._local_rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        return Entered(step=saved["step"], data=saved["data"], lists=saved["lists"])

    def _open_group(self) -> None:
        """Make the group that `_all` uses, in the training thread."""
        if self._group is None and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo")

    def _all(self, own: Any) -> list[Any]:  # noqa: ANN401 - anything that can be pickled
        """Return what each rank of the site has."""
        if dist.get_world_size() == 1:
            return [own]
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, own, group=self._group)
        return found


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in the file."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype

    def read(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the tensor, a view of the whole file as uint8."""
        num_bytes = self.shape.numel() * self.dtype.itemsize
        return stored[self.offset : self.offset + num_bytes].view(self.dtype).view(self.shape)


@dataclass(slots=True, kw_only=True)
class Written:
    """What is written of one step."""

    folder: Path
    step: int
    places: Mapping[str, Place]
    num_bytes: int
    buffers: Tensors
    """They may differ from site to site, and so are no part of what comes from all of them."""
    other_state: Mapping[str, Any]
    """What the optimizer has of all parameters that is no tensor."""
    buckets: list[list[str]]
    is_copied: threading.Event = field(default_factory=threading.Event)
    has_objects: threading.Event = field(default_factory=threading.Event)
    """Everything but the tensors is there."""


def laid_out(forms: Forms) -> tuple[dict[str, Place], int]:
    """Return where tensors lie in the file, and its size. By name: the same at all sites."""
    places, end = {}, 0
    for path in sorted(forms):
        shape, dtype = forms[path]
        places[path] = Place(end, shape, dtype)
        end += -(-shape.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return places, end


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's elements as they lie in memory."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data


def open_shared(path: Path, num_bytes: int) -> BinaryIO:
    """Open a file that several processes write parts of."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    os.ftruncate(descriptor, num_bytes)
    return os.fdopen(descriptor, "r+b")
