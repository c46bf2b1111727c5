"""Damage, drawn from a seeded generator: what links, disks and other builds do to bytes."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

TOKENS = (
    b"null", b"true", b"-1", b"0", b"1e999", b"-1e999", b"1e-400", b"NaN", b"Infinity", b'""', b'"\\ud800"',
    b"[]", b"{}", b"[[]]", b'{"a": {"b": []}}', b"9" * 25, b"9" * 400, b"9" * 5000, b"[" * 3000, b'{"a":' * 3000,
    b"- " * 60, b"&a [*a, *a]", b"<<", b"!!binary x", b"!!python/object:os.system x", b"1..2", b"-1ms", b"1e99GB/s",
    b"0x7f", b"\xff\xfe", b"\x00", b"\x1b[2J", b"\xe2\x80\xa8", b"---\n", b"|\n", b"'", b'"', b"ohio", b"\xc3\xa9" * 200,
)  # fmt: skip
"""What may stand in the place of a value in JSON or YAML, or anywhere else."""

_VALUE = re.compile(rb'"[^"\n]*"|[A-Za-z0-9_.+%/-]+')
_WORDS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 1 << 31, (1 << 32) - 1)


def mutated(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    """Return a copy with one to three kinds of damage.

    Args:
        data: what is damaged.
        others: inputs of the same target: what splices are taken from.
        chance: seeded by the caller.
    """
    for _time in range(chance.choice((1, 1, 1, 2, 3))):
        data = chance.choice(_KINDS)(data, others, chance)
    return data


def _flip_bits(data: bytes, _: Sequence[bytes], chance: random.Random) -> bytes:
    damaged = bytearray(data)
    for _time in range(chance.randint(1, 4) if data else 0):
        damaged[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(damaged)


def _truncate(data: bytes, _: Sequence[bytes], chance: random.Random) -> bytes:
    return data[: chance.randint(0, len(data))]


def _splice(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    other = chance.choice(others)
    return data[: chance.randint(0, len(data))] + other[chance.randint(0, len(other)) :]


def _remove(data: bytes, _: Sequence[bytes], chance: random.Random) -> bytes:
    start = chance.randint(0, len(data))
    return data[:start] + data[start + chance.randint(1, 8) :]


def _repeat(data: bytes, _: Sequence[bytes], chance: random.Random) -> bytes:
    start = chance.randint(0, len(data))
    end = start + chance.randint(1, 64)
    return data[:end] + data[start:end] * chance.randint(1, 5) + data[end:]


def _set_length(data: bytes, _: Sequence[bytes], chance: random.Random) -> bytes:
    """Write a number, of the kind that sizes and counts go wrong with, over some bytes."""
    size = chance.choice((1, 2, 4, 8))
    most = (1 << 8 * size) - 1
    value = chance.choice((*_WORDS, len(data), max(0, len(data) - 1), most, chance.getrandbits(63)))
    place = chance.randint(0, min(len(data), 80))
    return data[:place] + (value & most).to_bytes(size, "little") + data[place + size :]


def _replace_value(data: bytes, _: Sequence[bytes], chance: random.Random) -> bytes:
    """Put something else in the place of a word, number or text."""
    values = list(_VALUE.finditer(data))
    token = chance.choice(TOKENS)
    if not values:
        return data + token
    found = chance.choice(values)
    return data[: found.start()] + token + data[found.end() :]


_KINDS: tuple[Callable[[bytes, Sequence[bytes], random.Random], bytes], ...] = (
    _flip_bits,
    _truncate,
    _splice,
    _remove,
    _repeat,
    _set_length,
    _replace_value,
    _replace_value,
)
