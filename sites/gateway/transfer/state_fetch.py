"""The taking side of a transfer: fetches a checkpoint from several sites at once, piece by piece.

Each donor has a thread, which asks for one piece after another: so a fast link brings more of them.
A piece that does not come, or comes damaged, is asked for again, of any donor. What has come is on
disk with a list of its pieces; a transfer that is begun again goes on from there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

import grpc
import xxhash

from protos.checkpoint.manifest import MANIFEST, Manifest
from protos.checkpoint.store import StoredCheckpoint
from protos.errors import BadCheckpointError, IsthmusError, PeerLostError, RemoteProtocolError
from protos.exchange.v1 import state_pb2, state_pb2_grpc
from sites.gateway.links.transport import SESSION_KEY, details
from sites.gateway.transfer.state_server import PIECE_BYTES

_log = logging.getLogger(__name__)

_PIECES: Final = ".pieces"
"""The list of pieces that have come, a line each: file and offset."""
_PIECE_S: Final = 60.0
"""A piece that takes longer is asked for again."""
_AGAIN_S: Final = 0.2
_AGAIN_MAX_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a file."""

    path: str
    offset: int
    num_bytes: int


class PieceBook:
    """Which pieces of a checkpoint are still to be had. All methods may be called from any thread.

    Pure, but for its lock.
    """

    def __init__(self, manifest: Manifest, have: frozenset[tuple[str, int]] = frozenset()) -> None:
        """`have` are the files and offsets of pieces that came before."""
        self._open = [
            Piece(each.path, offset, min(PIECE_BYTES, each.num_bytes - offset))
            for each in manifest.files
            for offset in range(0, each.num_bytes, PIECE_BYTES)
            if (each.path, offset) not in have
        ]
        self._open.reverse()
        self._num_missing = len(self._open)
        self._condition = threading.Condition()
        self._is_over = False

    def take(self) -> Piece | None:
        """Return a piece to ask for, waiting while others ask for all; None: there are no more."""
        with self._condition:
            self._condition.wait_for(lambda: self._open or not self._num_missing or self._is_over)
            return self._open.pop() if self._open and not self._is_over else None

    def put_back(self, piece: Piece) -> None:
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
    """A gateway of a site that may have the checkpoint."""

    site: str
    session: str
    open_channel: Callable[[], grpc.Channel]
    bytes_per_s: float
    """The most that the transfer may take of the link from there; infinity: all."""


class StateFetch:
    """Fetches one checkpoint into a folder. `run` blocks; `close` ends it from any thread."""

    def __init__(self, donors: Sequence[Donor], store: Path, *, timeout_s: float) -> None:
        """Fetch from any of `donors`; give up when no piece has come for `timeout_s`."""
        self._donors = donors
        self._store = store
        self._timeout_s = timeout_s
        self._ended = threading.Event()
        self._book: PieceBook | None = None
        self._lock = threading.Lock()
        """Guards the list of pieces and the time of the latest."""
        self._latest_s = 0.0
        self.fetched_bytes = 0
        """What came over links, pieces that came twice included."""

    def run(self, name: str = "") -> tuple[str, Manifest]:
        """Fetch a checkpoint, the newest where no name is given; return its name and manifest.

        Raises:
            PeerLostError: no donor has it, or none answers.
            BadCheckpointError: what came is not what the manifest says.
            OSError: it cannot be written.
        """
        name, written = self._manifest(name)
        manifest = Manifest.from_bytes(written, name)
        for each in manifest.files:
            _check_path(each.path)
        target = self._store / name
        if (target / MANIFEST).is_file():
            return name, StoredCheckpoint(str(target)).verified()
        part = self._store / f".{name}.part"
        part.mkdir(parents=True, exist_ok=True)
        for each in manifest.files:
            (part / each.path).parent.mkdir(parents=True, exist_ok=True)
            with (part / each.path).open("ab") as file:
                file.truncate(each.num_bytes)
        self._book = PieceBook(manifest, _pieces_in(part / _PIECES))
        self._latest_s = time.monotonic()
        self._fetch(name, part)
        (part / MANIFEST).write_bytes(written)
        (part / _PIECES).unlink(missing_ok=True)
        try:
            StoredCheckpoint(str(part)).verified()
        except BadCheckpointError:
            (part / MANIFEST).unlink(missing_ok=True)
            raise
        part.rename(target)
        return name, manifest

    def close(self) -> None:
        """End a fetch that goes on; what has come stays, and another goes on from there."""
        self._ended.set()
        if self._book is not None:
            self._book.give_up()

    def _manifest(self, name: str) -> tuple[str, bytes]:
        """Ask one donor after another, again and again, for a manifest."""
        deadline_s, why = time.monotonic() + self._timeout_s, "no donor"
        again_s = _AGAIN_S
        while not self._ended.is_set() and time.monotonic() < deadline_s:
            for donor in self._donors:
                try:
                    with donor.open_channel() as channel:
                        answer = state_pb2_grpc.StateStub(channel).Manifest(
                            state_pb2.ManifestRequest(checkpoint=name),
                            timeout=min(_PIECE_S, self._timeout_s),
                            metadata=((SESSION_KEY, donor.session),),
                        )
                    if not _is_plain(answer.checkpoint) or (name and answer.checkpoint != name):
                        raise RemoteProtocolError(f"site {donor.site} sent another checkpoint")
                except grpc.RpcError as error:
                    why = f"site {donor.site}: {details(error)}"
                    continue
                return answer.checkpoint, answer.manifest
            self._ended.wait(again_s)
            again_s = min(2 * again_s, _AGAIN_MAX_S)
        raise PeerLostError(f"no checkpoint of another site could be had: {why}")

    def _fetch(self, name: str, part: Path) -> None:
        assert self._book is not None
        threads = [
            threading.Thread(
                target=self._take_from, args=(donor, name, part), name=f"fetch-{donor.site}"
            )
            for donor in self._donors
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            for thread in threads:
                thread.join(_AGAIN_S)
            if time.monotonic() - self._latest_s > self._timeout_s:
                self._book.give_up()
                self._ended.set()
        if not self._book.is_complete:
            raise PeerLostError(
                f"{name}: no piece of it came for {self._timeout_s:g} s"
                if time.monotonic() - self._latest_s > self._timeout_s
                else f"{name}: the transfer was ended"
            )

    def _take_from(self, donor: Donor, name: str, part: Path) -> None:
        """Ask one donor for pieces until there are no more."""
        assert self._book is not None
        again_s = _AGAIN_S
        with contextlib.ExitStack() as stack:
            channel = stack.enter_context(donor.open_channel())
            while not self._ended.is_set() and (piece := self._book.take()) is not None:
                begun_s = time.monotonic()
                try:
                    data = _read(channel, donor, name, piece)
                except (grpc.RpcError, IsthmusError) as error:
                    self._book.put_back(piece)
                    why = details(error) if isinstance(error, grpc.RpcError) else str(error)
                    _log.warning("%s of %s from site %s: %s", piece, name, donor.site, why)
                    self._ended.wait(again_s)
                    again_s = min(2 * again_s, _AGAIN_MAX_S)
                    stack.close()
                    channel = stack.enter_context(donor.open_channel())
                    continue
                again_s = _AGAIN_S
                self._keep(part, piece, data)
                self._ended.wait(
                    max(0.0, begun_s + len(data) / donor.bytes_per_s - time.monotonic())
                )

    def _keep(self, part: Path, piece: Piece, data: bytes) -> None:
        assert self._book is not None
        with (part / piece.path).open("r+b") as file:
            file.seek(piece.offset)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        with self._lock:
            self._latest_s = time.monotonic()
            self.fetched_bytes += len(data)
            with (part / _PIECES).open("a") as pieces:
                pieces.write(f"{piece.offset} {piece.path}\n")
        self._book.note_done()


def _read(channel: grpc.Channel, donor: Donor, name: str, piece: Piece) -> bytes:
    """Return a piece.

    Raises:
        grpc.RpcError: it did not come.
        RemoteProtocolError: it came damaged.
    """
    answer = state_pb2_grpc.StateStub(channel).Read(
        state_pb2.ReadRequest(
            checkpoint=name, path=piece.path, offset=piece.offset, num_bytes=piece.num_bytes
        ),
        timeout=_PIECE_S,
        metadata=((SESSION_KEY, donor.session),),
    )
    data = answer.data
    if len(data) != piece.num_bytes or xxhash.xxh3_64_intdigest(data) != answer.checksum:
        raise RemoteProtocolError("a piece came damaged")
    return bytes(data)


def _pieces_in(path: Path) -> frozenset[tuple[str, int]]:
    """Return the files and offsets of the pieces that came before; a torn last line is none."""
    found = set()
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text().splitlines(keepends=True):
            offset, _, name = line.partition(" ")
            if line.endswith("\n") and offset.isdigit():
                found.add((name.rstrip("\n"), int(offset)))
    return frozenset(found)


def _check_path(path: str) -> None:
    """Refuse what could lead out of the folder.

    Raises:
        BadCheckpointError: it could.
    """
    pure = PurePosixPath(path)
    if pure.is_absolute() or not pure.parts or ".." in pure.parts or "\\" in path:
        raise BadCheckpointError(f"{path!r} is no path of a checkpoint's file")


def _is_plain(name: str) -> bool:
    return bool(name) and "/" not in name and not name.startswith(".")
