"""The taking side of a transfer: fetches the training state from all other sites at once.

They may still be writing it: as long as they get on with that, they are asked again. What the index
says is known from one of them, and each piece is asked of whoever is free: so a fast link brings
more of them. A piece that does not come, or comes damaged, is asked for again; those that have come
stay. So a link that is cut costs the piece that was on its way.
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
from isthmus.protos.failure import one_line
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
"""An answer that takes longer is asked for again."""
_AGAIN_S: Final = 0.05
_AGAIN_MAX_S: Final = 1.0
_TURN_S: Final = 0.5
"""After so long it is asked again whose turn has not come."""
_DAMAGED_MAX: Final = 3
"""Whoever sends more damaged pieces has another state, and is not asked again."""


class PieceBook:
    """Which pieces of a file are still to be had. All methods may be called from any thread."""

    def __init__(self, count: int) -> None:
        """All of `count` pieces are."""
        self._open = list(reversed(range(count)))
        self._num_missing = count
        self._condition = threading.Condition()
        self._is_over = False

    def take(self) -> int | None:
        """Return a piece to ask for, waiting while others ask for all; None: there are no more."""
        with self._condition:
            self._condition.wait_for(lambda: self._open or not self._num_missing or self._is_over)
            return self._open.pop() if self._open and not self._is_over else None

    def put_back(self, piece: int) -> None:
        """A piece did not come: it is asked for again."""
        with self._condition:
            self._open.append(piece)
            self._condition.notify()

    def note_done(self) -> None:
        """A piece has come."""
        with self._condition:
            self._num_missing -= 1
            if not self._num_missing:
                self._condition.notify_all()

    def wait_complete(self, timeout_s: float) -> None:
        """Return when every piece has come, or after `timeout_s`."""
        with self._condition:
            self._condition.wait_for(lambda: not self._num_missing, timeout_s)

    def give_up(self) -> None:
        """Let everybody go who waits."""
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
    """Opens a connection, which the caller closes; returns it, and the session's name there."""
    num_streams: int = 1
    """Pieces that are asked for at once: as many as the link holds in a round trip."""


class StateFetch:
    """Fetches the state of one epoch into a folder. `run` blocks; `close` ends it from any thread.

    One piece of each stream is on its way at a time.
    """

    def __init__(
        self, donors: Sequence[Donor], epoch: int, folder: Path, *, timeout_s: float
    ) -> None:
        """Fetch from all of `donors`.

        Give up when nothing has come for `timeout_s`, and nobody has got on with writing it.
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
        """Nothing has come for too long."""
        self._problem: Exception | None = None
        """What ended a thread."""
        self._latest_loss = ""
        """Who did not give the latest piece that did not come, and why."""
        self.num_again = 0
        """Pieces that were asked for again."""
        self.fetched_bytes = 0
        """Bytes of whole pieces that have come."""

    def run(self) -> None:
        """Fetch the whole state, or keep nothing of it. The index is written last.

        Raises:
            PeerLostError: nobody has it, or answers any more.
            OSError: it cannot be written.
        """
        self._note_come(0)
        watching = threading.Thread(target=self._watch, name="fetch-watch", daemon=True)
        watching.start()
        try:
            self._run()
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
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
        """Wait until another gateway of the site has fetched all of it.

        Raises:
            PeerLostError: it was ended before.
        """
        while not (self._folder / INDEX).exists():
            if self._ended.wait(_AGAIN_S):
                raise PeerLostError("another gateway of the site has not fetched the state")

    def close(self) -> None:
        """End a fetch that goes on."""
        self._ended.set()

    def _watch(self) -> None:
        """End the fetch when nothing has come for too long, while this process did not stand still.

        Only here silence is judged: the other threads may wait long for an answer.
        """
        standstills = Standstills(time.monotonic(), self._timeout_s)
        while not self._ended.wait(_AGAIN_S):
            now_s = time.monotonic()
            if stood_s := standstills.look(now_s, _AGAIN_S):
                _log.warning("stood still for %.1f s; donors are given time anew", stood_s)
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
        """Ask one donor after another, again and again, for the index and the objects that fit it.

        Raises:
            PeerLostError: nobody has it.
        """
        said: dict[str, str] = {}
        done_bytes: dict[str, int] = {}
        asked, again_s = [*self._donors], _AGAIN_S
        while asked and not self._ended.is_set():
            for donor in [*asked]:
                try:
                    found = self._ask(donor)
                except grpc.RpcError as error:
                    said[donor.name] = details(error)
                    continue
                except RemoteProtocolError as error:
                    said[donor.name] = str(error)
                    continue
                if isinstance(found, Index):
                    return found
                written = format_size(found.done_bytes)
                said[donor.name] = f"it is being written, {written} so far"
                if found.problem:
                    said[donor.name] = one_line(found.problem)
                    asked.remove(donor)
                if found.done_bytes > done_bytes.get(donor.name, -1):
                    done_bytes[donor.name] = found.done_bytes
                    self._note_come(0)
            self._ended.wait(again_s)
            again_s = min(2 * again_s, _AGAIN_MAX_S)
        why = "; ".join(f"{name}: {each}" for name, each in said.items())
        raise PeerLostError(
            f"no state of epoch {self._epoch} could be had: {why or 'there is no other site'}"
        )

    def _ask(self, donor: Donor) -> Index | state_pb2.IndexResponse:
        """Return the index, and take the objects that fit it; or the answer that it is not there.

        Raises:
            grpc.RpcError: there is no answer, or none of them.
            RemoteProtocolError: they are not what the index says.
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
        """Ask one donor for pieces until there are no more. Closes the file."""
        again_s, num_damaged = _AGAIN_S, 0
        with ExitStack() as stack, file:
            connection: _Connection | None = None
            while num_damaged <= _DAMAGED_MAX and (piece := self._book.take()) is not None:
                try:
                    connection = connection or _Connection(donor, stack)
                    data = self._read(connection, TENSORS, piece, index)
                    os.pwrite(file.fileno(), data, piece * PIECE_BYTES)
                except (grpc.RpcError, RemoteProtocolError) as error:
                    why = details(error) if isinstance(error, grpc.RpcError) else str(error)
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
        """Return a piece; as long as a donor says that it is not the turn of this site, wait.

        Raises:
            grpc.RpcError: it did not come.
            RemoteProtocolError: it is not what the index says.
        """
        while True:
            try:
                return connection.read(self._epoch, path, piece, index)
            except grpc.RpcError as error:
                # gRPC itself says so, too: of a message that is too long.
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
        """Return what there is to be had, or the answer that it is not there."""
        request = state_pb2.IndexRequest(epoch=epoch)
        answer = self._stub.Index(request, timeout=_ANSWER_S, metadata=self._metadata)
        return Index.from_bytes(answer.index) if answer.index else answer

    def read(self, epoch: int, path: str, piece: int, index: Index) -> bytes:
        """Return a piece.

        Raises:
            grpc.RpcError: it did not come.
            RemoteProtocolError: it is not what the index says.
        """
        request = state_pb2.ReadRequest(epoch=epoch, path=path, piece=piece)
        answer = self._stub.Read(request, timeout=_ANSWER_S, metadata=self._metadata)
        if digest_of(answer.data) != index.digests[path][piece]:
            raise RemoteProtocolError("it has another digest")
        return bytes(answer.data)
