"""A small certificate authority in a folder, for deployments that have none of their own.

FOLDER/ca.pem, ca.key        the authority; keep ca.key away from the sites
FOLDER/NAME.pem, NAME.key    each party's: `coordinator`, `operator`, `eu.agent`, `eu.gateway`
FOLDER/ca.issued             all certificates that were made and have not expired
FOLDER/ca.crl                the list of those that were revoked; the coordinator carries it

While the authority is changed, ca.pem has the present one first, and behind it the former ones,
whose certificates still count. Each has a name of its own, and certificates say by which key they
were signed: TLS libraries look an issuer up by these, and try no second one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
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
from isthmus.protos.revocation import Named, RevocationError, RevocationList, named

CA, FORMER = "ca", "ca, former"
ISSUED, REVOKED = f"{CA}.issued", f"{CA}.crl"
CLOCK_SKEW = timedelta(minutes=5)
"""By how much a site's clock may be behind for a certificate made just now."""
CA_DAYS = 3650
_KEPT = timedelta(days=1)
"""For how long what has expired stays on the list: clocks differ."""
_OF_SEVERAL_AUTHORITIES = x509.IssuingDistributionPoint(
    full_name=None,
    relative_name=None,
    only_contains_user_certs=False,
    only_contains_ca_certs=False,
    only_some_reasons=None,
    indirect_crl=True,
    only_contains_attribute_certs=False,
)
"""The list has certificates of former authorities, too."""


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
    is_revoked: bool = False

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
        RevocationError: the list of revoked certificates cannot be used.
        OSError: the folder cannot be written.
    """
    former, revoked = authorities_in(folder), revoked_in(folder)
    domain = _domain_of(former[0])
    (folder / f"{CA}.key").unlink(missing_ok=True)
    made = _new_authority(folder, domain, former)
    if revoked is not None:  # the former ones will not be believed any more
        _sign_list(folder, revoked.revoked)
    return made


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


def revoke(folder: Path, site: str) -> list[Certificate]:
    """Revoke all certificates of a site that have not expired; return them.

    Raises:
        CertificateError: none is on record, or the authority cannot be used.
        RevocationError: the list cannot be used to which they are to be added.
        UnsafeFileError: others may read the authority's key.
        OSError: the folder cannot be written.
    """
    known = revoked_in(folder)
    found = [each for each in _issued(folder) if _site_of(each) == site]
    if not found:
        raise CertificateError(
            f"{folder / ISSUED} has no certificate of a site {site!r} that is still valid"
        )
    before = known.revoked if known is not None else frozenset()
    _sign_list(folder, before | {named(_text(each).encode()) for each in found})
    return [
        replace(_described(_name_of(each), each), is_revoked=True)
        for each in sorted(found, key=lambda each: each.not_valid_before_utc)
    ]


def revoked_in(folder: Path) -> RevocationList | None:
    """Return the list of revoked certificates; None: none was revoked.

    Raises:
        CertificateError: there is no authority.
        RevocationError: the list cannot be used.
    """
    path = folder / REVOKED
    if not path.exists():
        return None
    try:
        return RevocationList.read(path.read_text(errors="replace"), authorities_in(folder))
    except RevocationError as error:
        raise RevocationError(f"{path}: {error}") from error


def _sign_list(folder: Path, revoked: Iterable[Named]) -> None:
    """Write the next list of revoked certificates, without those that have expired."""
    wanted, known = {*revoked}, revoked_in(folder)
    authority, signing = _read(folder / f"{CA}.pem"), _read_key(folder / f"{CA}.key")
    number = known.number + 1 if known is not None else 1
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(authority.subject)
        .last_update(datetime.now(UTC) - CLOCK_SKEW)
        .next_update(authority.not_valid_after_utc)
        .add_extension(x509.CRLNumber(number), critical=False)
        .add_extension(_OF_SEVERAL_AUTHORITIES, critical=True)
    )
    for each in _issued(folder):
        if named(_text(each).encode()) not in wanted:
            continue
        issuer = x509.CertificateIssuer([x509.DirectoryName(each.issuer)])
        builder = builder.add_revoked_certificate(
            x509.RevokedCertificateBuilder()
            .serial_number(each.serial_number)
            .revocation_date(datetime.now(UTC))
            .add_extension(issuer, critical=True)
            .build()
        )
    signed = builder.sign(signing, hashes.SHA256())
    text = signed.public_bytes(serialization.Encoding.PEM).decode("ascii")
    write_atomically(folder / REVOKED, text)


def _issued(folder: Path) -> list[x509.Certificate]:
    """Return the certificates that were made here and have not expired.

    Raises:
        CertificateError: nobody has kept them.
    """
    now = datetime.now(UTC)
    try:
        found = x509.load_pem_x509_certificates((folder / ISSUED).read_bytes())
    except FileNotFoundError as error:
        raise CertificateError(
            f"{folder / ISSUED}: is not there: which certificates a site has had is not known. "
            "Change the authority, `isthmus certs rotate`"
        ) from error
    except ValueError as error:
        raise CertificateError(f"{folder / ISSUED}: {text_of(error)}") from error
    return [each for each in found if each.not_valid_after_utc + _KEPT > now]


def of_former_authorities(folder: Path) -> list[str]:
    """Return the names of parties whose certificates are not of the present authority.

    Those that were revoked are left out: nobody is to get another for them.

    Raises:
        CertificateError: a file is no certificate.
    """
    present, revoked = authorities_in(folder)[0], revoked_in(folder)
    parties = (path for path in sorted(folder.glob("*.pem")) if path.stem != CA)
    return [
        path.stem
        for path in parties
        if not is_made_by(present, _read(path))
        and not (revoked is not None and revoked.has(path.read_bytes()))
    ]


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
    return _certify(folder, name, days)


def renew(folder: Path, name: str, days: float) -> Certificate:
    """Make a new certificate for the key that a party has; processes notice by themselves.

    Raises:
        CertificateError: the authority or the key cannot be used, or the key's certificate was
            revoked.
        UnsafeFileError: others may read a key.
        OSError: the folder cannot be written.
    """
    _require_valid(folder, name)
    return _certify(folder, name, days)


def _require_valid(folder: Path, name: str) -> None:
    """Refuse a key that somebody else may have.

    Raises:
        CertificateError: its certificate was revoked.
    """
    path, revoked = folder / f"{name}.pem", revoked_in(folder)
    if revoked is not None and path.exists() and revoked.has(path.read_bytes()):
        raise CertificateError(
            f"{path}: was revoked: `isthmus certs issue --force {name}` makes another, with a key "
            "of its own"
        )


def _certify(folder: Path, name: str, days: float) -> Certificate:
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
        CertificateError: the authority or a key cannot be used, or a certificate was revoked.
        UnsafeFileError: others may read a key.
        OSError: the folder cannot be written.
    """
    found = {}
    for name in (f"{site}.{role}" for role in (AGENT, GATEWAY)):
        _require_valid(folder, name)
        if not (folder / f"{name}.key").exists():
            issue(folder, name, days)
        elif is_due(folder, name, WARN_DAYS):
            renew(folder, name, days)
        found[f"{name}.pem"] = (folder / f"{name}.pem").read_bytes()
        found[f"{name}.key"] = read_secret(folder / f"{name}.key")
    return found


def is_due(folder: Path, name: str, within_days: float) -> bool:
    """Whether a party's certificate ends soon, or is of a former authority, and was not revoked.

    Raises:
        CertificateError: a file is no certificate.
    """
    path, revoked = folder / f"{name}.pem", revoked_in(folder)
    ends_soon = _described(name, _read(path)).days_left < within_days
    if revoked is not None and revoked.has(path.read_bytes()):
        return False
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
    made = builder.sign(signing, hashes.SHA256())
    kept = _issued(folder) if (folder / ISSUED).exists() else []
    write_atomically(folder / ISSUED, "".join(map(_text, [*kept, made])))
    return made


def certificates_in(folder: Path) -> list[Certificate]:
    """Return all of a folder, the one that ends first first.

    Raises:
        CertificateError: there is none, or a file is none.
    """
    paths = [*folder.glob("*.pem")]
    if not paths:
        raise CertificateError(f"{folder}: has no certificates; `isthmus certs init` makes them")
    revoked = revoked_in(folder)
    found = [
        replace(
            _described(path.stem if place == 0 or path.stem != CA else FORMER, each),
            is_revoked=revoked is not None and revoked.has(_text(each).encode()),
        )
        for path in paths
        for place, each in enumerate(_read_all(path))
        if place == 0 or path.stem == CA
    ]
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


def _site_of(certificate: x509.Certificate) -> str:
    identity = identity_of(certificate)
    return identity.site if identity else ""


def _name_of(certificate: x509.Certificate) -> str:
    identity = identity_of(certificate)
    return identity.file_name if identity else ""


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
