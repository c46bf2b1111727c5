"""What a site's machines need wherever its agent is started: files, and commands. Pure."""

from __future__ import annotations

from isthmus.protos.identities import AGENT, COORDINATOR, GATEWAY
from isthmus.protos.own_processes import own_command

TOPOLOGY = "topology.yaml"
SAVE_S = 30.0
"""For a site's last checkpoint."""
ANY = "0.0.0.0"  # noqa: S104 - with TLS
NODE_PORT = 7444
"""Where a machine waits for its site's agent; only the site's certificates are let in."""
CERTIFICATES = {"ca": "ca.pem", "cert": "{name}.pem", "key": "{name}.key"}
"""Names of certificates and keys in one folder, as ISTHMUS_CA and so on say them."""


def files_of(party: str) -> list[str]:
    """Return the names of the certificates and keys that a site, or the coordinator, needs."""
    roles = [COORDINATOR] if party == COORDINATOR else [f"{party}.{AGENT}", f"{party}.{GATEWAY}"]
    return ["ca.pem", *(f"{role}.{kind}" for role in roles for kind in ("pem", "key"))]


def serve_command(site: str) -> list[str]:
    """Return the command of a machine that waits for its site's agent to dial it."""
    serve = own_command("isthmus.sites.node.serve", "--site", site, python="python")
    return [*serve, "--bind", f"{ANY}:{NODE_PORT}"]
