"""Secrets that are copied to another machine, for processes started there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from isthmus.protos.mutual_tls import CertificateError
from isthmus.protos.private_files import read_secret
from isthmus.protos.security import (
    TLS_VARIABLES,
    TOKEN_FILE,
    control_security,
    tls_files,
    token_path,
)


def carried_secrets(names: Sequence[str], folder: str) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return the files that these parties need, and environment variables with their paths.

    Args:
        names: Names of the parties, as in `Identity.file_name`.
        folder: Folder of the files on the other machine.

    Raises:
        CertificateError: a certificate or key is missing here.
        UnsafeFileError: a secret can be read by others.
    """
    files = tls_files()
    if files is None:
        control_security()  # makes the secret if it does not exist yet
        return {"token": read_secret(token_path())}, {TOKEN_FILE: f"{folder}/token"}
    content: dict[str, bytes] = {}
    for name in names:
        own = files.of(name)
        try:
            content["ca.pem"] = Path(own.ca).read_bytes()
            content[f"{name}.pem"] = Path(own.cert).read_bytes()
            content[f"{name}.key"] = read_secret(Path(own.key))
        except OSError as error:
            raise CertificateError(f"{error.filename}: {error.strerror}") from error
    places = {"ca": "ca.pem", "cert": "{name}.pem", "key": "{name}.key"}
    return content, {variable: f"{folder}/{places[key]}" for key, variable in TLS_VARIABLES.items()}
