"""The receiving side of a transfer: fetches the training state from all other sites at once.

Donors may still be writing the state; as long as they make progress, they are asked again. One
donor gives the index, and pieces are requested from any free donor, so a fast link brings more. A
piece that is missing or corrupt is requested again; others stay. So a cut link costs only the piece
in flight.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import grpc

from isthmus.protos.errors import PeerLostError, RemoteProtocolError
from isthmus.protos.exchange.v1 import state_pb2, state_pb2_grpc
from isthmus.protos.failure import one_line, text_of
from isthmus.sites.gateway.links.transport import SESSION_KEY, details
from isthmus.sites.gateway.transfer.state_server import EARLY
from isthmus.sites.local.entry_folder import (
    INDEX,
    OBJECTS,
    PIECE_BYTES,
    TENSORS,
    Index,
    digest_of,
    num_pieces,
    require_room,
)
from isthmus.sites.silence import Silence, Standstills
from isthmus.topology.spec.units import format_size

_log = logging.getLogger(__name__)

_ANSWER_S: Final = 60.0
"""Timeout of a request, which is then repeated."""
_AGAIN_S: Final = 0.05
_AGAIN_MAX_S: Final = 1.0
_LATER: Final = 1.2
"""Each wait for the index is so much longer than the one before: a state that is written is asked
for after a sixth of the time that writing took. What others do meanwhile has to be made up for."""
_TURN_S: Final = 0.5
"""Wait before asking a donor again that said it is not this site's turn."""
_DAMAGED_MAX: Final = 3
"""Corrupt pieces after which a donor is dropped: it has another state."""


class PieceBook:
    """Tracks the missing pieces of a file. All methods may be called from any thread."""

    def __init__(self, count: int) -> None:
        """Begin with all `count` pieces missing."""
        self._open = list(reversed(range(count)))
        self._num_missing = count
        self._condition = threading.Condition()
        self._is_over = False

    def take(self) -> int | None:
        """Return a piece to request; wait while all are being requested; None: none is missing."""
        with self._condition:
            self._condition.wait_for(lambda: self._open or not self._num_missing or self._is_over)
            return self._open.pop() if self._open and not self._is_over else None

    def put_back(self, piece: int) -> None:
        """Mark a requested piece as missing again."""
        with self._condition:
            self._open.append(piece)
            self._condition.notify()

    def note_done(self) -> None:
        """Count a received piece."""
        with self._condition:
            self._num_missing -= 1
            if not self._num_missing:
                self._condition.notify_all()

    def wait_complete(self, timeout_s: float) -> None:
        """Wait until every piece has come, or for `timeout_s`."""
        with self._condition:
            self._condition.wait_for(lambda: not self._num_missing, timeout_s)

    def give_up(self) -> None:
        """End all waits."""
        with self._condition:
            self._is_over = True
            self._condition.notify_all()

    @property
    def is_complete(self) -> bool:
        """Whether every piece has come."""
        with self._condition:
            return not self._num_missing


@dataclass(frozen=True, slots=True)
class Donor:
    """A gateway of a site that has the state."""

    name: str
    connect: Callable[[], tuple[grpc.Channel, str]]
    """Opens a connection, which the caller closes; returns it, and this side's session there."""
    num_streams: int = 1
    """Pieces requested in parallel: enough to fill the link's BDP."""


class StateFetch:
    """Fetches the state of one epoch into a folder. `run` blocks; `close` ends it from any thread.

    Each stream has one piece in flight at a time.
    """

    def __init__(
        self, donors: Sequence[Donor], epoch: int, folder: Path, *, timeout_s: float
    ) -> None:
        """Fetch from all of `donors`.

        Give up when nothing has come for `timeout_s` and no donor made progress in writing.
        """
        self._donors = donors
        self._epoch = epoch
        self._folder = folder
        self._timeout_s = timeout_s
        self._ended = threading.Event()
        self._book = PieceBook(0)
        self._lock = threading.Lock()
        self._silence = Silence(time.monotonic())
        self._is_silent = False
        """Set when nothing has come for too long."""
        self._problem: Exception | None = None
        """Exception that ended a thread; None: none did."""
        self._latest_loss = ""
        """The latest failed request: which donor, and why."""
        self.num_again = 0
        """Number of pieces requested again."""
        self.fetched_bytes = 0
        """Bytes of whole pieces that have come."""

    def run(self) -> None:
        """Fetch the whole state, or remove it all. The index is written last.

        Raises:
            PeerLostError: no donor has the state, or none answers.
            OSError: the state cannot be written.
        """
        self._note_come(0)
        watching = threading.Thread(target=self._watch, name="fetch-watch", daemon=True)
        watching.start()
        try:
            self._run()
        except BaseException as error:
            shutil.rmtree(self._folder, ignore_errors=True)
            if isinstance(error, OSError) and error.filename is None:
                error.filename = str(self._folder)  # a write names no file
            raise
        finally:
            self._ended.set()
            watching.join()

    def _run(self) -> None:
        begun_s = time.monotonic()
        self._folder.mkdir(parents=True, exist_ok=True)
        index = self._take_index()
        size = index.num_bytes[TENSORS]
        require_room(self._folder, size)
        with (self._folder / TENSORS).open("wb") as file:
            file.truncate(size)
        self._book = PieceBook(num_pieces(size))
        threads = [
            threading.Thread(
                target=self._take_from,
                args=(each, index, (self._folder / TENSORS).open("r+b")),
                name=f"fetch-{each.name}",
                daemon=True,
            )
            for each in self._donors
            for _ in range(each.num_streams)
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) and not self._ended.is_set():
            self._book.wait_complete(_AGAIN_S)
        self._book.give_up()
        if self._problem is not None:
            raise self._problem
        if not self._book.is_complete:
            total_bytes = sum(index.num_bytes.values())
            now_s = time.monotonic()
            silent_s, took_s = self._silence.lasts_s(now_s), now_s - begun_s
            why = f", nothing for {silent_s:.1f} s" if self._is_silent else ""
            why += f"; {self._latest_loss}" if self._latest_loss else ""
            raise PeerLostError(
                f"the others' state has not come as a whole: {format_size(self.fetched_bytes)} of "
                f"{format_size(total_bytes)} in {took_s:.1f} s{why}"
            )
        (self._folder / INDEX).write_bytes(index.to_bytes())

    def wait_for_other(self) -> None:
        """Wait until another gateway of the node has fetched the whole state.

        Raises:
            PeerLostError: `close` was called before.
        """
        while not (self._folder / INDEX).exists():
            if self._ended.wait(_AGAIN_S):
                raise PeerLostError("another gateway of the site has not fetched the state")

    def close(self) -> None:
        """Stop a running fetch."""
        self._ended.set()

    def _watch(self) -> None:
        """End the fetch after too long without progress; time in suspension does not count.

        Only this thread judges silence; the others may wait long for an answer.
        """
        standstills = Standstills(time.monotonic(), self._timeout_s)
        while not self._ended.wait(_AGAIN_S):
            now_s = time.monotonic()
            if stood_s := standstills.look(now_s, _AGAIN_S):
                _log.warning("was suspended for %.1f s; restarting the donors' deadline", stood_s)
                self._silence.begin_anew(now_s)
            if self._silence.lasts_s(now_s) > self._timeout_s:
                self._is_silent = True
                self._ended.set()

    def _note_again(self, why: str) -> None:
        with self._lock:
            self.num_again += 1
            self._latest_loss = why

    def _note_come(self, num_bytes: int) -> None:
        with self._lock:
            self._silence.hear(time.monotonic())
            self.fetched_bytes += num_bytes

    def _take_index(self) -> Index:
        """Ask donors in turn, repeatedly, for the index and the objects that belong to it.

        Raises:
            PeerLostError: no donor has the index.
        """
        said: dict[str, str] = {}
        done_bytes: dict[str, int] = {}
        asked, again_s = [*self._donors], _AGAIN_S
        while asked and not self._ended.is_set():
            for donor in [*asked]:
                try:
                    answer = self._ask(donor)
                except grpc.RpcError as error:
                    said[donor.name] = details(error)
                    continue
                except RemoteProtocolError as error:
                    said[donor.name] = str(error)
                    continue
                if isinstance(answer, Index):
                    return answer
                written = format_size(answer.done_bytes)
                said[donor.name] = f"it is being written, {written} so far"
                if answer.problem:
                    said[donor.name] = one_line(answer.problem)
                    asked.remove(donor)
                if answer.done_bytes > done_bytes.get(donor.name, -1):
                    done_bytes[donor.name] = answer.done_bytes
                    self._note_come(0)
            self._ended.wait(again_s)
            again_s = min(_LATER * again_s, _AGAIN_MAX_S)
        why = "; ".join(f"{name}: {each}" for name, each in said.items())
        raise PeerLostError(
            f"no state of epoch {self._epoch} could be had: {why or 'there is no other site'}"
        )

    def _ask(self, donor: Donor) -> Index | state_pb2.IndexResponse:
        """Return the index after storing its objects, or the answer that it is not ready.

        Raises:
            grpc.RpcError: the donor did not answer, or lacks an object. RemoteProtocolError: an
            object does not match the index.
        """
        with ExitStack() as stack:
            connection = _Connection(donor, stack)
            found = connection.index(self._epoch)
            if isinstance(found, Index):
                self._take_objects(connection, found)
            return found

    def _take_objects(self, connection: _Connection, index: Index) -> None:
        with (self._folder / OBJECTS).open("wb") as file:
            for piece in range(num_pieces(index.num_bytes[OBJECTS])):
                file.write(self._read(connection, OBJECTS, piece, index))
                self._note_come(0)
        self._note_come(index.num_bytes[OBJECTS])

    def _take_from(self, donor: Donor, index: Index, file: BinaryIO) -> None:
        """Request pieces from one donor until none is missing. Closes the file."""
        again_s, num_damaged = _AGAIN_S, 0
        with ExitStack() as stack, file:
            connection: _Connection | None = None
            while num_damaged <= _DAMAGED_MAX and (piece := self._book.take()) is not None:
                try:
                    connection = connection or _Connection(donor, stack)
                    data = self._read(connection, TENSORS, piece, index)
                    os.pwrite(file.fileno(), data, piece * PIECE_BYTES)
                except (grpc.RpcError, RemoteProtocolError) as error:
                    why = details(error) if isinstance(error, grpc.RpcError) else text_of(error)
                    _log.warning("piece %d from %s: %s", piece, donor.name, why)
                    num_damaged += isinstance(error, RemoteProtocolError)
                    self._book.put_back(piece)
                    self._note_again(f"{donor.name}: {why}")
                    stack.close()
                    connection = None
                    self._ended.wait(again_s)
                    again_s = min(2 * again_s, _AGAIN_MAX_S)
                    continue
                except Exception as error:  # noqa: BLE001 - a thread's root: `run` raises it
                    self._problem = error
                    self._ended.set()
                    return
                again_s = _AGAIN_S
                self._note_come(len(data))
                self._book.note_done()

    def _read(self, connection: _Connection, path: str, piece: int, index: Index) -> bytes:
        """Return a piece; wait as long as the donor says that it is not this site's turn.

        Raises:
            grpc.RpcError: the piece did not come. RemoteProtocolError: the piece does not match the
            index.
        """
        while True:
            try:
                return connection.read(self._epoch, path, piece, index)
            except grpc.RpcError as error:
                # gRPC uses the same status for a message that is too long.
                is_exhausted = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                is_early = is_exhausted and (error.details() or "").startswith(EARLY)
                if not is_early or self._ended.wait(_TURN_S):
                    raise
                self._note_come(0)


class _Connection:
    """An open connection to a donor, which ends with `stack`."""

    def __init__(self, donor: Donor, stack: ExitStack) -> None:
        channel, session = donor.connect()
        stack.enter_context(channel)
        self._stub = state_pb2_grpc.StateStub(channel)
        self._metadata = ((SESSION_KEY, session),)

    def index(self, epoch: int) -> Index | state_pb2.IndexResponse:
        """Return the index, or the answer that it is not ready."""
        request = state_pb2.IndexRequest(epoch=epoch)
        answer = self._stub.Index(request, timeout=_ANSWER_S, metadata=self._metadata)
        return Index.from_bytes(answer.index) if answer.index else answer

    def read(self, epoch: int, path: str, piece: int, index: Index) -> bytes:
        """Return a piece.

        Raises:
            grpc.RpcError: the piece did not come. RemoteProtocolError: the piece does not match the
            index.
        """
        request = state_pb2.ReadRequest(epoch=epoch, path=path, piece=piece)
        answer = self._stub.Read(request, timeout=_ANSWER_S, metadata=self._metadata)
        if digest_of(answer.data) != index.digests[path][piece]:
            raise RemoteProtocolError("it has another digest")
        return bytes(answer.data)
