"""`isthmus certs`: certificates for mutual TLS, for who has no authority of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from orchestrator.certificates import (
    CA,
    Certificate,
    certificates_in,
    issue,
    make_authority,
    names_for,
    renew,
)
from orchestrator.cli.options import json_option
from orchestrator.cli.output import Output
from orchestrator.documents import load_topology_file
from protos.mutual_tls import WARN_DAYS

DAYS = click.FloatRange(min=0, max=3650, min_open=True)

folder_option = click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    default="certs",
    show_default=True,
    help="Where certificates and keys are.",
)
days_option = click.option(
    "--days", type=DAYS, default=90.0, show_default=True, help="How long certificates count."
)


@click.group("certs")
@json_option
def command() -> None:
    """Make, renew and show the certificates of a deployment with `security: {mode: mtls}`."""


@command.command("init")
@click.argument("topology", type=click.Path(path_type=Path))
@folder_option
@click.option("--domain", default="isthmus.internal", show_default=True, help="Of identities.")
@days_option
@json_option
@click.pass_obj
def init_command(output: Output, topology: Path, folder: Path, domain: str, days: float) -> int:
    """Make an authority, and certificates for everybody in TOPOLOGY."""
    sites = [site.name for site in load_topology_file(topology).sites]
    made = [make_authority(folder, domain)]
    made += [issue(folder, name, days) for name in names_for(sites)]
    output.note(f"next: take each party's own two files and {CA}.pem there; {CA}.key stays here")
    return _result(output, made)


@command.command("issue")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@folder_option
@days_option
@click.option("--force", is_flag=True, help="Replace keys and certificates that are there.")
@json_option
@click.pass_obj
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
    show_default=True,
    help="Without NAMEs: those that end so soon.",
)
@json_option
@click.pass_obj
def renew_command(
    output: Output, names: tuple[str, ...], folder: Path, days: float, within_days: float
) -> int:
    """Make new certificates for the keys that are there; running processes take them over."""
    due = names or [
        each.name
        for each in certificates_in(folder)
        if each.name != CA and each.days_left < within_days
    ]
    return _result(output, [renew(folder, each, days) for each in due])


@command.command("show")
@folder_option
@json_option
@click.pass_obj
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
        f"{each.name:{width}}  {each.days_left:6.1f} days left  {each.identity}".rstrip()
        for each in certificates
    ]
    return output.result({"certificates": entries}, "\n".join(lines) or "none is due")
