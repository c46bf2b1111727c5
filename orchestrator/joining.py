"""A site's certificates, fetched with a join token before its agent starts."""

from __future__ import annotations

import logging
from pathlib import Path

from isthmus.orchestrator.run_folder.run_files import write_atomically
from isthmus.protos.errors import StateConflictError
from isthmus.protos.identities import AGENT, GATEWAY
from isthmus.protos.join_tokens import BadTokenError, JoinToken
from isthmus.protos.mutual_tls import CertificateError, TlsSecurity
from isthmus.protos.private_files import make_secret
from isthmus.protos.security import tls_files

log = logging.getLogger(__name__)


def names_of(site: str) -> tuple[str, str]:
    """Return who has certificates at a site."""
    return f"{site}.{AGENT}", f"{site}.{GATEWAY}"


def join(token_path: Path, site: str, coordinator: str) -> bool:
    """Put a site's certificates where its processes look for them; False if they are there already.

    Raises:
        CertificateError: the topology says nothing of TLS.
        BadTokenError: the file has no token of this site.
        IsthmusError: the coordinator refused it.
        OSError: a file cannot be read or written.
    """
    files = tls_files()
    if files is None:
        raise CertificateError(
            "--join-token: the topology says nothing of `security: {mode: mtls}`"
        )
    if _has_certificates(site):
        return False
    token = JoinToken.of_text(token_path.read_text(encoding="ascii", errors="replace"))
    if token.identity.site != site:
        raise BadTokenError(f"{token_path}: is for site {token.identity.site}")
    ca = Path(files.ca)
    if ca.exists() and ca.read_bytes() != token.ca:
        raise StateConflictError(f"{ca}: another authority's; remove it to join with this token")
    content = token.exchange(coordinator)
    wanted = {f"{name}.{end}" for name in names_of(site) for end in ("pem", "key")}
    if content.keys() != wanted:
        raise BadTokenError("the coordinator has other files for this token than the site needs")
    ca.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(ca, token.ca.decode("ascii"))
    for name in names_of(site):
        own = files.of(name)
        Path(own.key).unlink(missing_ok=True)
        make_secret(Path(own.key), content[f"{name}.key"])
        Path(own.cert).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(Path(own.cert), content[f"{name}.pem"].decode("ascii"))
    return True


def _has_certificates(site: str) -> bool:
    files = tls_files()
    assert files is not None
    try:
        for name in names_of(site):
            TlsSecurity(files, name).read()
    except CertificateError:
        return False
    return True
