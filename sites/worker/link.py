"""What a rank asks of the process that crosses the WAN for it, and what it hears back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from protos.errors import IsthmusError, LocalProtocolError, PeerLostError, RankLostError
from sites.local.rank_messages import Form


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingOffer:
    """What a gateway takes encoded, beside float32."""

    codecs: tuple[str, ...]
    """Of the trees. One or more have bodies: sites.codecs.codec.BodyCodec; chunks of the others
    stay float32."""
    turns: tuple[int, ...]
    """Which of `codecs` a chunk has, by its turn; then from the beginning: Grid.turn."""
    chunk_numel: int
    """Elements of a chunk, at most: what the grid is made with."""
    error_feedback: bool
    """Whether what is lost is to be added to the next one."""

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> EncodingOffer:
        """Return what a gateway has written.

        Raises:
            KeyError, TypeError, ValueError: it has not.
        """
        return cls(
            codecs=tuple(map(str, fields["codecs"])),
            turns=tuple(map(int, fields["turns"])),
            chunk_numel=int(fields["chunk_numel"]),
            error_feedback=bool(fields["error_feedback"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """What a rank learns when it joins."""

    site: str
    site_index: int
    sites: tuple[str, ...]
    ranks_per_site: tuple[int, ...]
    verify_every: int
    """Steps between digests; 0: never."""
    config_hash: str
    encoding: EncodingOffer | None = None
    """None: it takes float32 only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduce:
    """This rank's shard of a bucket lies in its region: reduce it over all sites."""

    round: int
    bucket: int
    region: int
    numel: int
    """float32 elements of the whole bucket, not of the shard."""
    offset: int = 0
    """Elements of the region before the shard."""
    layout: int
    """crc32c: sites/worker/layout.py."""
    weight: float
    """Tokens of the whole site behind the bucket."""
    exact: bool
    """Travel as fp32 whatever the link's codec."""
    form: Form = Form.VALUES
    """What lies in the region."""
    encoded_bytes: int = 0
    """Of all bodies together, where these do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """The region holds the sum over all sites, divided by `weight`."""

    round: int
    bucket: int
    weight: float
    """Tokens of all sites; NaN where no element of the bucket is this rank's."""
    wait_s: float
    """How long the other sites' contributions were later than ours."""
    wire_bytes: int
    encode_s: float = 0.0
    """CPU time that the gateway spent on encoding for it."""
    decode_s: float = 0.0
    """Likewise, on decoding and summing."""


class Link(Protocol):
    """The way to the other sites. Methods may be called from any thread."""

    def start(
        self, on_reduced: Callable[[Reduced], None], on_failed: Callable[[IsthmusError], None]
    ) -> None:
        """Say from now on what arrives, from a thread of the link's own."""

    def add_region(self, region: int, numel: int, descriptor: int) -> None:
        """Share float32[numel] in a memfd; an id again replaces it. The caller closes its own."""

    def reduce(self, request: Reduce) -> None:
        """Have a shard reduced; `on_reduced` is called when the result is in the region."""

    def send_metric(
        self, kind: str, step: int, values: Mapping[str, float], labels: Mapping[str, str]
    ) -> None:
        """Pass one metric on to the coordinator."""

    def send_digest(
        self, step: int, combined: int, tensors: Sequence[int], names: Sequence[str]
    ) -> None:
        """Pass this rank's parameter hashes on to the coordinator."""

    def leave(self) -> None:
        """Say that this rank ends because it is done, then close. Idempotent."""

    def close(self) -> None:
        """Close without a word: to the other side, this rank has died. Idempotent."""


def error_for(code: str, message: str, site: str = "") -> IsthmusError:
    """Return the exception of a code in protos/catalogue.py, as another process names an error."""
    for kind in (PeerLostError, RankLostError):
        if kind.code == code:
            return kind(message, site)
    for other in IsthmusError.__subclasses__():
        if other.code == code and other is not LocalProtocolError:  # It is not this process's bug.
            return other(message)
    error = IsthmusError(message)
    error.code = code
    return error
