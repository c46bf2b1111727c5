"""`isthmus coordinator` and `isthmus agent`: each becomes the process that it starts.

It keeps its pid and its streams, with nothing in between.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from isthmus.orchestrator.cli.options import (
    ADDRESS,
    BIND,
    FILE,
    FOLDER,
    PATH,
    set_option,
    with_output,
)
from isthmus.orchestrator.cli.output import Output
from isthmus.orchestrator.coordinator.journal import Journal, JournalReader
from isthmus.orchestrator.coordinator.local_agents import AGENT, agent_arguments
from isthmus.orchestrator.documents import load_topology_file, protect
from isthmus.orchestrator.joining import join
from isthmus.protos.errors import NotFoundError
from isthmus.protos.own_processes import own_command
from isthmus.protos.proxies import PROXY
from isthmus.protos.security import require_protected
from isthmus.topology.spec.suggest import did_you_mean, one_of


@click.command("coordinator")
@click.option("--topology", type=PATH, help="The topology.  [required, but for --abandon]")
@click.option(
    "--state",
    required=True,
    type=FOLDER,
    help="Folder of the journal and of the runs; one coordinator at a time uses it.",
)
@click.option(
    "--bind",
    type=BIND,
    help="Listen here; port 0 lets the system choose. [the topology's coordinator.bind]",
)
@click.option(
    "--abandon",
    metavar="RUN",
    help="Run no coordinator: give an unfinished run up, which no coordinator can lead any more. Its "
    "sites stop when the next coordinator tells them.",
)
@set_option
@with_output
def coordinator(
    output: Output,
    topology: Path | None,
    state: Path,
    bind: str | None,
    abandon: str | None,
    overrides: tuple[str, ...],
) -> int:
    """Run a coordinator until it is stopped. STATE/coordinator.json says where it listens."""
    if abandon is not None:
        return _abandon(output, state, abandon)
    if topology is None:
        raise click.UsageError("Missing option '--topology'.")
    described = load_topology_file(topology, overrides)
    protect(described, topology)
    require_protected(bind.rpartition(":")[0] if bind else described.coordinator.bind.host)
    return _become(
        output,
        "isthmus.orchestrator.coordinator",
        [
            *("--topology", str(topology), "--state", str(state)),
            *(("--bind", bind) if bind else ()),
            *(word for override in overrides for word in ("--set", override)),
        ],
    )


@click.command("agent")
@click.option("--site", required=True, help="Which of the topology's sites this is.")
@click.option("--coordinator", required=True, type=ADDRESS, help="Dial this coordinator.")
@click.option("--topology", required=True, type=PATH, help="The topology.")
@click.option(
    "--state", required=True, type=FOLDER, help="Folder for the logs of this site's processes."
)
@click.option(
    "--join-token",
    type=FILE,
    help="File of a join token: fetches this site's certificates first, where there are none.",
)
@click.option("--bind", metavar="HOST", help="Gateways listen here. [the site's wan.bind]")
@click.option(
    "--node",
    "nodes",
    type=ADDRESS,
    multiple=True,
    help="A machine of the site that runs `python -m isthmus.sites.node.serve`, which the agent dials. "
    "Once for each, the agent's own first.",
)
@set_option
@with_output
def agent(
    output: Output,
    site: str,
    coordinator: str,
    topology: Path,
    state: Path,
    join_token: Path | None,
    bind: str | None,
    nodes: tuple[str, ...],
    overrides: tuple[str, ...],
) -> int:
    """Run the agent of SITE until it is stopped; it dials out to the coordinator."""
    described = load_topology_file(topology, overrides)
    names = [each.name for each in described.sites]
    if site not in names:
        raise click.UsageError(
            f"--site: {topology} has no site {site!r}{did_you_mean(site, names)}; "
            f"want {one_of(names)}"
        )
    protect(described, topology)
    require_protected(coordinator.rpartition(":")[0])
    if join_token is not None:
        if proxy := described.site(site).proxy:
            os.environ.setdefault(PROXY, proxy)
        joined = join(join_token, site, coordinator)
        output.note("joined: the certificates are here" if joined else "certificates were here")
    if address := bind or described.site(site).address:  # else a network interface's
        require_protected(address)
    return _become(
        output,
        AGENT,
        [
            *agent_arguments(
                described, site, coordinator, state, described.site(site).launcher.kind
            ),
            *(("--bind", bind) if bind else ()),
            *(word for node in nodes for word in ("--node", node)),
        ],
    )


def _abandon(output: Output, state: Path, run_id: str) -> int:
    """Write down that an unfinished run is lost; one that has ended stays as it is."""
    JournalReader(state).close()  # where there is no journal, none is made
    with contextlib.closing(Journal(state)) as journal:
        if run_id not in journal.run_ids():
            raise NotFoundError(f"{journal.path}: there is no run {run_id!r}")
        if run_id in journal.unfinished():
            journal.end_abandoned(run_id, time.time())
        ended = journal.view(run_id)
    data = {"run_id": run_id, "state": ended.state, "reason_code": ended.reason_code}
    return output.result(data, f"run {run_id} {ended.state}: {ended.reason or 'it has ended'}")


def _become(output: Output, module: str, arguments: Sequence[str]) -> int:
    """Replace this process by `python -m MODULE ARGUMENTS`.

    With --json, MODULE prints the envelope.
    """
    command = own_command(module, *arguments)
    if output.as_json:
        command.append("--json")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, command)  # noqa: S606 - no shell is wanted
