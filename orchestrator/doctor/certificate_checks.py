"""Certificates of this machine's parties: there, readable, of the authority, and valid by now."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from isthmus.orchestrator.doctor.findings import Finding
from isthmus.orchestrator.doctor.kinds import finding
from isthmus.protos.identities import WARN_DAYS
from isthmus.protos.mutual_tls import (
    CertificateError,
    ForeignCertificateError,
    NotYetValidError,
    TlsFiles,
    TlsSecurity,
)
from isthmus.protos.private_files import UnsafeFileError

_KINDS: dict[type[Exception], str] = {
    UnsafeFileError: "key-unsafe",
    ForeignCertificateError: "certificate-foreign",
    NotYetValidError: "certificate-not-yet",
}


def certificate_findings(names: Sequence[str], files: TlsFiles) -> list[Finding]:
    """Return what is wrong with the certificates of parties, by their names."""
    if not Path(files.ca).exists() and not any(
        Path(files.of(name).cert).exists() for name in names
    ):
        return [finding("no-certificates", ca=files.ca)]  # nobody has made any yet
    return [each for name in names for each in _of(name, files)]


def _of(name: str, files: TlsFiles) -> Iterator[Finding]:
    own, site = files.of(name), name.rpartition(".")[0] or None
    try:
        found = TlsSecurity(files, name).read()
    except (UnsafeFileError, CertificateError) as error:
        is_there = Path(own.cert).exists() and Path(own.key).exists()
        other = "certificate-unusable" if is_there else "certificate-missing"
        kind = _KINDS.get(type(error), other)
        yield finding(kind, site, error=error, name=name, key=shlex.quote(own.key))
        return
    days = (found.ends - datetime.now(UTC)).total_seconds() / 86_400
    if days < WARN_DAYS:
        yield finding("certificate-ends", site, name=name, cert=own.cert, days=f"{days:.1f}")
