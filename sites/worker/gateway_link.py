"""The Unix socket to the node's gateway: docs/architecture.md, "Rank to gateway"."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from protos.errors import (
    ConfigMismatchError,
    DeadlineExceededError,
    IsthmusError,
    LocalProtocolError,
    RemoteProtocolError,
)
from protos.limits import LOCAL_MESSAGE_BYTES
from sites.worker.link import EncodingOffer, Reduce, Reduced, Welcome, error_for

_LAST_WORDS_S = 2.0
"""For reading why the gateway has closed; what it said is in the socket already."""


class GatewayLink:
    """One rank's connection to its gateway. A `Link`."""

    def __init__(self, path: Path, send_timeout_s: float) -> None:
        """Connect.

        Raises:
            IsthmusError: nobody listens at `path`.
        """
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._send_timeout_s = send_timeout_s
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

        Args:
            rank: inside the site.
            local_rank: on its node.
            generation: of the run.
            timeout_s: for the gateway's answer.
            encodes: whether this rank takes the offer in the answer, if there is one.

        Raises:
            IsthmusError: the gateway refuses, or does not answer in time.
        """
        fields = {"rank": rank, "local_rank": local_rank, "pid": os.getpid()}
        self._send({"op": "join", **fields, "generation": generation, "encodes": encodes})
        self._socket.settimeout(timeout_s)
        try:
            message = self._receive()
        except TimeoutError as error:
            raise DeadlineExceededError(
                f"the gateway did not answer rank {rank} within {timeout_s:g} s"
            ) from error
        self._socket.settimeout(None)
        if message is None:
            raise self._cause
        if message.get("op") == "failed":
            raise _failure(message)
        return _welcome(message)

    def start(
        self, on_reduced: Callable[[Reduced], None], on_failed: Callable[[IsthmusError], None]
    ) -> None:
        """Start the thread that receives."""
        arguments = (on_reduced, on_failed)
        self._listening = True
        threading.Thread(
            target=self._listen, args=arguments, name="isthmus-receive", daemon=True
        ).start()

    def add_region(self, region: int, numel: int, descriptor: int) -> None:
        """Share a memfd of float32[numel] under an id."""
        self._send({"op": "region", "region": region, "numel": numel}, descriptor)

    def reduce(self, request: Reduce) -> None:
        """Ask for a shard's reduction over all sites."""
        self._send(
            {
                "op": "reduce",
                "round": request.round,
                "bucket": request.bucket,
                "region": request.region,
                "offset": request.offset,
                "numel": request.numel,
                "layout": request.layout,
                "weight": request.weight,
                "exact": request.exact,
                "form": request.form,
                "encoded_bytes": request.encoded_bytes,
            }
        )

    def send_metric(
        self, kind: str, step: int, values: Mapping[str, float], labels: Mapping[str, str]
    ) -> None:
        """Pass one metric on."""
        fields = {"kind": kind, "step": step, "values": dict(values), "labels": dict(labels)}
        self._send({"op": "metric", **fields})

    def send_digest(
        self, step: int, combined: int, tensors: Sequence[int], names: Sequence[str]
    ) -> None:
        """Pass parameter hashes on."""
        fields = {"step": step, "combined": combined}
        self._send({"op": "digest", **fields, "tensors": list(tensors), "names": list(names)})

    def leave(self) -> None:
        """Say goodbye and close. A gateway that has gone already is no error."""
        if self._closed:
            return
        with contextlib.suppress(IsthmusError):
            self._send({"op": "leave"})
        self.close()

    def close(self) -> None:
        """Close; the receiving thread ends."""
        self._closed = True
        with contextlib.suppress(OSError):  # The gateway may be faster.
            self._socket.shutdown(socket.SHUT_RDWR)
        if not self._listening:
            self._socket.close()

    def _send(self, message: dict[str, Any], descriptor: int | None = None) -> None:
        data = json.dumps(message).encode()
        if len(data) > LOCAL_MESSAGE_BYTES:
            raise LocalProtocolError(
                f"a {message['op']} message of {len(data)} bytes; {LOCAL_MESSAGE_BYTES} is the most"
            )
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

    def _receive(self) -> dict[str, Any] | None:
        """Return the next message; None when the gateway has closed."""
        try:
            data, _, flags, _ = self._socket.recvmsg(LOCAL_MESSAGE_BYTES)
        except ConnectionError:
            return None
        if not data:
            return None
        try:
            message = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise RemoteProtocolError("the gateway sent something that is not JSON") from error
        if flags & socket.MSG_TRUNC or not isinstance(message, dict):
            raise RemoteProtocolError("the gateway sent a message that is too long or no object")
        return message

    def _why_ended(self) -> IsthmusError:
        """Return what the gateway said before it closed, which may not have been read yet."""
        if self._listening:
            self._ended.wait(_LAST_WORDS_S)
            return self._cause
        self._socket.settimeout(_LAST_WORDS_S)
        with contextlib.suppress(TimeoutError):
            while (message := self._receive()) is not None:
                if message.get("op") == "failed":
                    return _failure(message)
        return self._cause

    def _listen(
        self, on_reduced: Callable[[Reduced], None], on_failed: Callable[[IsthmusError], None]
    ) -> None:
        try:
            while (message := self._receive()) is not None:
                on_reduced(_reduced(message))
        except IsthmusError as error:
            self._cause = error
        except Exception as error:  # noqa: BLE001 - a thread's root; the error reaches backward
            self._cause = LocalProtocolError(f"{type(error).__name__}: {error}")
            self._cause.__cause__ = error
        self._ended.set()
        if not self._closed:
            on_failed(self._cause)
        self._socket.close()


def _failure(message: dict[str, Any]) -> IsthmusError:
    return error_for(
        str(message.get("code", "INTERNAL")),
        str(message.get("message", "the gateway failed without a reason")),
        str(message.get("site") or ""),
    )


def _welcome(message: dict[str, Any]) -> Welcome:
    offer = message.get("encoding")
    try:
        return Welcome(
            site=str(message["site"]),
            site_index=int(message["site_index"]),
            sites=tuple(map(str, message["sites"])),
            ranks_per_site=tuple(map(int, message["ranks_per_site"])),
            verify_every=int(message["verify_every"]),
            config_hash=str(message["config_hash"]),
            encoding=None if offer is None else EncodingOffer.from_json(offer),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigMismatchError(
            f"the gateway's welcome lacks {error}: it is of another version of isthmus"
        ) from error


def _reduced(message: dict[str, Any]) -> Reduced:
    if message.get("op") == "failed":
        raise _failure(message)
    if message.get("op") != "reduced":
        raise RemoteProtocolError(f"the gateway sent op {message.get('op')!r}")
    try:
        return Reduced(
            round=int(message["round"]),
            bucket=int(message["bucket"]),
            weight=float(message["weight"]),
            wait_s=float(message["times"]["wait_s"]),
            encode_s=float(message["times"]["encode_s"]),
            decode_s=float(message["times"]["decode_s"]),
            wire_bytes=int(message["wire_bytes"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise RemoteProtocolError(f"the gateway's result lacks {error}") from error
