"""The training state that sites take over which enter a run: how a site has it ready, and takes it.

After the step before others enter, each node writes all of it into its folder
(sites/local/entry_folder.py): tensors whole and in one order, so that the bytes are the same at all
sites, whatever ranks they have. Those who enter fetch parts of it from all of them. The others wait
in the next round for whoever enters; nothing changes the tensors before, so nothing is copied.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from sites.worker.member_history import Entering
from sites.worker.sharding import whole_of, write_whole
from sites.worker.tensor_hashes import as_bytes

_ALIGNMENT = 64
"""Each tensor begins at a multiple of so many bytes: any type can be read there."""


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

    def write(self, entering: Entering, step: int) -> None:
        """Write the tensors, right after the step before sites enter."""
        folder = entering.state
        folder.mkdir(parents=True, exist_ok=True)
        rank, num_ranks = self._local_rank, self._num_local_ranks
        tensors = self._state.tensors()
        common = {path: each for path, each in tensors.items() if self._state.is_common(path)}
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
        with open_shared(folder / TENSORS, num_bytes) as file:
            for number, (path, place) in enumerate(places.items()):
                whole = self._whole_of(common.get(path), place, holders[path])
                if number % num_ranks == rank:
                    file.seek(place.offset)
                    file.write(bytes_of(whole))
        self._all(None)  # all ranks have written
        own = digests_in(folder / TENSORS, range(rank, num_pieces(num_bytes), num_ranks))
        digests = {piece: each for part in self._all(own) for piece, each in part.items()}
        self._written = Written(
            epoch=entering.epoch,
            folder=folder,
            step=step,
            places=places,
            num_bytes=num_bytes,
            digests=tuple(digests[piece] for piece in sorted(digests)),
            buffers=buffers,
            other_state=other_state,
            buckets=self._objects.buckets,
        )

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

    def publish(self) -> int:
        """Add what a script changes after the step, as its scheduler, and let others fetch it.

        As the next gradients begin. Returns the epoch with which others enter; 0: nobody does.
        """
        written = self._written
        if written is None or written.is_published:
            return 0
        written.is_published = True
        if self._local_rank == 0:
            objects, index = written.folder / OBJECTS, written.folder / INDEX
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
            torch.save(held, objects)
            size = objects.stat().st_size
            digests = digests_in(objects, range(num_pieces(size)))
            found = Index(
                {TENSORS: written.num_bytes, OBJECTS: size},
                {TENSORS: written.digests, OBJECTS: tuple(digests.values())},
            )
            part = index.with_suffix(".part")
            part.write_bytes(found.to_bytes())
            part.rename(index)
        return written.epoch

    def discard(self) -> None:
        """Remove what was written: whoever was to enter has it, or does not come."""
        written, self._written = self._written, None
        if written is not None and self._local_rank == 0:
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
        self._all(None)  # all ranks have read
        if self._local_rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        return Entered(step=saved["step"], data=saved["data"], lists=saved["lists"])

    def _all(self, own: Any) -> list[Any]:  # noqa: ANN401 - anything that can be pickled
        """Return what each rank of the site has."""
        if dist.get_world_size() == 1:
            return [own]
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
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
    """What was written of one step."""

    epoch: int
    folder: Path
    step: int
    places: Mapping[str, Place]
    num_bytes: int
    digests: tuple[int, ...]
    buffers: Tensors
    """They may differ from site to site, and so are no part of what comes from all of them."""
    other_state: Mapping[str, Any]
    """What the optimizer has of all parameters that is no tensor."""
    buckets: list[list[str]]
    is_published: bool = False


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
