"""A job group of SkyPilot, with a task for each site. Pure.

SkyPilot starts the tasks of a group side by side, each wherever it finds the accelerators, and with
`inter_connection: false` also in several clouds and clusters: it makes no network between them, for
the agents dial the coordinator, and gateways each other. A task of several machines runs the agent
on the first; the others wait for it to dial them (sites/node/serve.py).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from isthmus.orchestrator.rendering.site_agent import (
    CERTIFICATES,
    NODE_PORT,
    SAVE_S,
    TOPOLOGY,
    serve_command,
)
from isthmus.protos.save_time import SAVE_WITHIN
from isthmus.protos.security import TLS_VARIABLES
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.world import Site, Topology

FOLDER = "isthmus"
"""In the home folder of each machine: the topology, certificates, and the agent's files."""
INSTALL = "pip install 'isthmus[train]'"
_NO_ACCELERATOR = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a job group takes beside the topology."""

    coordinator: str
    """host:port, as sites reach it."""
    topology: str
    """Path of the topology's file, on the machine where `sky` is called."""
    install: str = INSTALL
    """The command that installs isthmus on a machine."""
    accelerators: Mapping[str, str] = field(default_factory=dict)
    """What SkyPilot calls a site's accelerator, by site; else what its name suggests."""
    infra: Mapping[str, str] = field(default_factory=dict)
    """Where a site is to be, by site, as `aws/us-east-1`; else wherever there is room."""
    overrides: tuple[str, ...] = ()
    """Changes of the topology, as --set has them."""


def job_group(
    topology: Topology, certificates: Mapping[str, Mapping[str, str]], wishes: Wishes
) -> list[dict[str, Any]]:
    """Return the documents of a job group: its header, and a task for each site.

    `certificates` has, by site, the files of `files_of` and where they are.

    Raises:
        ConfigError: SkyPilot cannot start it so.
    """
    if topology.security.tls_files is None:
        raise ConfigError("security: sites speak over the internet, so it takes `mode: mtls`")
    if topology.emulate:
        raise ConfigError("emulate: a WAN between clouds is a real one: `emulate: false`")
    header = {
        "name": _named(topology.name),
        "execution": "parallel",
        "inter_connection": False,
    }
    return [header, *(_task(site, certificates[site.name], wishes) for site in topology.sites)]


def _task(site: Site, certificates: Mapping[str, str], wishes: Wishes) -> dict[str, Any]:
    resources: dict[str, Any] = {}
    if name := _accelerator(site, wishes):
        resources["accelerators"] = f"{name}:{site.accelerators_per_node}"
    if infra := wishes.infra.get(site.name):
        resources["infra"] = infra
    if site.inbound:
        ports = site.ports
        if ports is None:
            raise ConfigError(
                f"sites.{site.name}.wan.ports: want a range, as 29500-29503: SkyPilot opens them"
            )
        resources["ports"] = f"{ports.first}-{ports.last}"
    mounts = {f"~/{FOLDER}/{TOPOLOGY}": wishes.topology}
    mounts |= {f"~/{FOLDER}/given/{name}": path for name, path in certificates.items()}
    return {
        "name": _named(site.name),
        "num_nodes": site.nodes,
        **({"resources": resources} if resources else {}),
        "file_mounts": mounts,
        "setup": f"{wishes.install}\n",
        "run": _script(site, wishes),
    }


def _script(site: Site, wishes: Wishes) -> str:
    """Return what a task's machines run; SkyPilot numbers them, and tells their addresses."""
    agent = [
        *("isthmus", "agent", "--site", site.name, "--coordinator", wishes.coordinator),
        *("--topology", TOPOLOGY, "--state", "state"),
        *(word for override in wishes.overrides for word in ("--set", override)),
    ]
    if site.bind:
        agent += ["--bind", site.bind]
    lines = [
        f"cd ~/{FOLDER}",
        "# A key has to be its reader's alone.",
        "(umask 077 && mkdir -p certs && cp given/* certs/)",
        *(
            f'export {variable}="$PWD"/certs/{CERTIFICATES[key]}'
            for key, variable in TLS_VARIABLES.items()
        ),
        f"export {SAVE_WITHIN}={SAVE_S:g}",
    ]
    if site.nodes == 1:
        return "\n".join([*lines, f"exec {shlex.join(agent)}"]) + "\n"
    lines += [
        'if [ "$SKYPILOT_NODE_RANK" != 0 ]; then',
        f"    exec {shlex.join(serve_command(site.name))}",
        "fi",
        "set --",
        "for address in $SKYPILOT_NODE_IPS; do",
        f'    set -- "$@" --node "$address:{NODE_PORT}"',
        "done",
        f'exec {shlex.join(agent)} "$@"',
    ]
    return "\n".join(lines) + "\n"


def _accelerator(site: Site, wishes: Wishes) -> str:
    """Return what SkyPilot calls a site's accelerator; empty: there is none."""
    name = site.accelerator.name
    if told := wishes.accelerators.get(site.name):
        return told
    return "" if name.startswith(_NO_ACCELERATOR) else name.partition("-")[0].upper()


def _named(name: str) -> str:
    """Return a name of letters, digits, `-` and `_`, as SkyPilot wants it."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-") or "isthmus"
