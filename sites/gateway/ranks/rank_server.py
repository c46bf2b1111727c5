"""The gateway's Unix socket: ranks submit shards in shared memory and get results back."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from isthmus.protos import metrics
from isthmus.protos.errors import IsthmusError, LocalProtocolError, NonFiniteError, failure_of
from isthmus.protos.failure import Failure, text_of
from isthmus.protos.limits import LOCAL_MESSAGE_BYTES
from isthmus.sites.codecs.codec import Floats
from isthmus.sites.gateway.config import GatewayConfig
from isthmus.sites.gateway.ranks.rank_encoding import RankEncoding
from isthmus.sites.local.chunk_grid import shard_numel, shard_of
from isthmus.sites.local.rank_messages import (
    FROM_RANK,
    Digest,
    Failed,
    FromGateway,
    FromRank,
    Handed,
    Join,
    KeepResiduals,
    Leave,
    Members,
    Metric,
    Moved,
    Reduce,
    Reduced,
    Region,
    RestoreResiduals,
    RoundEnds,
    StateProgress,
    Welcome,
    encode,
)
from isthmus.sites.local.regions import map_received

_log = logging.getLogger(__name__)

ATTACH: Final = "its script wants `site.attach(model, optimizer)` before the first step"
"""Advice for a script that never attached its model."""
_JOIN_S = 0.5
_LAST_WORDS_S = 2.0
"""Time for a rank to read the last messages before its connection is closed."""
_EARLIER_ENDS_S = 1.0
"""Time to read what other ranks sent before one of them went away."""
_PATH_BYTES_MAX: Final = 107
"""The kernel's limit on a Unix socket's path."""
_DESCRIPTORS_MAX: Final = 4


class RankConnection:
    """The connection of one rank: its socket and shared memory regions."""

    def __init__(self, accepted: socket.socket) -> None:
        self.regions: dict[int, Floats] = {}
        self._socket = accepted
        self._sending = threading.Condition()
        self._unsent: deque[bytes] = deque()
        """Messages that the socket had no room for: about one per finished bucket."""
        self._sender: threading.Thread | None = None
        """Thread that sends `_unsent`; None while that is empty."""

    def receive(self) -> FromRank | None:
        """Return the next message; None at the end. A region's memory is mapped before.

        Raises:
            LocalProtocolError: the bytes are no message, or a region comes without its memory.
        """
        try:
            data, descriptors, flags, _ = socket.recv_fds(
                self._socket, LOCAL_MESSAGE_BYTES, _DESCRIPTORS_MAX
            )
        except OSError:
            return None
        try:
            if not data:
                return None
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise LocalProtocolError(f"a message of more than {LOCAL_MESSAGE_BYTES} bytes")
            message = FROM_RANK.read(data)
            if isinstance(message, Region):
                self.regions[message.region] = map_received(message, descriptors)
            return message
        finally:
            for each in descriptors:
                os.close(each)

    @property
    def has_unread(self) -> bool:
        """Whether a message, or the end of the connection, waits to be read."""
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLIN)
        except ValueError:
            return False  # closed
        return bool(poll.poll(0))

    def shard(self, message: Reduce, count: int) -> Floats:
        """Return the rank's part of a bucket: float32, shape (count,), a view of the named region.

        Raises:
            LocalProtocolError: the region does not exist, or is too short.
        """
        region = self.regions.get(message.region)
        if region is None:
            raise LocalProtocolError(f"reduce.region: no region {message.region} was sent")
        end = message.offset + count
        if end > len(region):
            raise LocalProtocolError(
                f"reduce.offset: elements {message.offset} to {end} of a region of {len(region)}"
            )
        return region[message.offset : end]

    def send(self, message: FromGateway) -> None:
        """Send a message without blocking; the reading thread notices a rank that has gone.

        The calling thread may also receive frames, so it must not wait for a rank that does not
        read (a stopped process, say). A socket holds some 150 results; further ones are queued.
        """
        data = encode(message)
        with self._sending:
            if self._sender is None and self._is_sent(data, socket.MSG_DONTWAIT):
                return
            self._unsent.append(data)
            if self._sender is None:
                self._sender = threading.Thread(target=self._send_rest, name="slow", daemon=True)
                self._sender.start()

    def wait_sent(self, timeout_s: float) -> None:
        """Wait until all messages are sent, or for `timeout_s`."""
        with self._sending:
            self._sending.wait_for(lambda: self._sender is None, timeout_s)

    def _send_rest(self) -> None:
        while True:
            with self._sending:
                if not self._unsent:
                    self._sender = None
                    self._sending.notify_all()
                    return
                data = self._unsent.popleft()
            self._is_sent(data, 0)

    def _is_sent(self, data: bytes, flags: int) -> bool:
        """Send a message, or drop it if the rank has gone. False: the socket has no room now."""
        try:
            self._socket.send(data, socket.MSG_NOSIGNAL | flags)
        except BlockingIOError:
            return False
        except OSError as error:
            _log.warning("a message to a rank was not taken: %s", text_of(error))
            self.shut()
            with self._sending:
                self._unsent.clear()
        return True

    def shut(self, how: int = socket.SHUT_RDWR) -> None:
        """Shut down the socket, which ends waits on one end or both."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(how)

    def close(self) -> None:
        """Close the socket. A region is unmapped with its last view."""
        self.wait_sent(_LAST_WORDS_S)
        self.shut()
        self._socket.close()
        self.regions.clear()


class Ranks(Protocol):
    """Receives the ranks' messages. Methods are called on the ranks' threads."""

    def joined(self, ranks: list[int]) -> None:
        """All ranks of the gateway have connected."""

    def post(self, rank: int, request: Reduce, values: Floats) -> None:
        """A rank has submitted its part of a bucket, added up over the site."""

    def handed(self, rank: int, round_: int) -> None:
        """A rank's script has submitted a bucket."""

    def moved(self, rank: int) -> None:
        """A rank does not hang, though it has submitted nothing."""

    def state_progress(self, rank: int, progress: StateProgress) -> None:
        """A rank reports progress or failure in writing its part of the state for others."""

    def keep_residuals(self, rank: int, path: Path) -> None:
        """Write the residuals of a rank's shards to a file."""

    def restore_residuals(self, path: Path) -> None:
        """Load residuals from a file.

        Raises:
            LocalProtocolError: the file is not a valid residual file.
        """

    def round_ends(self, message: RoundEnds) -> None:
        """A rank reports that a round ends: to the other sites, or to the ranks of this one."""

    def passed(self, message: Metric | Digest) -> None:
        """Pass a message on to the agent."""

    def rank_left(self, rank: int) -> None:
        """A rank has left cleanly."""

    def left(self) -> None:
        """All ranks of the gateway have left cleanly."""

    def fail(self, failure: Failure) -> None:
        """A rank is lost, or broke the protocol."""


class LocalServer:
    """Accepts the gateway's ranks, a thread each."""

    def __init__(self, config: GatewayConfig, ranks: Ranks) -> None:
        self._config = config
        self._ranks = ranks
        self.encoding = RankEncoding(config)
        """The codecs offered to ranks; final once all ranks have joined."""
        num_ranks = config.ranks_per_gateway[config.site_index]
        first_rank = config.gateway * num_ranks
        self._expected = range(first_rank, first_rank + num_ranks)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        """Notified when the end of a rank's connection has been handled."""
        self._connections: dict[int, RankConnection] = {}
        self._strangers: set[RankConnection] = set()
        self._joined: set[int] = set()
        self._left: set[int] = set()
        self._closed = False
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Listen.

        Raises:
            OSError: the path cannot be bound.
        """
        path = self._config.socket_path
        if len(os.fsencode(path)) > _PATH_BYTES_MAX:
            raise OSError(
                f"{path}: a socket's path has at most {_PATH_BYTES_MAX} bytes: "
                "use a shorter home folder"
            )
        Path(path).unlink(missing_ok=True)
        try:
            self._listener.bind(path)
        except OSError as error:
            raise OSError(f"{path}: {error.strerror}") from error
        self._listener.listen(len(self._expected) + 4)
        self._start(self._accept, "accept")

    def reduced(self, rank: int, reduced: Reduced) -> None:
        """Send a rank the result of its part of a bucket."""
        with self._lock:
            connection = self._connections.get(rank)
        if connection is not None:
            connection.send(reduced)

    def tell_all(self, message: Members | RoundEnds) -> None:
        """Tell every rank who takes part in the run, or that a round ends."""
        with self._lock:
            connections = list(self._connections.values())
        for connection in connections:
            connection.send(message)

    def fail_all(self, failure: Failure) -> None:
        """Tell every rank that no collective will complete any more."""
        with self._lock:
            self._closed = True
            connections = list(self._connections.values())
        for connection in connections:
            connection.send(Failed(failure=failure))

    def close(self) -> None:
        """End all connections and remove the socket."""
        with self._lock:
            self._closed = True
            connections = [*self._connections.values(), *self._strangers]
        # A blocked accept or receive ends with shutdown, not with close.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        Path(self._config.socket_path).unlink(missing_ok=True)
        deadline_s = time.monotonic() + _LAST_WORDS_S
        for connection in connections:
            connection.wait_sent(max(0.0, deadline_s - time.monotonic()))
        # First only our direction: with unread bytes, the rank would see a reset in place of the
        # last message, which gives the reason.
        for how in (socket.SHUT_WR, socket.SHUT_RDWR):
            for connection in connections:
                connection.shut(how)
            deadline_s = time.monotonic() + _JOIN_S
            for thread in self._threads:
                thread.join(max(0.0, deadline_s - time.monotonic()))

    # ---------------------------------------------------------------- connections

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                return  # closed
            connection = RankConnection(accepted)
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._strangers.add(connection)
            self._start(functools.partial(self._serve, connection), "rank")

    def _serve(self, connection: RankConnection) -> None:
        """Handle one rank's messages until its connection ends."""
        rank: int | None = None
        try:
            rank = self._admit(connection)
            while rank is not None:
                message = connection.receive()
                if message is None or isinstance(message, Leave):
                    self._end(rank, message)
                    return
                self._handle(rank, connection, message)
        except IsthmusError as error:
            self._reject(rank, connection, error)
        except Exception as error:  # noqa: BLE001 - a thread's root: reported, ends the gateway
            _log.exception("a rank's thread ended")
            self._ranks.fail(failure_of(error, self._config.site))
        finally:
            with self._lock:
                self._strangers.discard(connection)
                if rank is not None:
                    self._connections.pop(rank, None)
                self._changed.notify_all()
            connection.close()

    def _admit(self, connection: RankConnection) -> int | None:
        """Read the join message and return the rank; None if the connection ended first.

        Raises:
            LocalProtocolError: the rank may not join.
        """
        message = connection.receive()
        if message is None:
            return None
        if not isinstance(message, Join):
            raise LocalProtocolError("the first message must be a join")
        config = self._config
        if message.generation != config.generation:
            raise LocalProtocolError(
                f"rank {message.rank} belongs to generation {message.generation}; this is "
                f"{config.generation}"
            )
        if message.rank not in self._expected:
            raise LocalProtocolError(
                f"rank {message.rank} is not of this gateway: {self._expected}"
            )
        with self._lock:
            if message.rank in self._joined:
                raise LocalProtocolError(f"rank {message.rank} has joined before")
            self._strangers.discard(connection)
            self._connections[message.rank] = connection
            self._joined.add(message.rank)
            if message.encodes:
                self.encoding.take(message.rank)
            complete = len(self._joined) == len(self._expected)  # some may have left already
        connection.send(
            Welcome(
                site=config.site,
                site_index=config.site_index,
                sites=config.sites,
                ranks_per_site=config.ranks_per_site,
                verify_every=config.verify_every,
                config_hash=config.config_hash,
                encoding=self.encoding.offer,
                ranks_per_gateway=config.ranks_per_gateway[config.site_index],
            )
        )
        if complete:
            self._ranks.joined(list(self._expected))
        return message.rank

    def _handle(self, rank: int, connection: RankConnection, message: FromRank) -> None:
        match message:
            case Region():
                pass  # The connection has mapped it.
            case Reduce():
                self._ranks.post(rank, message, self._shard(rank, connection, message))
            case Handed():
                self._ranks.handed(rank, message.round)
            case Moved():
                self._ranks.moved(rank)
            case StateProgress():
                self._ranks.state_progress(rank, message)
            case KeepResiduals():
                self._ranks.keep_residuals(rank, Path(message.path))
            case RestoreResiduals():
                self._ranks.restore_residuals(Path(message.path))
            case RoundEnds():
                self._ranks.round_ends(message)
            case Metric(kind=metrics.NON_FINITE) if self._config.non_finite == "stop":
                raise NonFiniteError(message.labels.get(metrics.REASON, ""))
            case Metric() | Digest():
                self._ranks.passed(dataclasses.replace(message, rank=rank))
            case _:
                raise LocalProtocolError("a rank joins once")

    def _shard(self, rank: int, connection: RankConnection, message: Reduce) -> Floats:
        sharing = message.sharing(self._config.ranks_per_site)[self._config.site_index]
        ranks: Sequence[int] = range(sharing) if isinstance(sharing, int) else sharing
        if rank not in ranks:
            raise LocalProtocolError(f"reduce.participants: rank {rank} is none of them: {ranks}")
        # Check before the grid is made: an absurd bucket would have an absurd grid.
        size = shard_numel(message.numel, len(ranks))
        _, count = shard_of(message.numel, size, ranks.index(rank))
        values = connection.shard(message, count)
        self.encoding.check(rank, message)
        return values

    def _end(self, rank: int, leave: Leave | None) -> None:
        """Handle the end of a rank's connection: `leave`, or None if it sent none."""
        with self._lock:
            if self._closed:
                return
            self._left.add(rank)
            complete = len(self._left) == len(self._expected)
        if leave is None:
            self._await_earlier_ends()
            self._ranks.fail(
                Failure(
                    code="RANK_LOST",
                    message=f"rank {rank} of site {self._config.site} went away without leaving",
                    site=self._config.site,
                    rank=rank,
                    is_collateral=True,  # the rank's exit status says more
                )
            )
            return
        if not leave.has_averaged:
            self._ranks.fail(
                Failure(
                    code="NEVER_ATTACHED",
                    message=f"rank {rank} of site {self._config.site} joined the run, and ended "
                    f"without having averaged anything with the other sites: {ATTACH}",
                    site=self._config.site,
                    rank=rank,
                )
            )
            return
        self._ranks.rank_left(rank)
        if complete:
            self._ranks.left()

    def _await_earlier_ends(self) -> None:
        """Wait until earlier messages of other ranks are read, so that ends are reported in order.

        A rank that loses another ends soon after it. The first one's end is in the kernel by then,
        though its reading thread may not have run yet.
        """
        with self._changed:
            unread = [
                (rank, connection)
                for rank, connection in self._connections.items()
                if rank not in self._left and connection.has_unread
            ]
            deadline_s = time.monotonic() + _EARLIER_ENDS_S
            while time.monotonic() < deadline_s and any(
                rank in self._connections and (rank in self._left or connection.has_unread)
                for rank, connection in unread
            ):
                self._changed.wait(0.01)

    def _reject(self, rank: int | None, connection: RankConnection, error: IsthmusError) -> None:
        """Refuse a stranger; a joined rank that breaks the protocol ends the run."""
        failure = failure_of(error, self._config.site)
        connection.send(Failed(failure=failure))
        if rank is None:
            _log.warning("refused a connection: %s", error)
            return
        self._ranks.fail(
            Failure(
                code=failure.code,
                message=f"rank {rank}: {failure.message}",
                site=self._config.site,
                rank=rank,
            )
        )

    def _start(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
