"""TLS by the kernel: who is asked for it, and what a machine lacks for it."""

from __future__ import annotations

import ctypes
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from isthmus.protos import kernel_tls
from isthmus.protos.mutual_tls import TlsSecurity
from isthmus.sites.gateway.wire import tls
from tests.fakes.certified import certify

_AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_ulp")


@pytest.mark.parametrize(
    ("kernel_has", "openssl_has", "wanted"),
    [
        (True, True, None),
        (False, True, "the kernel (CONFIG_TLS, module tls)"),
        (True, False, f"Python's {ssl.OPENSSL_VERSION} (enable-ktls)"),
        (
            False,
            False,
            f"the kernel (CONFIG_TLS, module tls) and Python's {ssl.OPENSSL_VERSION} (enable-ktls)",
        ),
    ],
)
def test_what_is_missing_is_named(kernel_has: bool, openssl_has: bool, wanted: str | None) -> None:
    assert kernel_tls.missing(kernel_has=kernel_has, openssl_has=openssl_has) == wanted


def test_this_kernel_lacks_it_where_it_lists_none() -> None:
    lacks = kernel_tls.what_lacks()
    assert ("the kernel" in (lacks or "")) == ("tls" not in _AVAILABLE.read_text().split())


def test_both_ends_of_a_connection_ask_for_it(tmp_path: Path) -> None:
    security = TlsSecurity(certify(tmp_path, "a"), "a.gateway")
    client, _ = security.client_tls("a.gateway")
    can_have_it = ssl.OPENSSL_VERSION_INFO >= (3, 0)
    for context in (client, security.server_tls()):
        assert bool(context.options & kernel_tls.OPTION) == can_have_it


@dataclass
class Library:
    """OpenSSL's functions that `read_ahead` calls, for one session."""

    kernel_deciphers: bool
    buffers_bytes: list[int] = field(default_factory=list)
    reads_ahead: bool = False

    def SSL_get_rbio(self, session: int) -> int:  # noqa: N802 - OpenSSL's name
        return session + 1

    def BIO_ctrl(self, end: int, command: int, *_: object) -> int:  # noqa: N802
        assert (end, command) == (8, 76)
        return int(self.kernel_deciphers)

    def SSL_set_default_read_buffer_len(self, _: int, num_bytes: int) -> None:  # noqa: N802
        self.buffers_bytes.append(num_bytes)

    def SSL_ctrl(self, _: int, command: int, value: int, __: object) -> None:  # noqa: N802
        self.reads_ahead = (command, value) == (41, 1)


@pytest.mark.parametrize("kernel_deciphers", [False, True])
def test_openssl_reads_ahead_unless_the_kernel_deciphers(kernel_deciphers: bool) -> None:
    library = Library(kernel_deciphers)
    tls.read_ahead(cast("ctypes.PyDLL", library), 7)
    assert library.reads_ahead != kernel_deciphers
    assert bool(library.buffers_bytes) != kernel_deciphers
