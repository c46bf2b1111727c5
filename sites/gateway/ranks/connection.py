"""One rank's end of the node's Unix socket, and the memory that it shares."""

from __future__ import annotations

import array
import contextlib
import json
import logging
import mmap
import os
import socket
import struct
import threading
from typing import Any, Final

import numpy as np

from protos.errors import LocalProtocolError
from protos.limits import LOCAL_MESSAGE_BYTES
from sites.codecs.parts import Floats
from sites.gateway.ranks.messages import Message, Reduce, RegionOffer, parse

_log = logging.getLogger(__name__)

_SEND_DEADLINE_S: Final = 10
"""A rank that does not read for so long is stuck."""
_FDS_MAX: Final = 4


class RankConnection:
    """One rank's socket and the memory that it shares."""

    def __init__(self, accepted: socket.socket) -> None:
        self.regions: dict[int, Floats] = {}
        self._socket = accepted
        self._send_lock = threading.Lock()
        deadline = struct.pack("ll", _SEND_DEADLINE_S, 0)
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, deadline)

    def receive(self) -> tuple[Message, list[int]] | None:
        """Return the next message and its file descriptors, the caller's to close; None at the end.

        Raises:
            LocalProtocolError: it is not one.
        """
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(
                LOCAL_MESSAGE_BYTES, socket.CMSG_SPACE(_FDS_MAX * array.array("i").itemsize)
            )
        except OSError:
            return None
        fds = _fds(ancillary)
        try:
            return (parse(_whole(data, flags)), fds) if data else None
        except LocalProtocolError:
            close_all(fds)
            raise

    def map(self, offer: RegionOffer, fds: list[int]) -> None:
        """Map a region; one with the same id is forgotten.

        Raises:
            LocalProtocolError: there is not exactly one file, of the size that is named.
        """
        try:
            if len(fds) != 1:
                raise LocalProtocolError(f"region {offer.region}: {len(fds)} files, want one memfd")
            size_bytes = os.fstat(fds[0]).st_size
            if size_bytes < 4 * offer.numel:
                raise LocalProtocolError(
                    f"region {offer.region}: {size_bytes} bytes for {offer.numel} elements"
                )
            if offer.numel == 0:
                self.regions[offer.region] = np.empty(0, dtype=np.float32)
                return
            memory = mmap.mmap(fds[0], 4 * offer.numel)
            self.regions[offer.region] = np.frombuffer(memory, dtype=np.float32)
        except (OSError, ValueError) as error:
            raise LocalProtocolError(f"region {offer.region}: {error}") from error
        finally:
            close_all(fds)

    def shard(self, message: Reduce, count: int) -> Floats:
        """Return the rank's part of a bucket: float32, shape (count,), a view of the named region.

        Raises:
            LocalProtocolError: there is no such region, or it ends before.
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

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; a rank that has gone, or does not read, is found out by its reader."""
        try:
            with self._send_lock:
                self._socket.send(json.dumps(message).encode(), socket.MSG_NOSIGNAL)
        except OSError as error:
            _log.warning("a message to a rank was not taken: %s", error)
            self.shut()

    def shut(self, how: int = socket.SHUT_RDWR) -> None:
        """Make the waits at one end, or both, come to an end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(how)

    def close(self) -> None:
        """Release the socket; regions end with the last view of them."""
        self.shut()
        self._socket.close()
        self.regions.clear()


def _whole(data: bytes, flags: int) -> bytes:
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise LocalProtocolError(f"a message of more than {LOCAL_MESSAGE_BYTES} bytes")
    return data


def _fds(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def close_all(fds: list[int]) -> None:
    """Close file descriptors that came with a message."""
    for fd in fds:
        os.close(fd)
