"""The supervisor's side of a node's torchrun: starts it, and reports failures of ranks."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from isthmus.protos.errors import RemoteProtocolError
from isthmus.protos.failure import Failure, text_of
from isthmus.protos.own_processes import own_command
from isthmus.protos.private_files import users_umask
from isthmus.sites.interfaces import interface_of
from isthmus.sites.node.children import start_leashed
from isthmus.sites.node.failures import describe_end, rank_failure
from isthmus.sites.node.kernel_kills import KernelKills
from isthmus.sites.node.order import SiteOrder
from isthmus.sites.node.rank_failures import LAUNCHER_LINES, last_words
from isthmus.topology.spec.job_environment import LEFT_OVER

TORCHRUN_LOG = "torchrun.log"
"""File in a node's folder for the launcher's own output."""
PROLOGUE_STATUS = 97
"""Exit status of a node whose prologue failed."""
PROLOGUE_FAILED = "prologue."
"""Begins the line that names the failed one."""

log = logging.getLogger(__name__)


class Torchrun:
    """A node's launcher and, below it, the node's ranks."""

    def __init__(self, order: SiteOrder, node: int, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._site = order.site.name
        self._node = node
        self._folder = order.node_folder(node)
        self._has_told = False
        self._kernel_kills = KernelKills()

    @classmethod
    async def start(
        cls,
        order: SiteOrder,
        node: int,
        sockets: Sequence[Path],
        inside_host: str | None,
    ) -> Torchrun:
        """Start the launcher of one node, which loads torch and waits for `start_ranks`.

        Args:
            order: The run.
            node: Which node.
            sockets: Unix sockets of the node's gateways.
            inside_host: Host by which other nodes reach it; None: all are on one machine.
        """
        site, timeouts, folder = order.site, order.spec.timeouts, order.node_folder(node)
        arguments = [
            *("--nodes", str(site.nodes), "--node", str(node)),
            *("--ranks", str(site.accelerators_per_node)),
            *("--name", order.name, "--folder", str(folder)),
            *("--start-within", str(timeouts.start_s), "--grace", str(timeouts.stop_grace_s)),
            *("--working-folder", str(order.working_folder)),
            *("--", *order.command),
        ]
        defaults = {"PYTHONUNBUFFERED": "1"}
        # By default Gloo picks the interface of the machine's own name.
        if interface := "lo" if inside_host is None else interface_of(inside_host):
            defaults["GLOO_SOCKET_IFNAME"] = interface
        kept = {name: value for name, value in os.environ.items() if not LEFT_OVER.fullmatch(name)}
        with (folder / TORCHRUN_LOG).open("ab") as log_file:
            process = await start_leashed(
                after(site.prologue, own_command("isthmus.sites.node.launcher", *arguments)),
                env={**defaults, **kept, **order.environment(sockets)},
                log=log_file,
                talks=True,
                umask=users_umask(),
            )
        return cls(order, node, process)

    def start_ranks(self, endpoint: str) -> None:
        """Let the launcher start its ranks.

        Args:
            endpoint: host:port of the rendezvous, on node 0.
        """
        assert self.process.stdin is not None, "it talks"
        self.process.stdin.write(f"{endpoint}\n".encode())

    async def watch(self, on_failed: Callable[[Failure], None]) -> None:
        """Report each failed rank at once, until the launcher has ended."""
        assert self.process.stdout is not None, "it talks"
        while line := await self._next_line(self.process.stdout):
            try:
                failure = LAUNCHER_LINES.read(line).failure
            except RemoteProtocolError as error:
                log.warning("the launcher of node %d said: %s", self._node, text_of(error))
                continue
            self._has_told = True
            on_failed(self._placed(failure))
        exit_code = await self.process.wait()
        if exit_code != 0 and not self._has_told:
            on_failed(self._launcher_ended(exit_code))

    async def _next_line(self, stdout: asyncio.StreamReader) -> bytes:
        """Return the next line; empty at the end, or after one that is too long."""
        try:
            return await stdout.readline()
        except ValueError:
            return b""

    def _placed(self, failure: Failure) -> Failure:
        if failure.rank >= 0:
            if not failure.message and not failure.is_collateral and failure.exit_code > 0:
                said = last_words(Path(failure.log_path))
                failure = dataclasses.replace(failure, message=said)
            return rank_failure(failure, self._site, self._node)
        message = f"torchrun of node {self._node} of site {self._site}: {failure.message}"
        log_path = str(self._folder / TORCHRUN_LOG)
        return dataclasses.replace(
            failure, message=message, site=self._site, node=self._node, log_path=log_path
        )

    def _launcher_ended(self, exit_code: int) -> Failure:
        """Return the failure of torchrun itself.

        A killed torchrun counts as a killed training process: its ranks die with it.
        """
        end = describe_end(exit_code, self._kernel_kills.explain(exit_code))
        if exit_code == PROLOGUE_STATUS:
            end = f"was not started: {last_words(self._folder / TORCHRUN_LOG)}"
        return Failure(
            code="RANK_KILLED" if exit_code < 0 else "LAUNCH_FAILED",
            message=f"torchrun of node {self._node} of site {self._site} {end}",
            at_s=time.monotonic(),
            site=self._site,
            node=self._node,
            exit_code=exit_code,
            log_path=str(self._folder / TORCHRUN_LOG),
        )


def after(prologue: Sequence[str], command: Sequence[str]) -> list[str]:
    """Return the command that runs lines of bash, and then `command` in what they have set up.

    A login shell has what sites define for theirs, as `module`. Where the lines put another python
    first on the PATH, as environments do, it runs instead of this one. A line may change the
    command itself, which is `$@`.
    """
    if not prologue:
        return list(command)
    python, *rest = command
    script = [
        f"set -- {shlex.quote(python)} {shlex.join(rest)}",
        "isthmus_python=$(command -v python3 || :)",
        "{",
        *(
            f"eval {shlex.quote(line)} || {{ isthmus_status=$?; echo "
            rf"{shlex.quote(f'{PROLOGUE_FAILED}{number}: {line}')} \(status $isthmus_status\); "
            f"exit {PROLOGUE_STATUS}; }}"
            for number, line in enumerate(prologue)
        ),
        "} </dev/null >&2",
        "isthmus_now=$(command -v python3 || :)",
        f'if [ "$isthmus_now" != "$isthmus_python" ] && [ "$1" = {shlex.quote(python)} ]; then',
        '  shift; set -- "$isthmus_now" "$@"',
        "fi",
        'exec "$@"',
    ]
    return ["bash", "--login", "-c", "\n".join(script)]


def rank_files(folder: Path, name: str, first_rank: int) -> Iterator[tuple[str, Path]]:
    """Yield (source name, path) of the existing log files of a node's ranks.

    stderr comes after stdout: if a source exceeds the budget, its end is kept, and that should be
    the traceback.
    """
    for output in sorted(folder.glob(f"ranks/{name}_*/attempt_0/*/stdout.log")):
        source = f"rank{first_rank + int(output.parent.name)}"
        yield source, output
        yield source, output.with_name("stderr.log")
