"""Writes the training state for rejoining sites into a node's folder, in a thread.

An `EntryWriter` handles one state at one rank. Ranks of a node write parts of one file, and hash
some pieces each; the site's first rank on the node adds the other objects and the index. An error
at one rank is shared in the next collective: then all ranks give up and remove the state. Training
goes on in any case.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

import torch

from isthmus.protos.errors import IsthmusError
from isthmus.protos.failure import one_line, reason_of, text_of
from isthmus.sites.checkpoint.patience import TELL_EVERY_S, join_patiently, wait_patiently
from isthmus.sites.checkpoint.training_state import Forms, Tensors
from isthmus.sites.local.entry_folder import (
    INDEX,
    OBJECTS,
    TENSORS,
    Index,
    digests_in,
    num_pieces,
    require_room,
)

_ALIGNMENT = 64
"""Tensors begin at multiples of this, so that any dtype can be read in place."""
_WRITE_BYTES = 4 << 20
"""Bytes written between two checks whether the state is still wanted."""
_REMOVED_S = 10.0
"""Time to remove a state when the rank leaves."""
_UNWANTED = "nobody wants it any more"

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Extent:
    """The place of a tensor in the file of a state."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype

    def read(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the tensor, a view of the whole file as uint8."""
        num_bytes = self.shape.numel() * self.dtype.itemsize
        return stored[self.offset : self.offset + num_bytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The files of the state after one step."""

    folder: Path
    epoch: int
    """Epoch with which other sites take the state over."""
    step: int
    extents: Mapping[str, Extent]
    num_bytes: int
    """Total size of the tensors."""


class Reports(Protocol):
    """Callbacks for the progress of writing, called from any thread."""

    def progress(self, epoch: int, done_bytes: int, problem: str = "") -> None:
        """Report this rank's written bytes, or why the state cannot be provided."""

    def failed(self, step: int, reason: str) -> None:
        """Report that the state after a step could not be written; at the site's first rank."""

    def waiting(self) -> None:
        """Report every second that training waits, and does not hang."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """This rank's position among those of its site and node."""

    rank: int
    """Inside the site."""
    local_rank: int
    num_local_ranks: int
    tell_all: Callable[[Any], Sequence[Any]]
    """A collective of the site for this thread: returns each rank's value, by rank."""


class _UnwantedError(Exception):
    """The state is no longer wanted: the rejoining site has it, or does not come."""


class EntryWriter:
    """Owns the writing thread, and the folder from its creation to its removal."""

    def __init__(self, written: Written, part: Part, reports: Reports) -> None:
        """Set up; the thread starts later."""
        self._written = written
        self._part = part
        self._reports = reports
        self._objects: bytes | Exception = b""
        """Serialised objects beside the tensors, at a node's first rank, or why they cannot be
        saved."""
        self._has_objects = threading.Event()
        self._is_unwanted = threading.Event()
        self._is_settled = threading.Event()
        """Set once the state is written or given up: no further collective follows."""
        self._done_bytes = 0
        self._told_s = float("-inf")
        self._thread: threading.Thread | None = None

    @property
    def has_started(self) -> bool:
        """Whether the thread writes."""
        return self._thread is not None

    def start(self, copies: Tensors, problem: Exception | None = None) -> None:
        """Begin to write this rank's whole tensors, and free the copies.

        `problem` is why tensors are missing.
        """
        self._thread = threading.Thread(
            target=self._run, args=(copies, problem), name="write-entry", daemon=True
        )
        self._thread.start()

    def publish(self, make: Callable[[], dict[str, Any]]) -> None:
        """Add the other objects, so that others may fetch the state. Idempotent.

        Args:
            make: returns the objects; called at a node's first rank only.
        """
        if self._has_objects.is_set():
            return
        if self._part.local_rank == 0:
            try:
                file = io.BytesIO()
                torch.save(make(), file)
                self._objects = file.getvalue()
            except Exception as error:  # noqa: BLE001 - told by the thread: training goes on
                self._objects = error
        self._has_objects.set()

    def discard(self) -> None:
        """Remove the state without waiting: the rejoining site has it, or never will."""
        self._is_unwanted.set()
        self._has_objects.set()

    def wait_settled(self) -> None:
        """Wait until the thread takes part in no further collective."""
        if self.has_started:
            wait_patiently(self._is_settled, self._reports.waiting)

    def close(self) -> None:
        """Have it removed, and wait for that, a bounded time."""
        self.discard()
        if self._thread is not None:
            join_patiently(self._thread, self._reports.waiting, _REMOVED_S)

    # ------------------------------------------------------------ the thread

    def _run(self, copies: Tensors, problem: Exception | None) -> None:
        """Write the state, keep it while it is wanted, and remove it."""
        try:
            self._agreed(lambda: self._write_tensors(copies, problem))
            digests = self._agreed(self._hash_tensors)
            self._agreed(lambda: self._write_index(digests))
        except _UnwantedError:
            pass
        except Exception as error:  # noqa: BLE001 - the thread's root: training goes on without
            self._fail(error)
        else:
            self._is_settled.set()
            self._is_unwanted.wait()
        finally:
            self._is_settled.set()
        if self._part.local_rank == 0:
            shutil.rmtree(self._written.folder, ignore_errors=True)

    def _agreed(self, work: Callable[[], Made]) -> list[Made]:
        """Do this rank's part, and return the results of all ranks of the site.

        Raises:
            OSError: some rank failed.
            _UnwantedError: the state is no longer wanted.
        """
        problem, result = "", None
        try:
            result = work()
        except _UnwantedError:
            problem = _UNWANTED
        except Exception as error:  # noqa: BLE001 - told to all ranks, or they would wait
            problem = f"rank {self._part.rank}: {self._written.folder}: {_reason(error)}"
        reports = self._part.tell_all((problem, result))
        problems = [each for each, _ in reports if each]
        if _UNWANTED in problems:
            raise _UnwantedError
        if problems:
            raise OSError(problems[0])
        return [each for _, each in reports]

    def _fail(self, error: Exception) -> None:
        """Report to the ranks and the log that there is no state of this step."""
        written, why = self._written, one_line(text_of(error))
        with contextlib.suppress(IsthmusError):  # the gateway has gone: the run ends anyway
            self._reports.progress(written.epoch, self._done_bytes, why)
            # Other errors broke the collective: a rank has gone, which is reported elsewhere.
            if self._part.rank == 0 and isinstance(error, OSError):
                self._reports.failed(written.step, why)
        with contextlib.suppress(OSError):  # the log may be on the full disk
            sys.stderr.write(
                f"isthmus: the state after step {written.step} is not written: {why}\n"
            )

    def _note_done(self, num_bytes: int) -> None:
        """Count written bytes, and report them every second.

        Raises:
            _UnwantedError: the state is no longer wanted.
        """
        if self._is_unwanted.is_set():
            raise _UnwantedError
        self._done_bytes += num_bytes
        now_s = time.monotonic()
        if now_s >= self._told_s + TELL_EVERY_S:
            self._told_s = now_s
            self._reports.progress(self._written.epoch, self._done_bytes)

    def _write_tensors(self, copies: Tensors, problem: Exception | None) -> None:
        written = self._written
        try:
            if problem is not None:
                raise problem
            self._note_done(0)
            written.folder.mkdir(parents=True, exist_ok=True)
            if self._part.local_rank == 0:
                require_room(written.folder, written.num_bytes)
            with open_shared(written.folder / TENSORS, written.num_bytes) as file:
                for path, each in copies.items():
                    file.seek(written.extents[path].offset)
                    octets = bytes_of(each)
                    for at in range(0, len(octets), _WRITE_BYTES):
                        self._note_done(file.write(octets[at : at + _WRITE_BYTES]))
        finally:
            copies.clear()

    def _hash_tensors(self) -> dict[int, int]:
        """Return digests of this rank's share of pieces, whichever rank wrote them."""
        part, written = self._part, self._written
        pieces = range(part.local_rank, num_pieces(written.num_bytes), part.num_local_ranks)
        return digests_in(written.folder / TENSORS, pieces, self._note_done)

    def _write_index(self, parts: Sequence[Mapping[int, int]]) -> None:
        """Write the other objects once published, then the index with all digests."""
        if self._part.local_rank != 0:
            return
        self._has_objects.wait()
        self._note_done(0)
        if isinstance(self._objects, Exception):
            raise self._objects
        folder, size = self._written.folder, len(self._objects)
        objects = folder / OBJECTS
        objects.write_bytes(self._objects)
        digests = {piece: each for part in parts for piece, each in part.items()}
        index = Index(
            {TENSORS: self._written.num_bytes, OBJECTS: size},
            {
                TENSORS: tuple(digests[piece] for piece in sorted(digests)),
                OBJECTS: tuple(digests_in(objects, range(num_pieces(size))).values()),
            },
        )
        part = (folder / INDEX).with_suffix(".part")
        part.write_bytes(index.to_bytes())
        part.rename(folder / INDEX)


def laid_out(forms: Forms) -> tuple[dict[str, Extent], int]:
    """Return the tensors' places in the file, and its size; sorted by name, equal at all sites."""
    extents, end = {}, 0
    for path in sorted(forms):
        shape, dtype = forms[path]
        extents[path] = Extent(end, shape, dtype)
        end += -(-shape.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return extents, end


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a view of a tensor's bytes in memory."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data


def open_shared(path: Path, num_bytes: int) -> BinaryIO:
    """Open a file that several processes write parts of."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    os.ftruncate(descriptor, num_bytes)
    return os.fdopen(descriptor, "r+b")


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return reason_of(error)
