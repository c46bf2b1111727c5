"""All codecs, by the names that job files use and the numbers that frames carry."""

from __future__ import annotations

from isthmus.sites.codecs.codec import Codec
from isthmus.sites.codecs.float_codecs import Bf16, Fp32, Split
from isthmus.sites.codecs.kernels import loops
from isthmus.sites.codecs.quantising_codecs import BlockCodec
from isthmus.sites.codecs.sparse_codecs import TopK, TopK2
from isthmus.topology.spec.errors import ConfigError

_CODECS: tuple[Codec, ...] = (
    Fp32(),
    Bf16(),
    Split("split", 3, rounds=False),
    Split("bf16-split", 4, rounds=True),
    BlockCodec("int8", 5, loops.INT8, 127.0),
    BlockCodec("int8-zstd", 6, loops.INT8, 127.0, compresses=True),
    BlockCodec("int4", 7, loops.INT4, 7.0, codes_per_byte=2),
    BlockCodec("int4-zstd", 8, loops.INT4, 7.0, codes_per_byte=2, compresses=True),
    BlockCodec("fp8", 9, loops.FP8, 448.0),
    BlockCodec("fp8-zstd", 10, loops.FP8, 448.0, compresses=True),
    TopK("topk", 11),
    TopK("topk-zstd", 12, compresses=True),
    TopK2("topk2", 13),
)
"""Append only: a number is never given to another codec."""

BY_NAME = {codec.name: codec for codec in _CODECS}
BY_NUMBER = {codec.number: codec for codec in _CODECS}
EXACT = BY_NAME["fp32"]
"""The codec of values that must not be rounded, whatever the link's codec."""


def codec_named(name: str) -> Codec:
    """Return the codec of that name.

    Raises:
        ConfigError: no codec has that name.
    """
    codec = BY_NAME.get(name)
    if codec is None:
        raise ConfigError(f"exchange.codec: want one of {', '.join(BY_NAME)}, got {name!r}")
    return codec
