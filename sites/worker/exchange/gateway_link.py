"""A rank's connection to its gateway, and two that take its place where gradients do not cross.

`GatewayLink` is the Unix socket to the rank's gateway, the process that sends over the WAN for it.
`AloneLink` has no gateway: only the division by the site's tokens is left. `SiteOnlyLink` has one,
and sends it metrics and digests, but no gradients.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from isthmus.protos.errors import (
    ConfigMismatchError,
    DeadlineExceededError,
    IsthmusError,
    LocalProtocolError,
    RemoteProtocolError,
)
from isthmus.protos.failure import reason_of
from isthmus.protos.limits import LOCAL_MESSAGE_BYTES
from isthmus.sites.local.chunk_grid import shard_numel
from isthmus.sites.local.rank_messages import (
    FROM_GATEWAY,
    Digest,
    Failed,
    FromGateway,
    FromRank,
    Join,
    Leave,
    Members,
    Metric,
    Reduce,
    Reduced,
    ReductionTimes,
    Region,
    RoundEnds,
    Welcome,
    encode,
    error_for,
    error_of,
)
from isthmus.sites.local.regions import map_region
from isthmus.sites.local.squares import units_in
from isthmus.sites.worker.exchange.missing_sites import MissingSites

_LAST_WORDS_S = 2.0
"""Time for reading why the gateway has closed; what it said is in the socket already."""


class Link(Protocol):
    """The way to the other sites. Methods may be called from any thread."""

    missing_sites: MissingSites
    """Who takes part, as results tell it."""
    on_round_ends: Callable[[RoundEnds], None]
    """Told of rounds that end, from a thread of the link's own."""

    def start(
        self,
        on_reduced: Callable[[Reduced], None],
        on_failed: Callable[[IsthmusError], None],
        on_members: Callable[[Members], None] = lambda _: None,
    ) -> None:
        """Report what arrives from now on, from a thread of the link's own."""

    def send(self, message: FromRank, descriptor: int | None = None) -> None:
        """Pass a message on: a region with its memfd, which stays the caller's."""

    def leave(self, *, has_averaged: bool = True) -> None:
        """Report that this rank ends because it is done, then close. Idempotent.

        `has_averaged` is as `Leave` has it.
        """

    def close(self) -> None:
        """Close without a word: to the other side, this rank has died. Idempotent."""


class AloneLink:
    """A `Link` that divides a shard by the site's tokens where it lies. Metrics go nowhere."""

    def __init__(self, world_size: int = 1) -> None:
        """Hold no regions yet. `world_size` is the site's."""
        self.missing_sites = MissingSites()
        self.on_round_ends: Callable[[RoundEnds], None] = lambda _: None
        self._world_size = world_size
        self._regions: dict[int, npt.NDArray[np.float32]] = {}
        self._on_reduced: Callable[[Reduced], None] = lambda _: None

    def start(
        self,
        on_reduced: Callable[[Reduced], None],
        on_failed: Callable[[IsthmusError], None],
        on_members: Callable[[Members], None] = lambda _: None,
    ) -> None:
        """Remember whom to tell; nothing here can fail later."""
        del on_failed, on_members
        self._on_reduced = on_reduced

    def send(self, message: FromRank, descriptor: int | None = None) -> None:
        """Map a region, or divide a shard; no coordinator listens to all else."""
        if isinstance(message, Region) and descriptor is not None:
            self._regions[message.region] = map_region(descriptor, message.numel)
        elif isinstance(message, Reduce):
            self.reduce(message)

    def reduce(self, request: Reduce) -> None:
        """Divide, and say so at once."""
        (ranks,) = request.sharing((self._world_size,))
        size = shard_numel(request.numel, ranks if isinstance(ranks, int) else len(ranks))
        shard = self._regions[request.region][request.offset :][:size]
        # A weight of 0 is reported, and refused, by whoever hears of the result.
        np.divide(shard, np.float32(request.weight or 1.0), out=shard)
        self._on_reduced(
            Reduced(
                round=request.round,
                bucket=request.bucket,
                weight=request.weight,
                times=ReductionTimes(),
                wire_bytes=0,
                squares=units_in(shard),
            )
        )

    def leave(self, *, has_averaged: bool = True) -> None:
        """Nobody is there to be told."""
        del has_averaged
        self.close()

    def close(self) -> None:
        """Release the regions."""
        self._regions.clear()


class SiteOnlyLink(AloneLink):
    """A `Link` whose gradients stay inside the site: it is the only one, or `schedule: off`."""

    def __init__(self, gateway: Link, world_size: int = 1) -> None:
        """Take a gateway's link; owned from now on."""
        super().__init__(world_size)
        self._gateway = gateway

    def start(
        self,
        on_reduced: Callable[[Reduced], None],
        on_failed: Callable[[IsthmusError], None],
        on_members: Callable[[Members], None] = lambda _: None,
    ) -> None:
        """Report from now on what is reduced here, and what the gateway hears of other sites."""
        super().start(on_reduced, on_failed, on_members)
        self._gateway.start(on_reduced, on_failed, on_members)

    def send(self, message: FromRank, descriptor: int | None = None) -> None:
        """Divide shards here; metrics and digests are for the coordinator."""
        if isinstance(message, Metric | Digest):
            self._gateway.send(message)
        else:
            super().send(message, descriptor)

    def leave(self, *, has_averaged: bool = True) -> None:
        """Report that this rank ends because it is done, then close. Idempotent."""
        super().close()
        self._gateway.leave(has_averaged=has_averaged)

    def close(self) -> None:
        """Close without a word. Idempotent."""
        super().close()
        self._gateway.close()


class GatewayLink:
    """A `Link` over the Unix socket of the rank's gateway: docs/protocols.md."""

    def __init__(self, path: Path, send_timeout_s: float) -> None:
        """Connect.

        Raises:
            IsthmusError: nobody listens at `path`.
        """
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._send_timeout_s = send_timeout_s
        self.missing_sites = MissingSites()
        self.on_round_ends: Callable[[RoundEnds], None] = lambda _: None
        self._sending = threading.Lock()
        self._closed = False
        self._listening = False
        self._cause: IsthmusError = error_for("GATEWAY_EXITED", "the gateway ended: see its log")
        self._ended = threading.Event()
        try:
            self._socket.connect(str(path))
        except OSError as error:
            self._socket.close()
            raise error_for(
                "GATEWAY_EXITED",
                f"no gateway listens at {path} (ISTHMUS_GATEWAY): {error.strerror or error}",
            ) from error
        # The kernel's own deadline: a socket timeout would bind the receiving thread as well.
        self._socket.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(send_timeout_s) + 1, 0)
        )

    def join(
        self,
        *,
        rank: int,
        local_rank: int,
        generation: int,
        timeout_s: float,
        encodes: bool = False,
    ) -> Welcome:
        """Introduce this rank, and wait until the gateway takes it.

        `encodes`: the rank takes the offer in the answer, if there is one.

        Raises:
            IsthmusError: the gateway refuses, or does not answer in time.
        """
        self.send(
            Join(
                rank=rank,
                local_rank=local_rank,
                pid=os.getpid(),
                generation=generation,
                encodes=encodes,
            )
        )
        self._socket.settimeout(timeout_s)
        try:
            message = self._receive()
        except TimeoutError as error:
            raise DeadlineExceededError(
                f"the gateway did not answer rank {rank} within {timeout_s:g} s"
            ) from error
        except RemoteProtocolError as error:
            raise ConfigMismatchError(
                f"{error}: the gateway is of another version of isthmus"
            ) from error
        self._socket.settimeout(None)
        match message:
            case None:
                raise self._cause
            case Failed(failure=failure):
                raise error_of(failure)
            case Welcome():
                return message
            case _:
                raise ConfigMismatchError(f"the gateway answered a join with {message.op}")

    def start(
        self,
        on_reduced: Callable[[Reduced], None],
        on_failed: Callable[[IsthmusError], None],
        on_members: Callable[[Members], None] = lambda _: None,
    ) -> None:
        """Start the thread that receives."""
        arguments = (on_reduced, on_failed, on_members)
        self._listening = True
        threading.Thread(
            target=self._listen, args=arguments, name="isthmus-receive", daemon=True
        ).start()

    def leave(self, *, has_averaged: bool = True) -> None:
        """Send Leave and close. A gateway that has gone already is no error."""
        if self._closed:
            return
        with contextlib.suppress(IsthmusError):
            self.send(Leave(has_averaged=has_averaged))
        self.close()

    def close(self) -> None:
        """Close; the receiving thread ends."""
        self._closed = True
        with contextlib.suppress(OSError):  # The gateway may be faster.
            self._socket.shutdown(socket.SHUT_RDWR)
        if not self._listening:
            self._socket.close()

    def send(self, message: FromRank, descriptor: int | None = None) -> None:
        """Send a message, and a region's descriptor with it.

        Raises:
            DeadlineExceededError: the gateway took none for too long.
            IsthmusError: it has closed, and why.
        """
        data = encode(message)
        try:
            with self._sending:
                if descriptor is None:
                    self._socket.send(data)
                else:
                    socket.send_fds(self._socket, [data], [descriptor])
        except BlockingIOError as error:
            raise DeadlineExceededError(
                f"the gateway took no message for {self._send_timeout_s:g} s"
            ) from error
        except OSError as error:
            raise self._why_ended() from error

    def _receive(self) -> FromGateway | None:
        """Return the next message; None when the gateway has closed."""
        try:
            data, _, flags, _ = self._socket.recvmsg(LOCAL_MESSAGE_BYTES)
        except ConnectionError:
            return None
        if flags & socket.MSG_TRUNC:
            raise RemoteProtocolError("the gateway sent a message that is too long")
        return FROM_GATEWAY.read(data) if data else None

    def _why_ended(self) -> IsthmusError:
        """Return what the gateway said before it closed, which may not have been read yet."""
        if self._listening:
            self._ended.wait(_LAST_WORDS_S)
            return self._cause
        with contextlib.suppress(OSError):  # it is silent, or this side has closed
            self._socket.settimeout(_LAST_WORDS_S)
            while (message := self._receive()) is not None:
                if isinstance(message, Failed):
                    return error_of(message.failure)
        return self._cause

    def _listen(
        self,
        on_reduced: Callable[[Reduced], None],
        on_failed: Callable[[IsthmusError], None],
        on_members: Callable[[Members], None] = lambda _: None,
    ) -> None:
        try:
            while (message := self._receive()) is not None:
                if isinstance(message, Members):
                    on_members(message)
                    continue
                if isinstance(message, RoundEnds):
                    self.on_round_ends(message)
                    continue
                reduced = _as_result(message)
                self.missing_sites.note(reduced)
                on_reduced(reduced)
        except IsthmusError as error:
            self._cause = error
        except Exception as error:  # noqa: BLE001 - a thread's root; the error reaches backward
            self._cause = LocalProtocolError(reason_of(error))
            self._cause.__cause__ = error
        self._ended.set()
        if not self._closed:
            on_failed(self._cause)
        self._socket.close()


def _as_result(message: FromGateway) -> Reduced:
    """Return what a rank that has joined may hear.

    Raises:
        IsthmusError: the run has failed, or it is something else.
    """
    if isinstance(message, Failed):
        raise error_of(message.failure)
    if not isinstance(message, Reduced):
        raise RemoteProtocolError(f"the gateway sent op {message.op!r}")
    return message
