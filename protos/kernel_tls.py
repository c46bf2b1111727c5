"""TLS by the kernel (kTLS), which encrypts what is written to a socket where OpenSSL lets it.

OpenSSL hands a connection's keys to the kernel after the handshake, if it is asked to and both can.
Its functions read and write as before.
"""

from __future__ import annotations

import _ssl
import ctypes
import errno
import socket
import ssl
from typing import Final

OPTION: Final = getattr(ssl, "OP_ENABLE_KTLS", 1 << 3)  # Python names it from 3.12 on
_FIRST_OPENSSL: Final = (3, 0)
_TCP_ULP: Final = 31  # linux/tcp.h
_SET_CONTROL: Final = 74  # BIO_CTRL_SET_KTLS_TX_SEND_CTRL_MSG
_ALL_FLAGS: Final = -1


def ask_for(context: ssl.SSLContext) -> None:
    """Ask the kernel to encrypt a context's connections, where it and OpenSSL can."""
    if ssl.OPENSSL_VERSION_INFO >= _FIRST_OPENSSL:
        context.options |= OPTION


def what_lacks() -> str | None:
    """Return what this machine lacks for TLS by the kernel; None: nothing."""
    return missing(kernel_has=_kernel_has(), openssl_has=_openssl_has())


def missing(*, kernel_has: bool, openssl_has: bool) -> str | None:
    """Return what is missing, in words; None: nothing."""
    lacks = [] if kernel_has else ["the kernel (CONFIG_TLS, module tls)"]
    lacks += [] if openssl_has else [f"Python's {ssl.OPENSSL_VERSION} (enable-ktls)"]
    return " and ".join(lacks) or None


def _kernel_has() -> bool:
    """Whether a process of this user gets TLS from the kernel."""
    with socket.socket() as unconnected:
        try:
            unconnected.setsockopt(socket.IPPROTO_TCP, _TCP_ULP, b"tls")
        except OSError as error:
            return error.errno == errno.ENOTCONN
    return True


def _openssl_has() -> bool:
    """Whether Python's OpenSSL was built with it: its sockets then note what kernels are told."""
    if ssl.OPENSSL_VERSION_INFO < _FIRST_OPENSSL:
        return False
    try:
        library = ctypes.CDLL(getattr(_ssl, "__file__", None))
        library.BIO_new_socket.restype = ctypes.c_void_p
        library.BIO_ctrl.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_void_p)
        library.BIO_test_flags.argtypes = (ctypes.c_void_p, ctypes.c_int)
        library.BIO_free.argtypes = (ctypes.c_void_p,)
        end = library.BIO_new_socket(-1, 0)
        try:
            before = library.BIO_test_flags(end, _ALL_FLAGS)
            library.BIO_ctrl(end, _SET_CONTROL, 0, None)
            return bool(library.BIO_test_flags(end, _ALL_FLAGS) != before)
        finally:
            library.BIO_free(end)
    except (AttributeError, OSError):
        return False
