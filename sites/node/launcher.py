"""torchrun for one node of a site, in this process.

Usage: python -m isthmus.sites.node.launcher --nodes N --node I --ranks P --name NAME --folder DIR
       --start-within S --grace S --working-folder DIR -- (SCRIPT | -m MODULE) [ARGUMENTS...]

It loads torch, which takes seconds, and starts the ranks once stdin has a line with HOST:PORT of
the rendezvous. A site's gateways start meanwhile.

In addition to torchrun's work, it reports each failed rank as a line on stdout, the first within
milliseconds. torchrun itself reports only after it has ended all other ranks, which may take 30 s,
and orders failures by whole seconds, so a victim may look like the cause.

The rendezvous is torch's `static` one: `c10d` ignores the node rank and orders nodes by address and
pid, but the gateways must know where each rank is. Node 0 hosts the store, and listens on the
endpoint's address only. torch's own store would listen on all addresses, and anyone who reaches it
may read and write its keys.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.run import get_args_parser, run

from isthmus.protos.failure import Failure
from isthmus.protos.own_processes import own_command
from isthmus.sites.local.rank_messages import Failed
from isthmus.sites.node.kernel_kills import KernelKills
from isthmus.sites.node.rank_failures import (
    PID_FILE,
    cause_first,
    describe_failure,
    explain_crash,
)
from isthmus.topology.spec.json_lines import line_of

MONITOR_INTERVAL_S = 0.1
"""torchrun's poll interval, and so the longest delay after all ranks have ended well."""
BACKEND = "site"
"""The name of this rendezvous for torchrun."""
STORE_BACKLOG = 1024
"""Ranks that connect at once."""
_LOOK_S = 0.02
"""Interval between checks for ranks that have ended but that torchrun has not reaped yet."""

log = logging.getLogger(__name__)


class Watch:
    """A thread that notices and reports ends of ranks before torchrun reaps them."""

    def __init__(
        self, folder: Path, name: str, first_rank: int, say: Callable[[Failure], None]
    ) -> None:
        self._say = say
        self._kernel_kills = KernelKills()
        self._ranks = folder / "ranks"
        self._name = name
        self._first_rank = first_rank
        self._failures: dict[int, Failure] = {}
        self._unexplained: list[Failure] = []
        """Ranks first seen ended by SIGTERM while no other had failed."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)

    def start(self) -> None:
        """Begin to watch this process's children."""
        self._thread.start()

    def finish(self, exit_codes: dict[int, int]) -> None:
        """Stop, and report failures that torchrun saw and this thread did not.

        Args:
            exit_codes: exit code of each failed rank, by rank inside the site.
        """
        self._stopped.set()
        self._thread.join(1.0)  # the thread may hang in waitid if a rank cannot be killed
        added = [self._describe(rank - self._first_rank, code) for rank, code in exit_codes.items()]
        if all(each.exit_code == -signal.SIGTERM for each in added):
            self._add(self._unexplained)
        self._add(added)
        self._add(self._unexplained)

    def _watch(self) -> None:
        while not self._stopped.wait(_LOOK_S):
            try:
                # Blocks until a child has ended, and leaves it for torchrun to reap.
                os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            except ChildProcessError:
                continue
            self.look()

    def look(self) -> None:
        """Report ended ranks that are not reaped, unless SIGTERM ended all of them."""
        seen = self._ended()
        if self._failures or any(each.exit_code != -signal.SIGTERM for each in seen):
            self._add(seen)
        else:
            # Perhaps torchrun has reaped the first failure and ends the others: it will report.
            self._unexplained = self._unexplained or seen

    def _ended(self) -> list[Failure]:
        """Return new failures of ranks that have ended and are not reaped."""
        failures = []
        for path in self._ranks.glob(f"{self._name}_*/attempt_0/*/{PID_FILE}"):
            pid, local_rank = int(path.read_text()), int(path.parent.name)
            try:
                ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            except ChildProcessError:
                continue
            if ended is not None and ended.si_status != 0:
                exited = ended.si_code == os.CLD_EXITED
                code = ended.si_status if exited else -ended.si_status
                failures.append(self._describe(local_rank, code))
        return failures

    def _describe(self, local_rank: int, exit_code: int) -> Failure:
        found = list(self._ranks.glob(f"{self._name}_*/attempt_0/{local_rank}"))
        failure = describe_failure(
            found[0] if found else self._ranks,
            rank=self._first_rank + local_rank,
            exit_code=exit_code,
            at_s=time.monotonic(),
        )
        killed = self._kernel_kills.explain(exit_code)
        said = failure.message or killed or explain_crash(exit_code)
        return dataclasses.replace(failure, message=said)

    def _add(self, failures: list[Failure]) -> None:
        new = [failure for failure in failures if failure.rank not in self._failures]
        if not new:
            return
        # torchrun sends SIGTERM only after another failure; if it reports no other, SIGTERM came
        # from elsewhere.
        cause = bool(self._failures) or any(each.exit_code != -signal.SIGTERM for each in new)
        for failure in sorted(new, key=cause_first):
            if failure.exit_code == -signal.SIGTERM and cause:
                failure = dataclasses.replace(failure, is_collateral=True)
            self._failures[failure.rank] = failure
            self._say(failure)


class SiteRendezvous(StaticTCPRendezvous):
    """Torch's static rendezvous, with a store that listens on one address."""

    def get_backend(self) -> str:
        """Return the rendezvous' name."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Create the store in torch's place, if this node hosts it."""
        if self.rank == 0 and self._store is None:
            family = socket.AF_INET6 if ":" in self.master_addr else socket.AF_INET
            with socket.socket(family) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((self.master_addr, self.master_port))
                listener.listen(STORE_BACKLOG)
                self._store = TCPStore(
                    self.master_addr,
                    self.master_port,
                    self.world_size,
                    is_master=True,
                    timeout=self.timeout,
                    master_listen_fd=listener.detach(),  # the store closes it
                )
        return super().next_rendezvous()


def rendezvous(parameters: RendezvousParameters) -> SiteRendezvous:
    """Return the rendezvous that torchrun looks up as BACKEND."""
    host, port = parse_rendezvous_endpoint(parameters.endpoint, -1)
    return SiteRendezvous(
        host,
        port,
        int(parameters.config["rank"]),
        parameters.max_nodes,
        parameters.run_id,
        int(parameters.config["timeout"]),
    )


def main(arguments: list[str]) -> int:
    """Run the node's ranks; return 0 when all ended with 0."""
    options = _parser().parse_args(arguments)
    say = _speaker()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not torch.cuda.is_available():
        # On CPUs each rank would otherwise take every core for itself.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(max(1, round(options.grace)))
    endpoint = _read_endpoint()
    torchrun = get_args_parser().parse_args(
        [
            *("--nnodes", str(options.nodes), "--node-rank", str(options.node)),
            *("--nproc-per-node", str(options.ranks), "--max-restarts", "0"),
            *("--rdzv-backend", BACKEND, "--rdzv-endpoint", endpoint),
            *("--rdzv-id", options.name),
            *("--rdzv-conf", f"rank={options.node},timeout={round(options.start_within)}"),
            *("--monitor-interval", str(MONITOR_INTERVAL_S)),
            *("--log-dir", str(options.folder / "ranks"), "--redirects", "3", "--no-python"),
            *own_command("isthmus.sites.node.rank", str(os.getpid())),
            *(str(options.working_folder), *command),
        ]
    )
    rendezvous_handler_registry.register(BACKEND, rendezvous)
    watch = Watch(options.folder, options.name, options.node * options.ranks, say)
    watch.start()
    try:
        run(torchrun)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        ended = {rank: each.exitcode for rank, each in error.failures.items()}
        watch.finish(ended)
        log.warning("ranks failed: %s", ended)
        return 1
    except SignalException as error:
        log.warning("ended by %s", error.sigval.name)
        return 128 + error.sigval
    except OSError as error:  # no space or processes: the log may have no room either
        place = error.filename or options.folder
        message = f"the ranks cannot be started: {place}: {error.strerror or error}"
        say(Failure(code="LAUNCH_FAILED", message=message, at_s=time.monotonic()))
        return 1
    return 0


def _speaker() -> Callable[[Failure], None]:
    """Reserve stdout for failures; other output goes to stderr."""
    descriptor = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    speaking = threading.Lock()

    def say(failure: Failure) -> None:
        # If the parent has gone, this process is about to be killed.
        with speaking, contextlib.suppress(OSError):
            os.write(descriptor, line_of(Failed(failure=failure)))

    return say


def _read_endpoint() -> str:
    """Read the rendezvous' HOST:PORT from stdin; ranks then get an empty stdin."""
    endpoint = sys.stdin.readline().strip()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, sys.stdin.fileno())
    os.close(null)
    return endpoint


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m isthmus.sites.node.launcher", description=__doc__
    )
    parser.add_argument("--nodes", type=int, required=True, help="nodes of the site")
    parser.add_argument("--node", type=int, required=True, help="this node, from 0")
    parser.add_argument("--ranks", type=int, required=True, help="ranks of each node")
    parser.add_argument("--name", required=True, help="of the rendezvous: run and generation")
    parser.add_argument("--folder", type=Path, required=True, help="for logs")
    parser.add_argument("--start-within", type=float, required=True, help="s, for all nodes")
    parser.add_argument("--grace", type=float, required=True, help="s from SIGTERM to SIGKILL")
    parser.add_argument("--working-folder", type=Path, required=True, help="where ranks run")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(message)s")
    sys.exit(main(sys.argv[1:]))
