"""A small certificate authority in a folder, for deployments that have none of their own.

FOLDER/ca.pem, ca.key        the authority; keep ca.key away from the sites
FOLDER/NAME.pem, NAME.key    each party's: `coordinator`, `operator`, `eu.agent`, `eu.gateway`

While the authority is changed, ca.pem has the present one first, and behind it the former ones,
whose certificates still count. Each has a name of its own, and certificates say by which key they
were signed: TLS libraries look an issuer up by these, and try no second one.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from isthmus.orchestrator.run_folder.run_files import write_atomically
from isthmus.protos.errors import StateConflictError
from isthmus.protos.failure import text_of
from isthmus.protos.identities import (
    AGENT,
    COORDINATOR,
    GATEWAY,
    JOINER,
    OPERATOR,
    WARN_DAYS,
    Identity,
)
from isthmus.protos.join_tokens import JoinToken
from isthmus.protos.mutual_tls import CertificateError, identity_of, is_made_by
from isthmus.protos.private_files import make_secret, read_secret

CA, FORMER = "ca", "ca, former"
CLOCK_SKEW = timedelta(minutes=5)
"""By how much a site's clock may be behind for a certificate made just now."""
CA_DAYS = 3650


class CertificateExistsError(StateConflictError):
    """There is one already, and nobody said that it may be replaced."""

    code = "FILE_EXISTS"


@dataclass(frozen=True, slots=True)
class Certificate:
    """One certificate of the folder."""

    name: str
    identity: str
    """The SPIFFE URI; empty for the authority."""
    ends: datetime
    fingerprint: str
    """sha256 of the certificate, in hex."""

    @property
    def days_left(self) -> float:
        """Below zero once it has expired."""
        return (self.ends - datetime.now(UTC)).total_seconds() / 86_400


def names_for(sites: list[str]) -> list[str]:
    """Return everybody who needs a certificate in a deployment."""
    parties = [f"{site}.{role}" for site in sites for role in (AGENT, GATEWAY)]
    return [COORDINATOR, OPERATOR, *parties]


def make_authority(folder: Path, domain: str) -> Certificate:
    """Make an authority for a domain.

    Raises:
        CertificateExistsError: the folder has one.
        CertificateError: the domain is none.
        OSError: the folder cannot be written.
    """
    if Identity.of_name(domain, COORDINATOR) is None:
        raise CertificateError(f"{domain!r}: want a domain, as isthmus.internal")
    if (folder / f"{CA}.key").exists() or (folder / f"{CA}.pem").exists():
        raise CertificateExistsError(f"{folder}: has an authority already")
    return _new_authority(folder, domain, [])


def change_authority(folder: Path) -> Certificate:
    """Make another authority for the domain; the former ones stay in ca.pem behind it.

    Raises:
        CertificateError: the authority cannot be used.
        OSError: the folder cannot be written.
    """
    former = authorities_in(folder)
    domain = _domain_of(former[0])
    (folder / f"{CA}.key").unlink(missing_ok=True)
    return _new_authority(folder, domain, former)


def forget_former_authorities(folder: Path) -> Certificate:
    """Leave the present authority alone in ca.pem.

    Raises:
        CertificateError: a certificate in the folder is still of a former one.
        OSError: the folder cannot be written.
    """
    if left := of_former_authorities(folder):
        raise CertificateError(
            f"{', '.join(left)}: still of a former authority: `isthmus certs renew`, then take "
            "them there"
        )
    present = authorities_in(folder)[0]
    write_atomically(folder / f"{CA}.pem", _text(present))
    return _described(CA, present)


def authorities_in(folder: Path) -> list[x509.Certificate]:
    """Return what is in ca.pem, the present authority first.

    Raises:
        CertificateError: there is none.
    """
    return _read_all(folder / f"{CA}.pem")


def of_former_authorities(folder: Path) -> list[str]:
    """Return the names of parties whose certificates are not of the present authority.

    Raises:
        CertificateError: a file is no certificate.
    """
    present = authorities_in(folder)[0]
    parties = (path for path in sorted(folder.glob("*.pem")) if path.stem != CA)
    return [path.stem for path in parties if not is_made_by(present, _read(path))]


def _new_authority(folder: Path, domain: str, former: list[x509.Certificate]) -> Certificate:
    key = ec.generate_private_key(ec.SECP256R1())
    serial = x509.random_serial_number()
    common_name = f"isthmus {serial >> 96:016x} {domain}"[:64]
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    builder = _builder(name, name, key.public_key(), CA_DAYS).serial_number(serial)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_key_usage(signs_certificates=True), critical=True)
    root = x509.UniformResourceIdentifier(f"spiffe://{domain}")
    builder = builder.add_extension(x509.SubjectAlternativeName([root]), critical=False)
    made = builder.sign(key, hashes.SHA256())
    make_secret(folder / f"{CA}.key", _pem_of(key))
    write_atomically(folder / f"{CA}.pem", "".join(map(_text, [made, *former])))
    return _described(CA, made)


def issue(folder: Path, name: str, days: float, *, replace: bool = False) -> Certificate:
    """Make a key and a certificate for one party.

    Args:
        folder: With the authority's key.
        name: As `Identity.file_name` has it.
        days: How long it counts.
        replace: Put it in the place of one that is there.

    Raises:
        CertificateExistsError: there is one, and it may not be replaced.
        CertificateError: there is no such party, or the authority cannot be used.
        UnsafeFileError: others may read the authority's key.
        OSError: the folder cannot be written.
    """
    key_path = folder / f"{name}.key"
    if key_path.exists() and not replace:
        raise CertificateExistsError(f"{key_path}: is there already")
    _identity(folder, name)
    key_path.unlink(missing_ok=True)
    make_secret(key_path, _pem_of(ec.generate_private_key(ec.SECP256R1())))
    return renew(folder, name, days)


def renew(folder: Path, name: str, days: float) -> Certificate:
    """Make a new certificate for the key that a party has; processes notice by themselves.

    Raises:
        CertificateError: the authority or the key cannot be used.
        UnsafeFileError: others may read a key.
        OSError: the folder cannot be written.
    """
    public = _read_key(folder / f"{name}.key").public_key()
    made = _signed(folder, name, public, days)
    write_atomically(folder / f"{name}.pem", _text(made))
    return _described(name, made)


def make_token(folder: Path, site: str, days: float) -> JoinToken:
    """Make a join token for a site; nothing of it is kept.

    Raises:
        CertificateError: the authority cannot be used.
        UnsafeFileError: others may read its key.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    made = _signed(folder, f"{site}.{JOINER}", key.public_key(), days)
    ca = (folder / f"{CA}.pem").read_bytes()
    return JoinToken(ca, _text(made).encode("ascii"), _pem_of(key))


def site_files(folder: Path, site: str, days: float) -> dict[str, bytes]:
    """Return the certificates and keys of a site, by file name, made or renewed where it is time.

    Raises:
        CertificateError: the authority or a key cannot be used.
        UnsafeFileError: others may read a key.
        OSError: the folder cannot be written.
    """
    found = {}
    for name in (f"{site}.{role}" for role in (AGENT, GATEWAY)):
        if not (folder / f"{name}.key").exists():
            issue(folder, name, days)
        elif is_due(folder, name, WARN_DAYS):
            renew(folder, name, days)
        found[f"{name}.pem"] = (folder / f"{name}.pem").read_bytes()
        found[f"{name}.key"] = read_secret(folder / f"{name}.key")
    return found


def is_due(folder: Path, name: str, within_days: float) -> bool:
    """Whether a party's certificate ends soon, or is of a former authority.

    Raises:
        CertificateError: a file is no certificate.
    """
    ends_soon = _described(name, _read(folder / f"{name}.pem")).days_left < within_days
    return ends_soon or name in of_former_authorities(folder)


def _signed(
    folder: Path, name: str, public: ec.EllipticCurvePublicKey, days: float
) -> x509.Certificate:
    """Return a certificate of the folder's authority."""
    identity = _identity(folder, name)
    authority, signing = _read(folder / f"{CA}.pem"), _read_key(folder / f"{CA}.key")
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    names = [x509.UniformResourceIdentifier(identity.uri), x509.DNSName(identity.dns_name)]
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if identity.role != JOINER:
        uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
    builder = _builder(authority.subject, subject, public, days)
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
    builder = builder.add_extension(_key_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    signed_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key())
    builder = builder.add_extension(signed_by, critical=False)
    return builder.sign(signing, hashes.SHA256())


def certificates_in(folder: Path) -> list[Certificate]:
    """Return all of a folder, the one that ends first first.

    Raises:
        CertificateError: there is none, or a file is none.
    """
    found = [
        _described(path.stem if place == 0 or path.stem != CA else FORMER, each)
        for path in folder.glob("*.pem")
        for place, each in enumerate(_read_all(path))
        if place == 0 or path.stem == CA
    ]
    if not found:
        raise CertificateError(f"{folder}: has no certificates; `isthmus certs init` makes them")
    return sorted(found, key=lambda each: (each.ends, each.name))


def _identity(folder: Path, name: str) -> Identity:
    """Return who `name` is in the authority's domain."""
    identity = Identity.of_name(_domain_of(_read(folder / f"{CA}.pem")), name)
    if identity is None:
        raise CertificateError(f"{name!r}: want coordinator, operator, SITE.agent or SITE.gateway")
    return identity


def _domain_of(authority: x509.Certificate) -> str:
    names = authority.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    (uri,) = names.get_values_for_type(x509.UniformResourceIdentifier)
    return uri.removeprefix("spiffe://")


def _builder(
    issuer: x509.Name, subject: x509.Name, public: ec.EllipticCurvePublicKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .subject_name(subject)
        .public_key(public)
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _described(name: str, certificate: x509.Certificate) -> Certificate:
    identity = identity_of(certificate)
    return Certificate(
        name,
        identity.uri if identity else "",
        certificate.not_valid_after_utc,
        certificate.fingerprint(hashes.SHA256()).hex(),
    )


def _read(path: Path) -> x509.Certificate:
    return _read_all(path)[0]


def _read_all(path: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except FileNotFoundError as error:
        raise CertificateError(f"{path}: is not there; `isthmus certs init` makes it") from error
    except ValueError as error:
        raise CertificateError(f"{path}: no certificate in PEM: {text_of(error)}") from error


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(read_secret(path), password=None)
    except FileNotFoundError as error:
        raise CertificateError(f"{path}: is not there") from error
    except (TypeError, ValueError) as error:
        raise CertificateError(f"{path}: no key in PEM: {text_of(error)}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CertificateError(f"{path}: want an elliptic curve's key")
    return key


def _pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _text(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode("ascii")
