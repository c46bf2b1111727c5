"""Compresses with zstd, and refuses received frames that would decompress to an unexpected size.

Sites need not trust each other. A decompressor ignores a given limit if the frame states its
content size: a 13-byte frame can ask for exabytes. So the frame's header is read first. It must
have exactly the expected size, a small window, and a checksum.
"""

from __future__ import annotations

import threading
from typing import Final

import numpy as np
import numpy.typing as npt
import zstandard

from isthmus.protos.errors import CorruptDataError
from isthmus.sites.codecs.codec import Payload

_WINDOW_BYTES_MAX: Final = 8 << 20
_SAMPLE: Final = 4096
"""Size of the evenly spread sample that decides whether to compress."""
_ENTROPY_MAX: Final = 7.8
"""Highest entropy, in bits per byte, that is compressed. Mantissa planes of real gradients are
above 7.9 (sample: 7.95)."""
_HUFFMAN = zstandard.ZstdCompressionParameters.from_level(
    1,
    window_log=17,
    hash_log=6,
    chain_log=6,
    min_match=7,
    search_log=1,
    target_length=0,
    write_checksum=True,
    write_content_size=True,
)
"""Level 1 with only its Huffman stage: exponents are skewed but not repetitive, and the search for
matches would take most of the time."""


class _Contexts(threading.local):
    """zstd contexts of one thread: threads may not share them, and creation per chunk is slow."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(compression_params=_HUFFMAN)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


def compress(data: Payload) -> bytes:
    """Return one zstd frame with its content size and a checksum."""
    return _contexts.compressor.compress(data)


def compress_if_skewed(octets: npt.NDArray[np.uint8]) -> bytes | None:
    """Return a frame of uint8 (n,); None if compression would save next to nothing."""
    if not _is_skewed(octets):
        return None
    frame = compress(octets.data)
    return frame if len(frame) < len(octets) else None


def _is_skewed(octets: npt.NDArray[np.uint8]) -> bool:
    """Whether the bytes are unequal enough for Huffman codes, by a sample of them."""
    sample = octets[:: max(1, len(octets) // _SAMPLE)]
    counts = np.bincount(sample, minlength=256)
    shares = counts[counts > 0] / max(1, len(sample))
    return float(-(shares * np.log2(shares)).sum()) < _ENTROPY_MAX


def content_bytes(frame: Payload) -> int:
    """Return the content size that a frame states; the caller must check it.

    Raises:
        CorruptDataError: the bytes are not a frame.
    """
    try:
        return int(zstandard.get_frame_parameters(frame).content_size)
    except zstandard.ZstdError as error:
        raise CorruptDataError(f"zstd: {error}") from error


def decompress(frame: Payload, expected_bytes: int) -> bytes:
    """Return the content of one frame.

    Raises:
        CorruptDataError: the bytes are not exactly one valid frame of `expected_bytes`. No more
            memory was allocated.
    """
    try:
        parameters = zstandard.get_frame_parameters(frame)
        if parameters.content_size != expected_bytes:
            raise CorruptDataError(
                f"a zstd frame of {parameters.content_size} bytes where {expected_bytes} belong"
            )
        if parameters.window_size > _WINDOW_BYTES_MAX or parameters.dict_id:
            raise CorruptDataError("a zstd frame with a window or dictionary that is never sent")
        if not parameters.has_checksum:
            raise CorruptDataError("a zstd frame without a checksum")
        content = _contexts.decompressor.decompress(
            frame, max_output_size=expected_bytes, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise CorruptDataError(f"zstd: {error}") from error
    if len(content) != expected_bytes:
        raise CorruptDataError(f"zstd gave {len(content)} bytes where {expected_bytes} belong")
    return content
