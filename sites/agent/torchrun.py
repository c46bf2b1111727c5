"""One node's torchrun, from the agent's side."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from protos.failure import Failure
from sites.agent.processes import start_leashed
from sites.agent.site_failures import describe_end, rank_failure
from sites.launcher.rank_failures import read_failures

TORCHRUN_LOG = "torchrun.log"
"""In a node's folder: what the launcher itself writes."""
_LOOK_S = 0.05
"""Between two looks at failures.json."""

log = logging.getLogger(__name__)


@contextmanager
def reserved_port(host: str) -> Iterator[int]:
    """Give a free TCP port that nobody else is given until the block ends.

    The socket is bound and never listens, so that a server with SO_REUSEADDR, as torch's store is,
    may take the port, while the system gives it to no one who asks for any.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        yield holder.getsockname()[1]


class Torchrun:
    """A node's launcher and, below it, the node's ranks."""

    def __init__(
        self, site: str, node: int, process: asyncio.subprocess.Process, folder: Path
    ) -> None:
        self.process = process
        self._site = site
        self._node = node
        self._folder = folder
        self._told: set[int] = set()

    @classmethod
    async def start(
        cls,
        *,
        site: str,
        node: int,
        nodes: int,
        ranks: int,
        endpoint: str,
        name: str,
        folder: Path,
        start_within_s: float,
        grace_s: float,
        command: Sequence[str],
        env: Mapping[str, str],
    ) -> Torchrun:
        """Start the ranks of one node.

        Args:
            site: this site.
            node: which node, from 0.
            nodes: of the site.
            ranks: of each node.
            endpoint: host:port of the rendezvous, on node 0.
            name: of the rendezvous.
            folder: the node's own.
            start_within_s: for the rendezvous of all nodes.
            grace_s: from SIGTERM to SIGKILL.
            command: script and arguments, or -m, module and arguments.
            env: what ranks find in their environment beside the agent's own.
        """
        (folder / "failures.json").unlink(missing_ok=True)
        arguments = [
            *("--nodes", str(nodes), "--node", str(node), "--ranks", str(ranks)),
            *("--endpoint", endpoint, "--name", name, "--folder", str(folder)),
            *("--start-within", str(start_within_s), "--grace", str(grace_s)),
            *("--", *command),
        ]
        # All nodes of a local launcher are this machine; Gloo would pick the interface by hostname.
        defaults = {"GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
        with (folder / TORCHRUN_LOG).open("ab") as log_file:
            process = await start_leashed(
                "sites.launcher.node",
                arguments,
                env={**defaults, **os.environ, **env},
                log=log_file,
                talks=False,
            )
        return cls(site, node, process, folder)

    async def watch(self, on_failed: Callable[[Failure], None]) -> None:
        """Tell of each rank that fails, as soon as it is known, until the launcher has ended."""
        ended = asyncio.ensure_future(self.process.wait())
        try:
            while not ended.done():
                await asyncio.wait([ended], timeout=_LOOK_S)
                self._tell_new(on_failed)
        finally:
            ended.cancel()
        exit_code = ended.result()
        if exit_code != 0 and not self._told:
            on_failed(self._launcher_ended(exit_code))

    def _tell_new(self, on_failed: Callable[[Failure], None]) -> None:
        for failure in read_failures(self._folder / "failures.json"):
            if failure.rank not in self._told:
                self._told.add(failure.rank)
                on_failed(rank_failure(failure, self._site, self._node))

    def _launcher_ended(self, exit_code: int) -> Failure:
        """Return the failure of torchrun itself.

        Killed, it counts as the training process that it stands for: its ranks die with it.
        """
        end = describe_end(exit_code)
        return Failure(
            code="RANK_KILLED" if exit_code < 0 else "LAUNCH_FAILED",
            message=f"torchrun of node {self._node} of site {self._site} {end}",
            at_s=time.monotonic(),
            site=self._site,
            node=self._node,
            exit_code=exit_code,
            log_path=str(self._folder / TORCHRUN_LOG),
        )


def rank_files(folder: Path, name: str, first_rank: int) -> Iterator[tuple[str, Path]]:
    """Return the log files of a node's ranks that are there by now, with their sources' names."""
    for path in sorted(folder.glob(f"ranks/{name}_*/attempt_0/*/std*.log")):
        yield f"rank{first_rank + int(path.parent.name)}", path
