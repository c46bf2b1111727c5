"""Certificates of this machine's parties: there, readable, of the authority, and valid by now."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from orchestrator.doctor.findings import Finding, Severity
from protos.mutual_tls import WARN_DAYS, CertificateError, Credentials, TlsFiles, TlsSecurity
from protos.private_files import UnsafeFileError

_WHY = "without it the others refuse every connection"


def certificate_findings(names: Sequence[str], files: TlsFiles) -> list[Finding]:
    """Return what is wrong with the certificates of parties, by their names."""
    return [finding for name in names for finding in _of(name, files)]


def _of(name: str, files: TlsFiles) -> Iterator[Finding]:
    own = files.of(name)
    try:
        found = TlsSecurity(files, name).read()
    except UnsafeFileError as error:
        cure = f"chmod 600 {shlex.quote(own.key)}"
        yield _finding(Severity.ERROR, "key-unsafe", name, str(error), cure)
        return
    except CertificateError as error:
        is_there = Path(own.cert).exists() and Path(own.key).exists()
        kind = "certificate-unusable" if is_there else "certificate-missing"
        cure = f"isthmus certs {'renew' if is_there else 'issue'} {name}, where the authority is"
        yield _finding(Severity.ERROR, kind, name, str(error), cure)
        return
    yield from _valid(name, own.cert, found)


def _valid(name: str, path: str, found: Credentials) -> Iterator[Finding]:
    chain = x509.load_pem_x509_certificates(found.cert)
    now = datetime.now(UTC)
    if not _is_signed(chain, x509.load_pem_x509_certificates(found.ca)):
        cure = f"isthmus certs issue --force {name}, where the authority is; take ca.pem along"
        told = f"{path}: is of another authority than the one that is believed here"
        yield _finding(Severity.ERROR, "certificate-foreign", name, told, cure)
    if chain[0].not_valid_before_utc > now:
        told = f"{path}: counts from {chain[0].not_valid_before_utc:%Y-%m-%d %H:%M} UTC on"
        cure = "sudo timedatectl set-ntp true; timedatectl timesync-status"
        yield _finding(Severity.ERROR, "certificate-not-yet", name, told, cure)
    days = (found.ends - now).total_seconds() / 86_400
    if days < WARN_DAYS:
        told = f"{path}: ends in {days:.1f} days"
        cure = f"isthmus certs renew {name}, where the authority is"
        yield _finding(Severity.WARNING, "certificate-ends", name, told, cure)


def _is_signed(chain: list[x509.Certificate], authorities: list[x509.Certificate]) -> bool:
    """Whether each certificate was made by the next one, and the last one by an authority."""
    for place, each in enumerate(chain):
        issuers = chain[place + 1 : place + 2] or authorities
        if not any(_made(issuer, each) for issuer in issuers):
            return False
    return True


def _made(issuer: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (InvalidSignature, TypeError, ValueError):
        return False
    return True


def _finding(severity: Severity, kind: str, name: str, found: str, cure: str) -> Finding:
    site = name.rpartition(".")[0] or None
    return Finding(severity=severity, kind=kind, site=site, found=found, why=_WHY, cure=cure)
