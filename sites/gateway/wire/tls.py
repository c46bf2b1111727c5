"""Python's TLS sessions for connection.py, which reads and writes them by OpenSSL's own functions.

So no record of 16 KiB needs the interpreter, nor its lock. The handshake is done by Python's `ssl`.
Where its OpenSSL cannot be reached, calls read and write by its methods.
"""

from __future__ import annotations

import _ssl
import ctypes
import functools
import ssl
from typing import Final

from isthmus.sites.gateway.wire.connection import last_failure, use_openssl

_READ_AHEAD: Final = 41  # SSL_CTRL_SET_READ_AHEAD
_BUFFER_BYTES: Final = 128 << 10
"""OpenSSL reads this much at a time, several records."""
_KERNEL_DECIPHERS: Final = 76  # BIO_CTRL_GET_KTLS_RECV
_FUNCTIONS: Final = (
    "SSL_read",
    "SSL_write",
    "SSL_get_error",
    "ERR_clear_error",
    "ERR_peek_last_error",
)


class _Object(ctypes.Structure):
    """`PySSLSocket` of CPython's Modules/_ssl.c, as it begins from version 3.7 to 3.14."""

    _fields_ = (
        ("head", ctypes.c_char * object.__basicsize__),
        ("socket", ctypes.c_void_p),
        ("session", ctypes.c_void_p),
    )


@functools.cache
def openssl() -> ctypes.PyDLL | None:
    """Return the OpenSSL that Python's `ssl` uses; None: its functions cannot be found."""
    try:
        library = ctypes.PyDLL(getattr(_ssl, "__file__", None))
        use_openssl(*(_address(getattr(library, name)) for name in _FUNCTIONS))
        library.SSL_get_fd.argtypes = (ctypes.c_void_p,)
        library.SSL_ctrl.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_void_p)
        library.SSL_set_default_read_buffer_len.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        library.SSL_get_rbio.argtypes = (ctypes.c_void_p,)
        library.SSL_get_rbio.restype = ctypes.c_void_p
        library.BIO_ctrl.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_void_p)
        library.ERR_reason_error_string.argtypes = (ctypes.c_ulong,)
        library.ERR_reason_error_string.restype = ctypes.c_char_p
    except (AttributeError, OSError):
        return None
    return library


def _address(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


def session_of(connection: ssl.SSLSocket) -> int:
    """Return the address of a connection's session, after its handshake; 0: it cannot be found."""
    library, inner = openssl(), connection._sslobj  # type: ignore[attr-defined]
    if library is None or inner is None:
        return 0
    session = _Object.from_address(id(inner)).session
    if not session or library.SSL_get_fd(session) != connection.fileno():
        return 0
    read_ahead(library, session)
    return int(session)


def read_ahead(library: ctypes.PyDLL, session: int) -> None:
    """Have OpenSSL read several records at a time, unless the kernel deciphers them.

    The kernel would give all of them as one, and OpenSSL knows none that is longer than 64 KiB.
    """
    if not library.BIO_ctrl(library.SSL_get_rbio(session), _KERNEL_DECIPHERS, 0, None):
        library.SSL_set_default_read_buffer_len(session, _BUFFER_BYTES)
        library.SSL_ctrl(session, _READ_AHEAD, 1, None)


def reason() -> str:
    """Return why a session has failed: the latest that did."""
    library = openssl()
    assert library is not None, "it has failed"
    found = library.ERR_reason_error_string(last_failure())
    return found.decode() if found else "a TLS error"
