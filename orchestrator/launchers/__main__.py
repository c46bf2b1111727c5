"""`python -m isthmus.orchestrator.launchers`: the keeper's process, which `isthmus up` starts."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isthmus.orchestrator.documents import loaded_topology, protect, read_file
from isthmus.orchestrator.interruption import first_signal
from isthmus.orchestrator.launchers.commands import (
    agent_spec,
    coordinator_launcher,
    coordinator_spec,
    greet_s,
    launcher_of,
    save_s,
)
from isthmus.orchestrator.launchers.keeper import TETHER_S, Keeper, Kept
from isthmus.orchestrator.launchers.standing import (
    AGAIN,
    COORDINATOR,
    STATE,
    Standing,
    folder_of,
    part_of_site,
)
from isthmus.orchestrator.run_folder.state_lock import LOCK, lock
from isthmus.protos.errors import IsthmusError
from isthmus.protos.failure import text_of
from isthmus.protos.private_files import keep_private, private_folder
from isthmus.protos.save_time import LEAVE_S
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.hashing import topology_hash
from isthmus.topology.spec.world import Launcher, Topology

LISTENING = re.compile(r"listening on (\S+), generation ")
JOINED = re.compile(r"agent \S+: joined, generation ")

log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Keep what the topology describes until a signal; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m isthmus.orchestrator.launchers")
    parser.add_argument("--topology", required=True, type=Path)
    parser.add_argument("--home", required=True, type=Path)
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s keeper: %(message)s")
    logging.getLogger("asyncssh").setLevel(logging.WARNING)
    keep_private()
    try:
        document = read_file(options.topology, options.set)
        topology = loaded_topology(document)
        protect(topology, options.topology)
        folder = folder_of(options.home, topology)
        private_folder(folder)
        lock(folder / LOCK)  # the kernel releases it with the process: a free lock means no keeper
        (folder / STATE).unlink(missing_ok=True)  # left by a previous keeper
        asyncio.run(_keep(topology, document.written, options, folder))
    except (ConfigError, IsthmusError, OSError) as error:
        log.error("%s", text_of(error))  # noqa: TRY400 - the message suffices
        return 1
    return 0


async def _keep(topology: Topology, text: str, options: argparse.Namespace, folder: Path) -> None:
    """Start the coordinator, then the agents; end all of them after a signal."""
    standing = Standing(pid=os.getpid(), topology_hash=topology_hash(topology))
    keeper = Keeper(standing, folder)
    logs = folder / "logs"
    private_folder(logs)
    documents = options.topology.absolute().parent
    bind, dialled = str(topology.coordinator.bind), topology.coordinator.address
    listening = asyncio.Event()
    ends_s = [save_s(site.launcher) + LEAVE_S + TETHER_S for site in topology.sites]

    def listens(found: re.Match[str]) -> None:
        nonlocal bind
        bind = found[1]  # the same port when it is started again
        standing.address = bind if dialled is None else str(dialled)
        listening.set()

    def kept(name: str, how: Launcher, nodes: int, **settings: object) -> Kept:
        return Kept(
            name=name,
            launcher=launcher_of(how, name.replace(" ", "-"), documents, nodes),
            greet_s=greet_s(how),
            log_path=logs / f"{name.removeprefix('site ')}.log",
            **settings,  # type: ignore[arg-type]
        )

    with first_signal() as signalled:
        coordinator = kept(
            COORDINATOR,
            coordinator_launcher(topology),
            1,
            make_spec=lambda: coordinator_spec(topology, text, options.set, bind, folder),
            ready=LISTENING,
            on_ready=listens,
        )
        asyncio.get_running_loop().add_signal_handler(AGAIN, keeper.wake)
        keeper.keep(coordinator)
        waits: list[asyncio.Future[Any]] = [
            signalled,
            asyncio.create_task(listening.wait(), name="listening"),
        ]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        waits[-1].cancel()
        if listening.is_set():
            for site, end_s in zip(topology.sites, ends_s, strict=True):
                keeper.keep(
                    kept(
                        part_of_site(site.name),
                        site.launcher,
                        site.nodes,
                        end_s=end_s,
                        make_spec=lambda site=site: agent_spec(
                            topology, site, standing.address, folder
                        ),
                        ready=JOINED,
                    )
                )
        await signalled
        log.info("asked to end by signal %d", signalled.result())
        await keeper.stop()


if __name__ == "__main__":
    sys.exit(main())
