"""Certificates of a small deployment, and connections of those who hold some."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from isthmus.orchestrator.certificates import issue, make_authority, names_for
from isthmus.protos.mutual_tls import TlsFiles
from isthmus.protos.security import TLS_VARIABLES

DOMAIN = "test.internal"


def certify(folder: Path, *sites: str) -> TlsFiles:
    """Make an authority, and certificates for everybody."""
    make_authority(folder, DOMAIN)
    for name in names_for(list(sites)):
        issue(folder, name, 30.0)
    return files_in(folder)


def files_in(folder: Path) -> TlsFiles:
    """Return where everybody's files are in a folder."""
    return TlsFiles(
        ca=str(folder / "ca.pem"), cert=f"{folder}/{{name}}.pem", key=f"{folder}/{{name}}.key"
    )


def speak_tls(monkeypatch: pytest.MonkeyPatch, files: TlsFiles) -> None:
    """Have this process speak TLS until the test has ended."""
    for key, variable in TLS_VARIABLES.items():
        monkeypatch.setenv(variable, getattr(files, key))


def tls_options(server: str) -> list[tuple[str, str | int]]:
    """Return the arguments of a channel to a server of that DNS name."""
    return [("grpc.ssl_target_name_override", server), ("grpc.use_local_subchannel_pool", 1)]


def held_by(folder: Path, name: str, ca: Path | None = None) -> grpc.ChannelCredentials:
    """Return what somebody shows who holds these files, whatever they are worth."""
    return grpc.ssl_channel_credentials(
        (ca or folder / "ca.pem").read_bytes(),
        (folder / f"{name}.key").read_bytes(),
        (folder / f"{name}.pem").read_bytes(),
    )
