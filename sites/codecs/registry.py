"""All codecs, by the names that job files use and the numbers that frames carry."""

from __future__ import annotations

from sites.codecs.codec import Codec
from sites.codecs.float_codecs import Bf16, Bf16Split, Fp32, Split
from sites.codecs.quantising_codecs import (
    Fp8,
    Fp8Zstd,
    Int4,
    Int4Zstd,
    Int8,
    Int8Zstd,
    TopK,
    TopKZstd,
)
from topology.errors import ConfigError

_CODECS: tuple[Codec, ...] = (
    Fp32(),
    Bf16(),
    Split(),
    Bf16Split(),
    Int8(),
    Int8Zstd(),
    Int4(),
    Int4Zstd(),
    Fp8(),
    Fp8Zstd(),
    TopK(),
    TopKZstd(),
)
"""Append only: a number is never given to another codec."""

BY_NAME = {codec.name: codec for codec in _CODECS}
EXACT = BY_NAME["fp32"]
"""For what must not be rounded, whatever the link's codec."""


def codec_named(name: str) -> Codec:
    """Return the codec of that name.

    Raises:
        ConfigError: there is none.
    """
    codec = BY_NAME.get(name)
    if codec is None:
        raise ConfigError(f"exchange.codec: want one of {', '.join(BY_NAME)}, got {name!r}")
    return codec
