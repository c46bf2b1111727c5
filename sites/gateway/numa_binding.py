"""Has a gateway run on the NUMA node of its card or of its network interface: `wan.numa`.

Threads that are started later, those of libraries too, inherit the cores. Memory needs nothing
more: Linux takes a page from the node of the thread that touches it first.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from isthmus.sites.facts import numa
from isthmus.sites.gateway.config import GatewayConfig
from isthmus.sites.interfaces import interface_of

_log = logging.getLogger(__name__)


def bind_to_node(
    config: GatewayConfig, environ: Mapping[str, str] = os.environ, root: Path = numa.ROOT
) -> None:
    """Keep the calling thread, and those that it will start, on cores of the configured node.

    Where the node is not known, or this process may use none of its cores, the log says so, and
    nothing is changed.
    """
    if not config.numa:
        return
    if config.numa == "card":
        device = f"card {config.card}"
        node = numa.node_of_card(config.card, environ, root)
    else:
        name = _interface(config, root)
        device = f"interface {name}" if name else "the network interface"
        node = numa.node_of_interface(name, root) if name else None
    cores = set() if node is None else numa.cores_of(node, root) & os.sched_getaffinity(0)
    if node is None:
        _log.warning("wan.numa: %s: on an unknown NUMA node, so nothing is bound", device)
    elif not cores:
        _log.warning(
            "wan.numa: this process may use no core of NUMA node %d, where %s is: nothing is bound",
            node,
            device,
        )
    else:
        os.sched_setaffinity(0, cores)
        _log.info("on NUMA node %d, where %s is: %d cores", node, device, len(cores))


def _interface(config: GatewayConfig, root: Path) -> str | None:
    """Return the interface that the gateway listens on; else that of the default route."""
    if config.interface:
        return config.interface
    try:
        found = interface_of(config.bind_host) if config.bind_host else None
    except OSError:
        found = None  # nothing will be able to listen there: told then
    return found or numa.default_interface(root)
