"""The list of revoked certificates: an X.509 CRL, signed by an authority of the deployment.

The coordinator carries it. Agents and gateways get it from there, and check it themselves. Once in
force, a list stays so until one with a higher number comes, whenever it says that it ends: nothing
that was revoked counts again because nobody made a newer list.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from isthmus.protos.errors import IsthmusError
from isthmus.protos.failure import text_of
from isthmus.protos.limits import REVOCATIONS_BYTES

if TYPE_CHECKING:
    from cryptography import x509

Named = tuple[bytes, int]
"""A certificate: its issuer's name (DER), and its serial number."""


class RevocationError(IsthmusError):
    """A list of revoked certificates cannot be used; the one in force stays."""

    code = "BAD_REVOCATION_LIST"


@dataclass(frozen=True, slots=True)
class RevocationList:
    """A list that an authority has signed."""

    text: str
    """PEM."""
    number: int
    """A later list has a higher one."""
    revoked: frozenset[Named]

    @classmethod
    def read(cls, text: str, authorities: Iterable[x509.Certificate]) -> Self:
        """Read a list, and check who has signed it.

        Raises:
            RevocationError: it is none, lacks a number, or none of `authorities` has signed it.
        """
        from cryptography import x509  # imported late: not needed without TLS

        if len(text) > REVOCATIONS_BYTES:
            raise RevocationError(f"it has {len(text)} bytes; the limit is {REVOCATIONS_BYTES}")
        try:
            found = x509.load_pem_x509_crl(text.encode())
            _require_whole(found)
            number = found.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
            revoked = frozenset(_entries(found))
        except x509.ExtensionNotFound as error:
            why = "it has no number (X.509's CRL number), which tells a later list from an older"
            raise RevocationError(why) from error
        except (ValueError, x509.InvalidVersion, x509.DuplicateExtension) as error:
            why = f"it is no list of revoked certificates (X.509 CRL in PEM): {text_of(error)}"
            raise RevocationError(why) from error
        if not any(_is_signed_by(each, found) for each in authorities):
            raise RevocationError("none of the authorities that are believed here has signed it")
        return cls(text, number, revoked)

    def has(self, shown: bytes) -> bool:
        """Whether a certificate (PEM) is revoked."""
        return named(shown) in self.revoked


@functools.lru_cache(maxsize=1024)
def named(shown: bytes) -> Named:
    """Return which certificate this is (PEM)."""
    from cryptography import x509

    certificate = x509.load_pem_x509_certificate(shown)
    return certificate.issuer.public_bytes(), certificate.serial_number


def _require_whole(found: x509.CertificateRevocationList) -> None:
    """Refuse a list that has only a part of what is revoked.

    Raises:
        ValueError: it does, or says what is not known here, and has to be.
    """
    from cryptography import x509

    for each in found.extensions:
        if each.critical and not isinstance(each.value, x509.IssuingDistributionPoint):
            raise ValueError(f"its extension {each.oid.dotted_string} is not known here")


def _entries(found: x509.CertificateRevocationList) -> Iterator[Named]:
    """Yield what is revoked; an entry without an issuer has that of the one before it."""
    from cryptography import x509

    issuer = found.issuer.public_bytes()
    for entry in found:
        for each in entry.extensions:
            if isinstance(each.value, x509.CertificateIssuer):
                (name,) = each.value.get_values_for_type(x509.DirectoryName)
                issuer = name.public_bytes()
        yield issuer, entry.serial_number


def _is_signed_by(authority: x509.Certificate, found: x509.CertificateRevocationList) -> bool:
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        is_valid = found.is_signature_valid(authority.public_key())  # type: ignore[arg-type]
    except (TypeError, ValueError, UnsupportedAlgorithm):
        return False
    return is_valid and authority.subject == found.issuer
