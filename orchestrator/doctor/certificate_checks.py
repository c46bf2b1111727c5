"""Certificates of this machine's parties: there, readable, of the authority, and valid by now."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from isthmus.orchestrator.doctor.findings import Finding, Severity
from isthmus.protos.mutual_tls import (
    WARN_DAYS,
    CertificateError,
    ForeignCertificateError,
    NotYetValidError,
    TlsFiles,
    TlsSecurity,
)
from isthmus.protos.private_files import UnsafeFileError

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
    except ForeignCertificateError as error:
        cure = f"isthmus certs issue --force {name}, where the authority is; take ca.pem along"
        yield _finding(Severity.ERROR, "certificate-foreign", name, str(error), cure)
        return
    except NotYetValidError as error:
        cure = "sudo timedatectl set-ntp true; timedatectl timesync-status"
        yield _finding(Severity.ERROR, "certificate-not-yet", name, str(error), cure)
        return
    except CertificateError as error:
        is_there = Path(own.cert).exists() and Path(own.key).exists()
        kind = "certificate-unusable" if is_there else "certificate-missing"
        cure = f"isthmus certs {'renew' if is_there else 'issue'} {name}, where the authority is"
        yield _finding(Severity.ERROR, kind, name, str(error), cure)
        return
    days = (found.ends - datetime.now(UTC)).total_seconds() / 86_400
    if days < WARN_DAYS:
        cure = f"isthmus certs renew {name}, where the authority is"
        yield _finding(
            Severity.WARNING, "certificate-ends", name, f"{own.cert}: ends in {days:.1f} days", cure
        )


def _finding(severity: Severity, kind: str, name: str, found: str, cure: str) -> Finding:
    site = name.rpartition(".")[0] or None
    return Finding(severity=severity, kind=kind, site=site, found=found, why=_WHY, cure=cure)
