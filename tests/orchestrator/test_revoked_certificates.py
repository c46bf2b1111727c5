"""Lists of revoked certificates: who is on them, and which lists are put in force."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from isthmus.orchestrator import certificates
from isthmus.orchestrator.certificates import (
    certificates_in,
    change_authority,
    forget_former_authorities,
    is_due,
    issue,
    make_authority,
    make_token,
    renew,
    revoke,
    revoked_in,
    site_files,
)
from isthmus.protos.limits import REVOCATIONS_BYTES
from isthmus.protos.mutual_tls import CertificateError, TlsSecurity
from isthmus.protos.revocation import RevocationError
from tests.fakes.certified import DOMAIN, certify, files_in


@pytest.fixture
def certs(tmp_path: Path) -> Path:
    """A folder with certificates of two sites."""
    certify(tmp_path / "certs", "a", "b")
    return tmp_path / "certs"


def revoked_names(folder: Path) -> set[str]:
    return {each.name for each in certificates_in(folder) if each.is_revoked}


def is_revoked(folder: Path, certificate: bytes) -> bool:
    found = revoked_in(folder)
    assert found is not None
    return found.has(certificate)


def test_all_that_a_site_has_ever_had_is_revoked_and_nothing_else(certs: Path) -> None:
    first = (certs / "a.agent.pem").read_bytes()
    renew(certs, "a.agent", 30.0)
    token = make_token(certs, "a", 1.0)
    revoke(certs, "a")
    assert revoked_names(certs) == {"a.agent", "a.gateway"}
    assert is_revoked(certs, first)
    assert is_revoked(certs, token.cert)
    issue(certs, "a.agent", 30.0, replace=True)
    assert revoked_names(certs) == {"a.gateway"}
    revoke(certs, "b")
    assert revoked_names(certs) == {"a.gateway", "b.agent", "b.gateway"}
    assert is_revoked(certs, first)


def test_a_stolen_key_gets_no_further_certificate(certs: Path) -> None:
    revoke(certs, "a")
    for made in (
        lambda: renew(certs, "a.gateway", 30.0),
        lambda: site_files(certs, "a", 30.0),
    ):
        with pytest.raises(CertificateError, match="revoked: `isthmus certs issue --force a"):
            made()
    assert not is_due(certs, "a.gateway", 1000.0)
    assert is_due(certs, "b.gateway", 1000.0)
    for name in ("a.agent", "a.gateway"):
        issue(certs, name, 30.0, replace=True)
    assert site_files(certs, "a", 30.0)


def test_what_was_revoked_stays_so_while_the_authority_is_changed(certs: Path) -> None:
    stolen = (certs / "a.gateway.pem").read_bytes()
    revoke(certs, "a")
    before = revoked_in(certs)
    change_authority(certs)
    after = revoked_in(certs)
    assert before is not None
    assert after is not None
    assert (after.number, after.revoked) == (before.number + 1, before.revoked)
    for name in ("coordinator", "operator", "b.agent", "b.gateway"):
        renew(certs, name, 30.0)
    revoke(certs, "b")
    assert is_revoked(certs, stolen)
    for name in ("b.agent", "b.gateway"):
        issue(certs, name, 30.0, replace=True)
    forget_former_authorities(certs)
    assert is_revoked(certs, stolen)


def test_other_programs_read_the_list(certs: Path) -> None:
    revoke(certs, "a")
    serial = x509.load_pem_x509_certificate((certs / "a.agent.pem").read_bytes()).serial_number
    command = ("openssl", "crl", "-in", "ca.crl", "-text", "-noout", "-CAfile", "ca.pem")
    told = subprocess.run(command, cwd=certs, capture_output=True, text=True, check=True)
    assert "verify OK" in told.stderr
    assert f"{serial:X}" in told.stdout


def test_what_has_expired_leaves_the_list(certs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A day later, as clocks differ."""
    issue(certs, "a.agent", -0.001, replace=True)
    expired = (certs / "a.agent.pem").read_bytes()
    revoke(certs, "a")
    assert is_revoked(certs, expired)
    monkeypatch.setattr(certificates, "_KEPT", timedelta())
    revoke(certs, "a")
    assert not is_revoked(certs, expired)
    assert is_revoked(certs, (certs / "a.gateway.pem").read_bytes())


def test_who_has_no_certificate_or_record_is_named(certs: Path) -> None:
    with pytest.raises(CertificateError, match="has no certificate of a site 'c'"):
        revoke(certs, "c")
    (certs / "ca.issued").unlink()
    with pytest.raises(CertificateError, match="which certificates a site has had is not known"):
        revoke(certs, "a")


def signed(folder: Path, *extensions: tuple[x509.ExtensionType, bool]) -> str:
    """Return a list of nothing, by the folder's authority."""
    authority = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    key = load_pem_private_key((folder / "ca.key").read_bytes(), None)
    now = datetime.now(UTC)
    builder = x509.CertificateRevocationListBuilder().issuer_name(authority.subject)
    builder = builder.last_update(now).next_update(now + timedelta(days=1))
    for extension, is_critical in extensions:
        builder = builder.add_extension(extension, is_critical)
    made = builder.sign(key, hashes.SHA256())  # type: ignore[arg-type]
    return made.public_bytes(Encoding.PEM).decode()


def test_a_bad_list_is_refused_by_name_and_the_one_in_force_stays(
    tmp_path: Path, certs: Path
) -> None:
    security = TlsSecurity(files_in(certs), "b.gateway")
    revoke(certs, "a")
    older = (certs / "ca.crl").read_text()
    revoke(certs, "a")
    newest = (certs / "ca.crl").read_text()
    assert security.take_revoked(newest)
    assert not security.take_revoked(newest)
    foreign = tmp_path / "foreign"
    make_authority(foreign, DOMAIN)
    number = x509.CRLNumber(9)
    for text, why in (
        ("", "it is no list of revoked certificates"),
        (newest[:200], "it is no list of revoked certificates"),
        ((certs / "ca.pem").read_text(), "it is no list of revoked certificates"),
        ("x" * (REVOCATIONS_BYTES + 1), "the limit is"),
        (older, "its number is 1, and that of the list in force 2"),
        (signed(certs), "it has no number"),
        (signed(certs, (number, False), (x509.DeltaCRLIndicator(1), True)), "2.5.29.27 is not"),
        (signed(foreign, (number, False)), "none of the authorities that are believed here"),
    ):
        with pytest.raises(RevocationError, match=why):
            security.take_revoked(text)
        assert security.revoked is not None
        assert security.revoked.text == newest
    assert security.take_revoked(signed(certs, (number, False)))


def test_a_list_whose_signature_was_changed_is_refused(certs: Path) -> None:
    revoke(certs, "a")
    found = x509.load_pem_x509_crl((certs / "ca.crl").read_bytes())
    damaged = bytearray(found.public_bytes(Encoding.DER))
    damaged[-1] ^= 1
    text = x509.load_der_x509_crl(bytes(damaged)).public_bytes(Encoding.PEM).decode()
    with pytest.raises(RevocationError, match="none of the authorities"):
        TlsSecurity(files_in(certs), "b.gateway").take_revoked(text)
