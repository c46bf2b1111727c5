"""The receiving side of a transfer: fetches the training state from all other sites at once.

Donors may still be writing the state; as long as they make progress, they are asked again. One
donor gives the index, and pieces are requested from any free donor, so a fast link brings more. A
piece that is missing or corrupt is requested again; others stay. So a cut link costs only the piece
in flight.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from isthmus.protos.errors import PeerLostError, RemoteProtocolError
from isthmus.protos.exchange.v1 import state_pb2
from isthmus.protos.failure import one_line, text_of
from isthmus.sites.gateway.links.calls import Call, ask, ask_for_bytes, deadline, parsed
from isthmus.sites.gateway.links.status import CallError
from isthmus.sites.gateway.links.transport import details
from isthmus.sites.gateway.transfer.state_server import INDEX_METHOD, READ_METHOD
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
    """Tracks the missing pieces of a file, on the event loop."""

    def __init__(self, count: int) -> None:
        """Begin with all `count` pieces missing."""
        self._open = list(reversed(range(count)))
        self._num_missing = count
        self._changed = asyncio.Condition()

    async def take(self) -> int | None:
        """Return a piece to request; wait while all are being requested; None: none is missing."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._open or self.is_complete)
            return self._open.pop() if self._open else None

    async def put_back(self, piece: int) -> None:
        """Mark a requested piece as missing again."""
        async with self._changed:
            self._open.append(piece)
            self._changed.notify()

    async def note_done(self) -> None:
        """Count a received piece."""
        async with self._changed:
            self._num_missing -= 1
            if self.is_complete:
                self._changed.notify_all()

    async def wait_complete(self) -> None:
        """Wait until every piece has come."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.is_complete)

    @property
    def is_complete(self) -> bool:
        """Whether every piece has come."""
        return not self._num_missing


@dataclass(frozen=True, slots=True)
class Donor:
    """A gateway of a site that has the state."""

    name: str
    connect: Callable[[str], AbstractAsyncContextManager[Call]]
    """Makes a call of a method, by its path."""
    num_streams: int = 1
    """Pieces requested in parallel: enough to fill the link's BDP."""


class StateFetch:
    """Fetches the state of one epoch into a folder, on the event loop; to end it, cancel `run`.

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
        self._book = PieceBook(0)
        self._silence = Silence(time.monotonic())
        self._index: Index | None = None
        """None: it has not come."""
        self._said: dict[str, str] = {}
        """Why donors have no index, by their names."""
        self._latest_loss = ""
        """The latest failed request: which donor, and why."""
        self.num_again = 0
        """Number of pieces requested again."""
        self.fetched_bytes = 0
        """Bytes of whole pieces that have come."""

    async def run(self) -> None:
        """Fetch the whole state, or remove it all. The index is written last.

        Raises:
            PeerLostError: no donor has the state, or none answers.
            OSError: the state cannot be written.
        """
        try:
            await self._run()
        except BaseException as error:
            shutil.rmtree(self._folder, ignore_errors=True)
            if isinstance(error, OSError) and error.filename is None:
                error.filename = str(self._folder)  # a write names no file
            raise

    async def _run(self) -> None:
        begun_s = time.monotonic()
        self._note_come(0)
        fetching = asyncio.create_task(self._fetch(), name="fetch-state")
        try:
            is_silent = await self._is_silent_before(fetching)
        finally:
            fetching.cancel()
            await asyncio.wait([fetching])
        if not fetching.cancelled():
            fetching.result()
        if not self._book.is_complete or self._index is None:
            raise PeerLostError(self._lack(begun_s, is_silent=is_silent))
        (self._folder / INDEX).write_bytes(self._index.to_bytes())

    async def wait_for_other(self) -> None:
        """Wait until another gateway of the node has fetched the whole state."""
        while not (self._folder / INDEX).exists():  # noqa: ASYNC110 - a process writes it
            await asyncio.sleep(_AGAIN_S)

    async def _is_silent_before(self, fetching: asyncio.Task[None]) -> bool:
        """Wait for the fetch; return whether nothing has come for too long before its end.

        Time in suspension does not count.
        """
        standstills = Standstills(time.monotonic(), self._timeout_s)
        while True:
            done, _ = await asyncio.wait([fetching], timeout=_AGAIN_S)
            if done:
                return False
            now_s = time.monotonic()
            if stood_s := standstills.look(now_s, _AGAIN_S):
                _log.warning("was suspended for %.1f s; restarting the donors' deadline", stood_s)
                self._silence.begin_anew(now_s)
            if self._silence.lasts_s(now_s) > self._timeout_s:
                return True

    def _lack(self, begun_s: float, *, is_silent: bool) -> str:
        """Return why the state is not there."""
        if self._index is None:
            why = "; ".join(f"{name}: {each}" for name, each in self._said.items())
            why = why or "there is no other site"
            return f"no state of epoch {self._epoch} could be had: {why}"
        total_bytes = sum(self._index.num_bytes.values())
        now_s = time.monotonic()
        why = f", nothing for {self._silence.lasts_s(now_s):.1f} s" if is_silent else ""
        why += f"; {self._latest_loss}" if self._latest_loss else ""
        return (
            f"the others' state has not come as a whole: {format_size(self.fetched_bytes)} of "
            f"{format_size(total_bytes)} in {now_s - begun_s:.1f} s{why}"
        )

    async def _fetch(self) -> None:
        """Fetch the index, and then all pieces, as far as donors have them."""
        self._folder.mkdir(parents=True, exist_ok=True)
        index = await self._take_index()
        if index is None:
            return
        size = index.num_bytes[TENSORS]
        require_room(self._folder, size)
        with (self._folder / TENSORS).open("wb") as file:
            file.truncate(size)
        self._book, self._index = PieceBook(num_pieces(size)), index
        taking = [
            asyncio.create_task(self._take_from(donor, index), name=f"fetch-{donor.name}")
            for donor in self._donors
            for _ in range(donor.num_streams)
        ]
        complete = asyncio.create_task(self._book.wait_complete())
        everybody = asyncio.gather(*taking)
        ends: list[asyncio.Future[Any]] = [everybody, complete]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if everybody.done():
                everybody.result()
        finally:
            for task in (*taking, complete):
                task.cancel()
            await asyncio.gather(*ends, return_exceptions=True)

    def _note_again(self, why: str) -> None:
        self.num_again += 1
        self._latest_loss = why

    def _note_come(self, num_bytes: int) -> None:
        self._silence.hear(time.monotonic())
        self.fetched_bytes += num_bytes

    async def _take_index(self) -> Index | None:
        """Ask donors in turn, repeatedly, for the index and the objects that belong to it.

        Returns:
            None: no donor will ever have it.
        """
        done_bytes: dict[str, int] = {}
        asked, again_s = [*self._donors], _AGAIN_S
        while asked:
            for donor in [*asked]:
                try:
                    answer = await self._ask(donor)
                except CallError as error:
                    self._said[donor.name] = details(error)
                    continue
                except RemoteProtocolError as error:
                    self._said[donor.name] = str(error)
                    continue
                if isinstance(answer, Index):
                    return answer
                written = format_size(answer.done_bytes)
                self._said[donor.name] = f"it is being written, {written} so far"
                if answer.problem:
                    self._said[donor.name] = one_line(answer.problem)
                    asked.remove(donor)
                if answer.done_bytes > done_bytes.get(donor.name, -1):
                    done_bytes[donor.name] = answer.done_bytes
                    self._note_come(0)
            await asyncio.sleep(again_s)
            again_s = min(_LATER * again_s, _AGAIN_MAX_S)
        return None

    async def _ask(self, donor: Donor) -> Index | state_pb2.IndexResponse:
        """Return the index after storing its objects, or the answer that it is not ready.

        Raises:
            CallError: the donor did not answer, or lacks an object.
            RemoteProtocolError: an object does not match the index.
        """
        async with AsyncExitStack() as stack:
            connection = _Connection(donor, stack)
            found = await connection.index(self._epoch)
            if isinstance(found, Index):
                await self._take_objects(connection, found)
            return found

    async def _take_objects(self, connection: _Connection, index: Index) -> None:
        with (self._folder / OBJECTS).open("wb") as file:
            for piece in range(num_pieces(index.num_bytes[OBJECTS])):
                file.write(await self._read(connection, OBJECTS, piece, index))
                self._note_come(0)
        self._note_come(index.num_bytes[OBJECTS])

    async def _take_from(self, donor: Donor, index: Index) -> None:
        """Request pieces from one donor until none is missing."""
        again_s, num_damaged = _AGAIN_S, 0
        async with AsyncExitStack() as stack:
            connection = _Connection(donor, stack)
            while num_damaged <= _DAMAGED_MAX and (piece := await self._book.take()) is not None:
                try:
                    data = await self._read(connection, TENSORS, piece, index)
                    await asyncio.to_thread(self._write, data, piece)
                except (CallError, RemoteProtocolError) as error:
                    why = details(error) if isinstance(error, CallError) else text_of(error)
                    _log.warning("piece %d from %s: %s", piece, donor.name, why)
                    num_damaged += isinstance(error, RemoteProtocolError)
                    await self._book.put_back(piece)
                    self._note_again(f"{donor.name}: {why}")
                    await stack.aclose()
                    connection = _Connection(donor, stack)
                    await asyncio.sleep(again_s)
                    again_s = min(2 * again_s, _AGAIN_MAX_S)
                    continue
                again_s = _AGAIN_S
                self._note_come(len(data))
                await self._book.note_done()

    def _write(self, data: bytes, piece: int) -> None:
        # Opened each time: if the fetch is cancelled meanwhile, nobody waits for this.
        with (self._folder / TENSORS).open("r+b") as file:
            os.pwrite(file.fileno(), data, piece * PIECE_BYTES)

    async def _read(self, connection: _Connection, path: str, piece: int, index: Index) -> bytes:
        """Return a piece; wait as long as the donor says that it is not this site's turn.

        Raises:
            CallError: the piece did not come.
            RemoteProtocolError: the piece does not match the index.
        """
        while (data := await connection.read(self._epoch, path, piece, index)) is None:
            self._note_come(0)
            await asyncio.sleep(_TURN_S)
        return data


class _Connection:
    """A connection to a donor, made when it is needed, which ends with `stack`."""

    def __init__(self, donor: Donor, stack: AsyncExitStack) -> None:
        self._donor = donor
        self._stack = stack
        self._reading: Call | None = None

    async def index(self, epoch: int) -> Index | state_pb2.IndexResponse:
        """Return the index, or the answer that it is not ready."""
        request = state_pb2.IndexRequest(epoch=epoch)
        async with deadline(_ANSWER_S), self._donor.connect(INDEX_METHOD) as call:
            answer = await ask(call, request, state_pb2.IndexResponse, is_last=True)
        return Index.from_bytes(answer.index) if answer.index else answer

    async def read(self, epoch: int, path: str, piece: int, index: Index) -> bytes | None:
        """Return a piece; None: it is not this site's turn yet.

        Raises:
            CallError: the piece did not come.
            RemoteProtocolError: the piece does not match the index.
        """
        request = state_pb2.ReadRequest(epoch=epoch, path=path, piece=piece)
        async with deadline(_ANSWER_S):
            if self._reading is None:
                connecting = self._donor.connect(READ_METHOD)
                self._reading = await self._stack.enter_async_context(connecting)
            message = await ask_for_bytes(self._reading, request)
        return await asyncio.to_thread(_piece_in, message, index.digests[path][piece])


def _piece_in(message: memoryview, digest: int) -> bytes | None:
    """Return the piece in an answer; None: it says that it is too early.

    Raises:
        CallError: the answer cannot be read.
        RemoteProtocolError: the piece has another digest.
    """
    answer = parsed(message, state_pb2.ReadResponse)
    data: bytes = answer.data  # a copy each time
    if answer.wait_s > 0 and not data:
        return None
    if digest_of(data) != digest:
        raise RemoteProtocolError("it has another digest")
    return data
