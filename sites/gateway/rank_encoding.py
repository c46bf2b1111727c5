"""What ranks may encode instead of their gateway, and what becomes of it.

A body replaces the elements of its chunk, from the first one's place on, and is never larger. So results can be
written chunk by chunk over what has been read, in any order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from protos.errors import CorruptDataError, LocalProtocolError
from sites.codecs.codec import BodyCodec, Codec, Floats, Payload
from sites.codecs.registry import codec_named
from sites.gateway.config import GatewayConfig
from sites.gateway.forms import Form
from sites.gateway.grid import grid
from sites.gateway.local_messages import Reduce


class RankEncoding:
    """What this gateway offers to its ranks."""

    def __init__(self, config: GatewayConfig) -> None:
        """Offer a codec where it has bodies and is that of all trees."""
        self._config = config
        codec = codec_named(config.codecs[0])
        is_one = len(config.sites) > 1 and len(set(config.codecs)) == 1
        self._codec = codec if is_one and isinstance(codec, BodyCodec) else None

    def to_json(self) -> dict[str, Any] | None:
        """Return the welcome's field: None offers nothing."""
        if self._codec is None:
            return None
        config = self._config
        return {
            "codec": self._codec.name,
            "chunk_numel": config.chunk_numel,
            "error_feedback": config.error_feedback,
        }

    def check(self, rank: int, reduce: Reduce) -> None:
        """See that what a rank hands over has a form and a size that it may have.

        Raises:
            LocalProtocolError: it has not; names the bucket.
        """
        if reduce.form is Form.VALUES:
            return
        name = f"rank {rank}: round {reduce.round} bucket {reduce.bucket}"
        if self._codec is None or reduce.exact:
            raise LocalProtocolError(f"{name}: {reduce.form} values where float32 belong")
        if reduce.form is Form.UNFIT:
            return
        config = self._config
        cut = grid(reduce.numel, config.chunk_numel, config.ranks_per_site)
        chunks = cut.chunks(config.site_index, rank)
        expected = sum(self._codec.body_bytes(cut.span(chunk)[1]) for chunk in chunks)
        if reduce.encoded_bytes != expected:
            raise LocalProtocolError(
                f"{name}: {reduce.encoded_bytes} encoded bytes; its {len(chunks)} chunks, from "
                f"{chunks.start} on, have {expected} as {self._codec.name}"
            )


def own_payload(
    name: str, codec: Codec, form: Form, values: Floats
) -> Callable[[], Payload] | None:
    """Return what makes the payload of a chunk that its rank has encoded; None: it has not.

    Args:
        name: of the chunk, for errors.
        codec: of the chunk.
        form: what lies in `values`; checked by `RankEncoding`.
        values: the chunk's part of the region: float32, shape (n,).
    """
    if form is Form.VALUES:
        return None
    if form is Form.UNFIT:
        return functools.partial(codec.encode, values)
    assert isinstance(codec, BodyCodec)
    return functools.partial(_seal, name, codec, values)


def _seal(name: str, codec: BodyCodec, values: Floats) -> bytes:
    body = values.view(np.uint8)[: codec.body_bytes(len(values))]
    try:
        return codec.seal(body.data, len(values))
    except CorruptDataError as error:
        raise LocalProtocolError(f"{name}: {error}") from error
