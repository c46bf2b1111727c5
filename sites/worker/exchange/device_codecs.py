"""The codecs' bodies, made by torch where the values are: the same bytes as sites/codecs makes.

Every step is an operation of IEEE 754 float32 on its own, or of integers, in the order of
sites/codecs, so that no kernel may contract two of them or divide by multiplying. Nothing here
looks at a value on the host: an encoder only enqueues. Whether there were values that have no code
is a tensor, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Final

import torch

from isthmus.topology.trees.codec_costs import BLOCK

_MAGNITUDE: Final = 0x7FFFFFFF
_INFINITE: Final = 0x7F800000
_TOO_LARGE: Final = 0x7F000000
"""As in sites/codecs/quantising_codecs.py: bits of 2**127."""
_SCALE_MIN: Final = 0x0080
"""2**-126 as bfloat16."""


class DeviceCodec(ABC):
    """Encodes chunks on one device, one after another; `decode` is of the last. Not thread-safe.

    Its buffers are used again for each chunk: all calls are on one stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._capacity = 0

    @abstractmethod
    def body_bytes(self, numel: int) -> int:
        """Return the size of a chunk's body: as the codec of that name says."""

    @abstractmethod
    def encode(self, values: torch.Tensor, body: torch.Tensor) -> torch.Tensor:
        """Write the body of a chunk; return a bool, shape (): whether every value has a code.

        `values` are float32, shape (n,), n > 0, contiguous, and not modified. `body` is uint8,
        shape (body_bytes(n),), from an even place in its memory; without a code it holds anything.
        """

    @abstractmethod
    def decode(self, values: torch.Tensor, is_fit: torch.Tensor) -> torch.Tensor:
        """Return what the latest chunk becomes elsewhere: float32 (n,), until the next call.

        Where `is_fit`, which `encode` returned, is false, the gateway's codec encodes `values`.
        """

    @abstractmethod
    def _allocate(self, capacity: int) -> None:
        """Make the buffers for chunks of so many elements, a multiple of BLOCK."""

    def _reserve(self, numel: int) -> int:
        """See that the buffers hold a chunk; return its blocks."""
        num_blocks = -(-numel // BLOCK)
        if num_blocks * BLOCK > self._capacity:
            self._capacity = num_blocks * BLOCK
            self._allocate(self._capacity)
        return num_blocks


class DeviceBf16(DeviceCodec):
    """Upper halves, rounded to nearest even: sites/codecs/float_codecs.py has the arithmetic."""

    def body_bytes(self, numel: int) -> int:
        """Return 2 bytes an element."""
        return 2 * numel

    def encode(self, values: torch.Tensor, body: torch.Tensor) -> torch.Tensor:
        """Round, as integers: a processor's own conversion may flush subnormal numbers."""
        self._reserve(values.numel())
        bits, words = values.view(torch.int32), self._words[: values.numel()]
        torch.bitwise_and(bits, _MAGNITUDE, out=words)
        is_fit = words.amax() < _INFINITE
        torch.bitwise_right_shift(bits, 16, out=words)
        words.bitwise_and_(1).add_(0x7FFF).add_(bits).bitwise_right_shift_(16)
        body.view(torch.int16).copy_(words)
        return is_fit

    def decode(self, values: torch.Tensor, is_fit: torch.Tensor) -> torch.Tensor:
        """Widen. Of a chunk that is not fit the finite elements are rounded all the same."""
        del is_fit
        return self._words[: values.numel()].bitwise_left_shift_(16).view(torch.float32)

    def _allocate(self, capacity: int) -> None:
        self._words = torch.empty(capacity, dtype=torch.int32, device=self._device)


class DeviceBlocks(DeviceCodec):
    """A scale a block of 128: sites/codecs/quantising_codecs.py has the arithmetic."""

    level_max: ClassVar[float]
    level_dtype: ClassVar[torch.dtype]
    """dtype of one level; conversion to it rounds, unless `_round` has."""
    codes_per_byte: ClassVar[int] = 1

    def body_bytes(self, numel: int) -> int:
        """Return the bytes of the scales and the codes."""
        return 2 * -(-numel // BLOCK) - (-numel // self.codes_per_byte)

    def encode(self, values: torch.Tensor, body: torch.Tensor) -> torch.Tensor:
        """Find scales, multiply by their inverses, round."""
        numel = values.numel()
        num_blocks = self._reserve(numel)
        scaled = self._scaled[: num_blocks * BLOCK]
        scaled[:numel].copy_(values)
        scaled[numel:].zero_()
        peaks = self._find_peaks(scaled, num_blocks)
        scales = torch.div(
            peaks.view(torch.float32), self._level_max, out=self._scales[:num_blocks]
        )
        bits = scales.view(torch.int32)
        bits.add_(0xFFFF).bitwise_right_shift_(16).clamp_(min=_SCALE_MIN)
        body[: 2 * num_blocks].view(torch.int16).copy_(bits)
        bits.bitwise_left_shift_(16)
        inverses = torch.div(self._one, scales, out=self._inverses[:num_blocks])
        scaled.view(num_blocks, BLOCK).mul_(inverses[:, None])
        self._round(scaled)
        self._levels[: len(scaled)].copy_(scaled)
        self._write_codes(numel, body[2 * num_blocks :])
        return peaks.amax() < _TOO_LARGE

    def decode(self, values: torch.Tensor, is_fit: torch.Tensor) -> torch.Tensor:
        """Multiply levels by scales. A chunk that is not fit crosses as it is."""
        numel = values.numel()
        num_blocks = self._reserve(numel)
        decoded = self._scaled[: num_blocks * BLOCK]
        decoded.copy_(self._levels[: len(decoded)])
        decoded.view(num_blocks, BLOCK).mul_(self._scales[:num_blocks, None])
        return torch.where(is_fit, decoded[:numel], values, out=decoded[:numel])

    def _find_peaks(self, scaled: torch.Tensor, num_blocks: int) -> torch.Tensor:
        """Return the bits of each block's largest magnitude: int32, shape (num_blocks,)."""
        magnitudes = self._magnitudes[: len(scaled)]
        torch.bitwise_and(scaled.view(torch.int32), _MAGNITUDE, out=magnitudes)
        return torch.amax(magnitudes.view(num_blocks, BLOCK), 1, out=self._peaks[:num_blocks])

    def _allocate(self, capacity: int) -> None:
        num_blocks = capacity // BLOCK
        # On CUDA, dividing by a number of the host would be multiplying by its inverse.
        self._level_max = torch.full((1,), self.level_max, dtype=torch.float32, device=self._device)
        self._one = torch.ones(1, dtype=torch.float32, device=self._device)
        self._scaled = torch.empty(capacity, dtype=torch.float32, device=self._device)
        self._magnitudes = torch.empty(capacity, dtype=torch.int32, device=self._device)
        self._levels = torch.empty(capacity, dtype=self.level_dtype, device=self._device)
        self._peaks = torch.empty(num_blocks, dtype=torch.int32, device=self._device)
        self._scales = torch.empty(num_blocks, dtype=torch.float32, device=self._device)
        self._inverses = torch.empty(num_blocks, dtype=torch.float32, device=self._device)

    def _round(self, scaled: torch.Tensor) -> None:
        """Round to whole numbers, ties to even."""
        scaled.round_()

    def _write_codes(self, numel: int, codes: torch.Tensor) -> None:
        """Write the codes of `_levels`, which `decode` still needs."""
        codes.copy_(self._levels[:numel].view(torch.uint8))


class DeviceInt8(DeviceBlocks):
    """int8: a byte an element."""

    level_max = 127.0
    level_dtype = torch.int8


class DeviceInt4(DeviceBlocks):
    """int4: half a byte an element."""

    level_max = 7.0
    level_dtype = torch.int8
    codes_per_byte = 2

    def _allocate(self, capacity: int) -> None:
        super()._allocate(capacity)
        self._words = torch.empty(capacity // 2, dtype=torch.int16, device=self._device)
        self._shifted = torch.empty_like(self._words)

    def _write_codes(self, numel: int, codes: torch.Tensor) -> None:
        """As Int4 does: from two bytes of a word into its lower one.

        Behind odd numbers lies a zero.
        """
        pairs = self._levels[: 2 * len(codes)].view(torch.int16)
        words, shifted = self._words[: len(codes)], self._shifted[: len(codes)]
        torch.bitwise_and(pairs, 0x0F0F, out=words)
        torch.bitwise_right_shift(words, 4, out=shifted)
        codes.copy_(words.bitwise_or_(shifted).bitwise_and_(0xFF))


class DeviceFp8(DeviceBlocks):
    """e4m3: torch's conversion rounds to nearest, ties to even, and nothing is above 448 here."""

    level_max = 448.0
    level_dtype = torch.float8_e4m3fn

    def _round(self, scaled: torch.Tensor) -> None:
        """Leave it to the conversion."""


DEVICE_CODECS: Final[dict[str, type[DeviceCodec]]] = {
    "bf16": DeviceBf16,
    "int8": DeviceInt8,
    "int8-zstd": DeviceInt8,
    "int4": DeviceInt4,
    "int4-zstd": DeviceInt4,
    "fp8": DeviceFp8,
    "fp8-zstd": DeviceFp8,
}
"""By the names of job files. zstd is the gateway's part."""
