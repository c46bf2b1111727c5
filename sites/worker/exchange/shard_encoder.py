"""Encodes what a rank hands over, on its own device, chunk by chunk of the gateways' grid.

So gradients cross from an accelerator to the host as small as they go over the WAN. Error feedback
lives beside the encoder, by the rule of sites/gateway/reduction/residuals.py: float32, as many as
this rank's shards have elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from isthmus.sites.local.chunk_grid import grid
from isthmus.sites.local.rank_messages import EncodingOffer
from isthmus.sites.local.regions import FLOAT_BYTES
from isthmus.sites.local.sharing import sharing_of
from isthmus.sites.worker.exchange.device_codecs import DEVICE_CODECS, DeviceCodec
from isthmus.topology.spec.errors import ConfigError

_VARIABLE: Final = "ISTHMUS_ENCODE"


def encodes_here(environ: Mapping[str, str], device: torch.device) -> bool:
    """Return whether a rank is to encode where the gateway lets it.

    ISTHMUS_ENCODE is rank, gateway, or auto or absent: a rank on an accelerator encodes.

    Raises:
        ConfigError: it is something else.
    """
    where = environ.get(_VARIABLE, "auto")
    if where not in ("auto", "rank", "gateway"):
        raise ConfigError(f"environment: {_VARIABLE}: want rank, gateway or auto, got {where!r}")
    return where == "rank" or (where == "auto" and device.type != "cpu")


@dataclass(frozen=True, slots=True)
class Encoded:
    """A shard's bodies, which the encoder's next call overwrites."""

    bodies: tuple[tuple[int, torch.Tensor], ...]
    """Each chunk's place in the shard's shared memory, in bytes, and its body on the device."""
    is_fit: torch.Tensor
    """bool, shape (1,), on the host, once the stream has come this far: whether every value has a
    code. Else the shard itself is to be handed over."""

    @property
    def num_bytes(self) -> int:
        """Size of all bodies together."""
        return sum(body.numel() for _, body in self.bodies)

    def write(self, region: torch.Tensor) -> None:
        """Enqueue the copies to shared memory: float32, as long as the shard."""
        octets = region.view(torch.uint8)
        for place, body in self.bodies:
            octets[place : place + body.numel()].copy_(body, non_blocking=True)


class ShardEncoder:
    """Encodes this rank's shards, one after another, on one stream."""

    def __init__(
        self,
        offer: EncodingOffer,
        *,
        site_index: int,
        rank: int,
        ranks_per_site: tuple[int, ...],
        device: torch.device,
    ) -> None:
        self._codecs = {
            name: DEVICE_CODECS[name](device) if name in DEVICE_CODECS else None
            for name in offer.codecs
        }
        self._offer = offer
        self._site_index = site_index
        self._rank = rank
        self._ranks_per_site = ranks_per_site
        self._device = device
        self._residual: dict[int, tuple[int, int, torch.Tensor]] = {}
        self._octets = torch.empty(0, dtype=torch.uint8, device=device)
        # Page-locked, or the copy to it would hold up the thread until the device comes to it.
        self._is_fit_here = torch.ones(
            1, dtype=torch.bool, device="cpu", pin_memory=device.type == "cuda"
        )

    def encode(
        self,
        shard: torch.Tensor,
        *,
        bucket: int,
        numel: int,
        layout: int,
        participants: tuple[tuple[int, ...], ...] = (),
    ) -> Encoded:
        """Enqueue the encoding of a shard plus its residual.

        Args:
            shard: float32, shape (s,) or longer, padding behind. The residual is added.
            bucket: its number: the residual is added to the next shard of the same number.
            numel: float32 elements of the whole bucket.
            layout: equal as long as the bucket holds the same.
            participants: the ranks that share it, as `Reduce` has them.
        """
        sharing = sharing_of(participants, self._ranks_per_site)
        cut = grid(numel, self._offer.chunk_numel, sharing)
        first, count = cut.shard(self._site_index, self._rank)
        residual = self._residual_of(bucket, layout, numel, count)
        if residual is not None and self._offer.error_feedback_decay != 1:
            residual.mul_(self._offer.error_feedback_decay)
        if len(self._octets) < FLOAT_BYTES * count:
            self._octets = shard.new_empty(FLOAT_BYTES * count, dtype=torch.uint8)
        # What begins with a value begins with it here, on the stream that goes on to use it.
        is_fit = torch.ones(1, dtype=torch.bool, device=self._device)
        bodies = []
        for chunk in cut.chunks(self._site_index, self._rank):
            start, chunk_numel = cut.span(chunk)
            place = slice(start - first, start - first + chunk_numel)
            values = shard[place]
            at = FLOAT_BYTES * place.start
            codec = self._codec_of(cut.turn(bucket, chunk))
            if codec is None:
                is_fit.logical_and_(torch.isfinite(values).all())
                body = values.view(torch.uint8)
            else:
                body = self._octets[at : at + codec.body_bytes(chunk_numel)]
                lost = None if residual is None else residual[place]
                is_fit.logical_and_(_encode_chunk(codec, values, body, lost))
            bodies.append((at, body))
        self._is_fit_here.copy_(is_fit, non_blocking=True)
        return Encoded(tuple(bodies), self._is_fit_here)

    def residuals(self) -> dict[int, tuple[int, int, torch.Tensor]]:
        """Return copies on the host of the residuals, by bucket, with its layout and elements."""
        return {
            bucket: (layout, numel, lost.to("cpu", copy=True))
            for bucket, (layout, numel, lost) in self._residual.items()
        }

    def restore(self, residual: Mapping[int, tuple[int, int, torch.Tensor]]) -> None:
        """Set all residuals to what `residuals` returned, before the first round."""
        self._residual = {
            bucket: (layout, numel, lost.to(self._device))
            for bucket, (layout, numel, lost) in residual.items()
        }

    def _residual_of(self, bucket: int, layout: int, numel: int, count: int) -> torch.Tensor | None:
        """Return a bucket's residual, to be overwritten; drop all if it holds something else."""
        if not self._offer.error_feedback:
            return None
        found = self._residual.get(bucket)
        if found is not None and found[:2] != (layout, numel):
            self._residual.clear()
            found = None
        if found is None:
            found = self._residual[bucket] = (
                layout,
                numel,
                torch.zeros(count, dtype=torch.float32, device=self._device),
            )
        return found[2]

    def _codec_of(self, turn: int) -> DeviceCodec | None:
        """Return the codec of the chunk whose turn it is; None: it has no bodies."""
        turns = self._offer.turns
        return self._codecs[self._offer.codecs[turns[turn % len(turns)]]]


def _encode_chunk(
    codec: DeviceCodec, values: torch.Tensor, body: torch.Tensor, residual: torch.Tensor | None
) -> torch.Tensor:
    """Add the residual, write the body, keep its loss; return whether each value has a code."""
    if residual is not None:
        values.add_(residual)
    is_fit = codec.encode(values, body)
    if residual is not None:
        torch.sub(values, codec.decode(values, is_fit), out=residual)
        residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    return is_fit
