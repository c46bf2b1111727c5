"""`python -m isthmus.sites.agent`: the command line of a site's agent.

Operators start `isthmus agent`, which reads the topology and passes on the site's part of it.
Everything else comes with a run's spec.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import platform
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

# Before grpc is imported: the agent starts processes, and gRPC's fork handlers would run each time.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

from isthmus.protos.catalogue import CATALOGUE
from isthmus.protos.control.v1.control_pb2 import Hello
from isthmus.protos.envelope import failure, success
from isthmus.protos.errors import IsthmusError
from isthmus.protos.private_files import keep_private, private_folder
from isthmus.protos.proxies import PROXY
from isthmus.protos.save_time import save_within_s
from isthmus.protos.security import require_protected
from isthmus.protos.training_part import require_training_part
from isthmus.protos.usable_cores import usable_cores
from isthmus.protos.versions import CONTROL_PROTOCOL_MAX, CONTROL_PROTOCOL_MIN, build
from isthmus.sites.agent.agent import Agent, CoordinatorSettings, join_within_s
from isthmus.sites.agent.logs import OwnLines
from isthmus.sites.agent.site_processes import Place
from isthmus.sites.node.children import adopt_orphans
from isthmus.sites.node.sockets import socket_folder
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.timeouts import Timeouts
from isthmus.topology.spec.world import LAUNCHERS, Detection

COMMAND = "agent"

log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the agent; return its exit status."""
    options = _parser().parse_args(arguments)
    own_lines = _start_logging(options.site)
    keep_private()
    try:
        status = _run(options, own_lines)
    except ConfigError as error:
        return _failed(options, "INVALID_CONFIG", str(error))
    except IsthmusError as error:
        return _failed(options, error.code, str(error))
    except OSError as error:
        path = f"{error.filename}: " if error.filename else ""
        return _failed(options, "FILE_ERROR", f"{path}{error.strerror or error}")
    except Exception:
        log.exception("the agent ended because of a bug")
        return _failed(options, "INTERNAL", "the agent ended because of a bug")
    if options.json:
        print(success(COMMAND, {"site": options.site}, status))  # noqa: T201
    return status


def _run(options: argparse.Namespace, own_lines: OwnLines) -> int:
    """Check the operator's options, then serve."""
    if options.proxy:
        os.environ.setdefault(PROXY, options.proxy)
    require_protected(options.coordinator.rpartition(":")[0])
    if address := options.bind or options.address:  # else a network interface's
        require_protected(address)
    require_training_part()
    save_s = save_within_s(os.environ)
    # Longer timeouts come with a run's spec.
    within_s = options.detect_within
    detection = Detection(
        detect_within_s=within_s,
        start_within_s=options.start_within,
        ride_out_s=within_s,
        coordinator_within_s=within_s,
    )
    timeouts = Timeouts.derive(detection)
    private_folder(options.state)
    adopt_orphans()
    with socket_folder() as sockets:
        settings = CoordinatorSettings(
            coordinator=options.coordinator,
            hello=_hello(options.site, options.topology_hash),
            timeouts=timeouts,
            join_within_s=options.join_within or join_within_s(timeouts.lease_s),
        )
        place = Place(
            site=options.site,
            state=options.state,
            sockets=sockets,
            bind_host=options.bind,
            launcher=options.launcher,
            dialled=tuple(options.node),
            own_lines=own_lines,
        )
        return asyncio.run(Agent(settings, place, save_s).serve())


def _hello(site: str, topology_hash: str) -> Hello:
    return Hello(
        protocol_min=CONTROL_PROTOCOL_MIN,
        protocol_max=CONTROL_PROTOCOL_MAX,
        build=build(),
        topology_hash=topology_hash,
        site=site,
        incarnation=uuid.uuid4().hex,
        host=platform.node(),
        usable_cores=usable_cores(),
    )


def _failed(options: argparse.Namespace, code: str, message: str) -> int:
    """Print an error as text or JSON; return the exit status."""
    entry = CATALOGUE[code]
    if options.json:
        print(failure(COMMAND, code, message))  # noqa: T201
    print(f"error: {message}\nhint: {entry.hint}", file=sys.stderr)  # noqa: T201
    return int(entry.exit_code)


def _start_logging(site: str) -> OwnLines:
    """Log to stderr, and keep the lines for shipping."""
    own_lines = OwnLines()
    text = f"%(asctime)s agent {site}: %(message)s"
    logging.basicConfig(
        level=logging.INFO, format=text, handlers=[logging.StreamHandler(), own_lines]
    )
    return own_lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="isthmus agent", description="Start, watch and end one site's processes."
    )
    parser.add_argument("--site", required=True, help="which site of the topology this is")
    parser.add_argument("--coordinator", required=True, type=_host_port, metavar="HOST:PORT")
    parser.add_argument("--topology-hash", required=True, metavar="HEX", help="as it was read")
    parser.add_argument("--address", required=True, metavar="HOST", help="the site's, for gateways")
    parser.add_argument("--detect-within", required=True, type=float, metavar="S")
    parser.add_argument("--start-within", required=True, type=float, metavar="S")
    parser.add_argument("--state", required=True, type=Path, metavar="DIR", help="logs go here")
    parser.add_argument("--bind", metavar="HOST", help="gateways bind this, not the site's address")
    parser.add_argument("--proxy", metavar="URL", help=f"to the coordinator; ${PROXY} wins")
    parser.add_argument(
        "--launcher", choices=LAUNCHERS, default="local", help="starts the site's other nodes"
    )
    parser.add_argument(
        "--node",
        action="append",
        default=[],
        type=_host_port,
        metavar="HOST:PORT",
        help="a node that runs isthmus.sites.node.serve, for the agent to dial; one a node, its own first",
    )
    parser.add_argument("--join-within", type=float, metavar="S")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    return parser


def _host_port(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"want HOST:PORT, got {text!r}")
    return text


if __name__ == "__main__":
    sys.exit(main())
