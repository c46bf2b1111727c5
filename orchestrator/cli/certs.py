"""`isthmus certs`: certificates for mutual TLS, for who has no authority of their own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import click

from isthmus.orchestrator.certificates import (
    CA,
    FORMER,
    REVOKED,
    Certificate,
    CertificateExistsError,
    certificates_in,
    change_authority,
    forget_former_authorities,
    is_due,
    issue,
    make_authority,
    make_token,
    names_for,
    renew,
    revoke,
    site_files,
)
from isthmus.orchestrator.cli.options import (
    ADDRESS,
    FILE,
    FOLDER,
    json_option,
    topology_argument,
    with_output,
)
from isthmus.orchestrator.cli.output import Output
from isthmus.orchestrator.client.coordinator_client import Client
from isthmus.orchestrator.documents import load_topology_file
from isthmus.protos.control.v1 import control_pb2
from isthmus.protos.identities import AGENT, GATEWAY, WARN_DAYS
from isthmus.protos.mutual_tls import NAME, TlsFiles
from isthmus.protos.private_files import make_secret
from isthmus.protos.security import use_tls

DAYS = click.FloatRange(min=0, max=3650, min_open=True)

folder_option = click.option(
    "--folder", type=FOLDER, default="certs", help="Where certificates and keys are."
)
days_option = click.option(
    "--days", type=DAYS, default=90.0, help="How long certificates are valid."
)


@click.group("certs")
@json_option
def command() -> None:
    """Make, renew and show the certificates of a deployment with `security: {mode: mtls}`."""


@command.command("init")
@topology_argument
@folder_option
@click.option(
    "--domain", default="isthmus.internal", help="Domain of the identities in certificates."
)
@days_option
@with_output
def init_command(
    output: Output, topology_path: Path, folder: Path, domain: str, days: float
) -> int:
    """Make an authority, and certificates for everybody in TOPOLOGY."""
    sites = [site.name for site in load_topology_file(topology_path).sites]
    made = [make_authority(folder, domain)]
    made += [issue(folder, name, days) for name in names_for(sites)]
    output.note(f"next: take each party's own two files and {CA}.pem there; {CA}.key stays here")
    return _result(output, made)


@command.command("issue")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@folder_option
@days_option
@click.option("--force", is_flag=True, help="Replace keys and certificates that are there.")
@with_output
def issue_command(
    output: Output, names: tuple[str, ...], folder: Path, days: float, force: bool
) -> int:
    """Make keys and certificates: for coordinator, operator, SITE.agent or SITE.gateway."""
    return _result(output, [issue(folder, each, days, replace=force) for each in names])


@command.command("renew")
@click.argument("names", nargs=-1, metavar="[NAME...]")
@folder_option
@days_option
@click.option(
    "--within-days",
    type=DAYS,
    default=float(WARN_DAYS),
    help="Without a NAME: renew those that end within so many days, or are of a former authority.",
)
@with_output
def renew_command(
    output: Output, names: tuple[str, ...], folder: Path, days: float, within_days: float
) -> int:
    """Make new certificates for the keys that are there; running processes take them over."""
    due = names or [
        each.name
        for each in certificates_in(folder)
        if each.name not in {CA, FORMER} and is_due(folder, each.name, within_days)
    ]
    return _result(output, [renew(folder, each, days) for each in due])


@command.command("rotate")
@folder_option
@click.option("--finish", is_flag=True, help="Trust the new authority alone from now on.")
@with_output
def rotate_command(output: Output, folder: Path, finish: bool) -> int:
    """Change the authority while runs go on: make a new one, and trust both until --finish."""
    if finish:
        made = [forget_former_authorities(folder)]
        output.note(f"next: take {CA}.pem to all parties; what a former authority made ends there")
        return _result(output, made)
    made = [change_authority(folder)]
    output.note(
        f"next: take {CA}.pem to all parties; then isthmus certs renew, and take each its own .pem; "
        "then isthmus certs rotate --finish"
    )
    return _result(output, made)


@command.command("revoke")
@click.argument("site")
@folder_option
@with_output
def revoke_command(output: Output, site: str, folder: Path) -> int:
    """Revoke every certificate that SITE has had up to now.

    A running coordinator takes the list over where it lies beside its ca.pem: it drops the site
    from its run, and all gateways break the site's connections. What is issued for SITE afterwards
    counts.
    """
    revoked = revoke(folder, site)
    output.note(
        f"next: take {REVOKED} to the coordinator's machine, beside its {CA}.pem. To have the site "
        f"back: isthmus certs issue --force {site}.{AGENT} {site}.{GATEWAY}, take these there, "
        f"start its agent, then isthmus sites add {site}"
    )
    return _result(output, revoked)


@command.command("token")
@click.argument("site")
@click.option(
    "--coordinator",
    required=True,
    type=ADDRESS,
    help="The coordinator that keeps the certificates until the token is used.",
)
@folder_option
@days_option
@click.option(
    "--hours",
    type=click.FloatRange(min=0, max=720, min_open=True),
    default=24.0,
    help="How long the token is valid.",
)
@click.option("--out", type=FILE, help="Write the token here. [SITE.token]")
@with_output
def token_command(
    output: Output,
    site: str,
    coordinator: str,
    folder: Path,
    days: float,
    hours: float,
    out: Path | None,
) -> int:
    """Make a token with which `isthmus agent --join-token` gets SITE's certificates, once."""
    use_tls(
        TlsFiles(ca=f"{folder}/{CA}.pem", cert=f"{folder}/{NAME}.pem", key=f"{folder}/{NAME}.key")
    )
    path = out or Path(f"{site}.token")
    if path.exists():
        raise CertificateExistsError(f"{path}: is there already")
    files = site_files(folder, site, days)
    token = make_token(folder, site, hours / 24)
    ends_wall_s = time.time() + hours * 3600
    offer = control_pb2.OfferJoinRequest(
        site=site, holder=token.holder, ends_wall_s=ends_wall_s, sealed=token.seal(files)
    )
    with Client(coordinator) as client:
        client.offer_join(offer)
    make_secret(path, token.text().encode("ascii") + b"\n")
    output.note(
        f"next: take {path} to site {site}, then: isthmus agent --site {site} --coordinator "
        f"{coordinator} --join-token {path} --topology … --state …"
    )
    ends = datetime.fromtimestamp(ends_wall_s, UTC)
    data = {"site": site, "token": token.holder, "file": str(path), "ends": ends.isoformat()}
    return output.result(data, f"{path}: counts once, until {ends:%Y-%m-%d %H:%M} UTC")


@command.command("show")
@folder_option
@with_output
def show_command(output: Output, folder: Path) -> int:
    """Show certificates, the one that ends first first."""
    return _result(output, certificates_in(folder))


def _result(output: Output, certificates: Sequence[Certificate]) -> int:
    entries = [
        {**asdict(each), "ends": each.ends.isoformat(), "days_left": round(each.days_left, 1)}
        for each in certificates
    ]
    width = max((len(each.name) for each in certificates), default=0)
    lines = [
        f"{each.name:{width}}  {_left(each)}  {each.identity}".rstrip() for each in certificates
    ]
    return output.result({"certificates": entries}, "\n".join(lines) or "none is due")


def _left(certificate: Certificate) -> str:
    """Return for how long a certificate is valid, in a column."""
    return (
        f"{'revoked':16}" if certificate.is_revoked else f"{certificate.days_left:6.1f} days left"
    )
