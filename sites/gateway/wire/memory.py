"""What connection.pxd takes from C, by ctypes: for connection.py where nothing compiles it."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import socket
import sys
import termios
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

_PIECES: Final = 16
_QUIETLY: Final = 0x4000 | 0x40  # MSG_NOSIGNAL, MSG_DONTWAIT
_libc = ctypes.CDLL(None, use_errno=True)


_Session, _Address = ctypes.c_size_t, ctypes.c_size_t
_Cipher = ctypes.CFUNCTYPE(ctypes.c_int, _Session, _Address, ctypes.c_int, use_errno=True)
_Why = ctypes.CFUNCTYPE(ctypes.c_int, _Session, ctypes.c_int)
_Forget = ctypes.CFUNCTYPE(None)
_Last = ctypes.CFUNCTYPE(ctypes.c_ulong)
_openssl: list[Callable[..., int]] = []
_failed = [0]
_WANTS_READ, _WANTS_WRITE, _SYSCALL, _ZERO_RETURN = 2, 3, 5, 6  # SSL_ERROR_


class _Piece(ctypes.Structure):
    _fields_ = (("at", ctypes.c_size_t), ("length", ctypes.c_size_t))


class _Message(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_bytes", ctypes.c_uint32),
        ("pieces", ctypes.c_void_p),
        ("num_pieces", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_bytes", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


for _name in ("readv", "sendmsg"):
    getattr(_libc, _name).restype = ctypes.c_ssize_t


def address_of(owner: bytes | bytearray | memoryview) -> int:
    """Return the address of an object's memory, which is not empty."""
    return int(np.frombuffer(owner, np.uint8).ctypes.data)


def copy(to: int, source: int, length: int) -> None:
    """Copy memory that does not overlap."""
    ctypes.memmove(to, source, length)


move = copy


def load8(at: int) -> int:
    """Return a byte."""
    return ctypes.string_at(at, 1)[0]


def load32(at: int) -> int:
    """Return 32 bits in the network's order."""
    return int.from_bytes(ctypes.string_at(at, 4))


def store_head(at: int, length: int, stream: int, prefix: int, message: int) -> None:
    """Write the head of a frame of DATA, and a message's prefix if there is room for one."""
    head = length.to_bytes(3) + bytes(2) + stream.to_bytes(4)
    if prefix:
        head += bytes(1) + message.to_bytes(4)
    ctypes.memmove(at, head, len(head))


def receive(descriptor: int, at: int, length: int, at2: int, length2: int) -> int:
    """Read into two places, one after the other; return how much, or -errno."""
    parts = (_Piece * 2)(_Piece(at, length), _Piece(at2, length2))
    got = _libc.readv(descriptor, parts, 2 if length2 else 1)
    return got if got >= 0 else -ctypes.get_errno()


def transmit(
    descriptor: int,
    starts: Sequence[int],
    lengths: Sequence[int],
    first: int,
    count: int,
    room: int,
) -> int:
    """Send pieces, at most `room` bytes; return how much was sent, or -errno."""
    parts = (_Piece * _PIECES)()
    num_parts = 0
    while num_parts < min(count, _PIECES) and room > 0:
        length = min(lengths[first + num_parts], room)
        parts[num_parts] = _Piece(starts[first + num_parts], length)
        room -= length
        num_parts += 1
    message = _Message(pieces=ctypes.addressof(parts), num_pieces=num_parts)
    sent = _libc.sendmsg(descriptor, ctypes.byref(message), _QUIETLY)
    return sent if sent >= 0 else -ctypes.get_errno()


def is_block(result: int) -> bool:
    """Whether the socket has no bytes, or no room, for now."""
    return result in (-errno.EAGAIN, -errno.EWOULDBLOCK, -errno.EINTR)


def set_mark(descriptor: int, mark: int) -> None:
    """Set the low-water mark of a socket."""
    value = ctypes.c_int(mark)
    _libc.setsockopt(descriptor, socket.SOL_SOCKET, socket.SO_RCVLOWAT, ctypes.byref(value), 4)


def unacknowledged(descriptor: int) -> int:
    """Return the bytes that were written and that the peer's TCP has not acknowledged."""
    try:
        return int.from_bytes(fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except OSError:
        return 0  # sending tells the error


def use_tls(reads: int, writes: int, why: int, forgets: int, last: int) -> None:
    """Set the addresses of OpenSSL's functions."""
    _openssl[:] = (_Cipher(reads), _Cipher(writes), _Why(why), _Forget(forgets), _Last(last))


def tls_failure() -> int:
    """Return OpenSSL's number of the latest error."""
    return _failed[0]


def decipher(session: int, at: int, length: int) -> int:
    """Read from a TLS session; return how much, 0 at its end, or -errno."""
    return _ciphered(0, session, at, length)


def encipher(session: int, at: int, length: int) -> int:
    """Write to a TLS session; return as `decipher`."""
    return _ciphered(1, session, at, length)


def _ciphered(number: int, session: int, at: int, length: int) -> int:
    _openssl[3]()
    ctypes.set_errno(0)
    done = _openssl[number](session, at, length)
    if done > 0:
        return done
    failure = ctypes.get_errno()
    why = _openssl[2](session, done)
    if why in {_WANTS_READ, _WANTS_WRITE}:
        return -errno.EAGAIN
    if why == _SYSCALL:
        return -failure
    if why == _ZERO_RETURN:
        return 0
    _failed[0] = _openssl[4]()
    return -errno.EPROTO
