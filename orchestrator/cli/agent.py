"""`isthmus agent`: becomes the process of one site's agent."""

from __future__ import annotations

from pathlib import Path

import click

from orchestrator.cli.become import become
from orchestrator.cli.options import Address, json_option, require_loopback, set_option
from orchestrator.cli.output import Output
from orchestrator.documents import load_topology_file
from topology.suggest import did_you_mean, one_of


@click.command("agent")
@click.option("--site", required=True, help="Which of the topology's sites this is.")
@click.option("--coordinator", required=True, type=Address(), help="Dial this coordinator.")
@click.option("--topology", required=True, type=click.Path(path_type=Path), help="The topology.")
@click.option(
    "--state",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the logs of this site's processes.",
)
@click.option("--bind", metavar="HOST", help="Gateways listen here. [the site's wan.address]")
@set_option
@json_option
@click.pass_obj
def command(
    output: Output,
    site: str,
    coordinator: str,
    topology: Path,
    state: Path,
    bind: str | None,
    overrides: tuple[str, ...],
) -> int:
    """Run the agent of SITE until it is stopped; it dials out to the coordinator."""
    names = [each.name for each in load_topology_file(topology, overrides).sites]
    if site not in names:
        raise click.UsageError(
            f"--site: {topology} has no site {site!r}{did_you_mean(site, names)}; "
            f"want {one_of(names)}"
        )
    if bind is not None:
        require_loopback(bind)
    return become(
        output,
        "sites.agent",
        [
            *("--site", site, "--coordinator", coordinator),
            *("--topology", str(topology), "--state", str(state)),
            *(("--bind", bind) if bind else ()),
            *(word for override in overrides for word in ("--set", override)),
        ],
    )
