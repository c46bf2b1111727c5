"""Certificates that are set up badly: each is named, with its cure, and nothing else is."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from isthmus.orchestrator import certificates
from isthmus.orchestrator.certificates import issue, make_authority
from isthmus.orchestrator.doctor.certificate_checks import certificate_findings
from isthmus.protos.mutual_tls import TlsFiles
from tests.fakes.certified import DOMAIN

NAMES = ("a.agent", "a.gateway")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_authority(tmp_path, DOMAIN)
    for name in NAMES:
        issue(tmp_path, name, 60.0)
    return tmp_path


def kinds(folder: Path) -> list[tuple[str, str | None, str]]:
    """Return kind, site and cure of each finding."""
    files = TlsFiles(
        ca=f"{folder}/ca.pem", cert=f"{folder}/{{name}}.pem", key=f"{folder}/{{name}}.key"
    )
    return [(each.kind, each.site, each.cure) for each in certificate_findings(NAMES, files)]


def test_good_ones_are_not_told_of(folder: Path) -> None:
    assert kinds(folder) == []


def test_before_any_was_made_one_thing_is_said(tmp_path: Path) -> None:
    ((kind, site, cure),) = kinds(tmp_path)
    assert (kind, site) == ("no-certificates", None)
    assert cure.startswith("isthmus certs init TOPOLOGY")


def test_one_that_is_missing(folder: Path) -> None:
    (folder / "a.gateway.pem").unlink()
    cure = "isthmus certs issue a.gateway, where the authority is"
    assert kinds(folder) == [("certificate-missing", "a", cure)]


def test_one_that_has_expired(folder: Path) -> None:
    issue(folder, "a.agent", -0.001, replace=True)
    cure = "isthmus certs renew a.agent, where the authority is"
    assert kinds(folder) == [("certificate-unusable", "a", cure)]


def test_one_that_ends_soon(folder: Path) -> None:
    issue(folder, "a.agent", 13.0, replace=True)
    cure = "isthmus certs renew a.agent, where the authority is"
    assert kinds(folder) == [("certificate-ends", "a", cure)]


def test_one_of_another_authority(folder: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    make_authority(foreign, DOMAIN)
    (folder / "ca.pem").write_bytes((foreign / "ca.pem").read_bytes())
    assert [kind for kind, _, _ in kinds(folder)] == ["certificate-foreign"] * 2


def test_a_key_that_others_may_read(folder: Path) -> None:
    (folder / "a.agent.key").chmod(0o644)
    assert kinds(folder) == [("key-unsafe", "a", f"chmod 600 {folder}/a.agent.key")]


def test_one_that_was_made_by_a_clock_far_ahead(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ahead(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return datetime.now(UTC) + timedelta(hours=1)

    with monkeypatch.context() as patch:
        patch.setattr(certificates, "datetime", Ahead)
        issue(folder, "a.agent", 60.0, replace=True)
    ((kind, site, cure),) = kinds(folder)
    assert (kind, site) == ("certificate-not-yet", "a")
    assert "timedatectl" in cure
