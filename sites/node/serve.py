"""Serves a machine of a site to the site's agent: `python -m isthmus.sites.node.serve`.

If neither ssh nor srun can start a supervisor on a machine, as in a pod, the agent dials this
server. Both ends use the certificate of the site's agent. A stream is connected to a supervisor's
stdin and stdout (sites/node/__main__.py); the supervisor's stderr is this process's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence

from isthmus.protos.errors import IsthmusError
from isthmus.protos.failure import text_of
from isthmus.protos.identities import AGENT
from isthmus.protos.mutual_streams import serve_own
from isthmus.protos.own_processes import own_command
from isthmus.protos.private_files import keep_private, users_umask
from isthmus.protos.save_time import LEAVE_S, save_within_s
from isthmus.sites.node.children import (
    adopt_orphans,
    kill_descendants,
    send,
    start_leashed,
    wait_ended,
)
from isthmus.sites.node.stream import LINE_BYTES

STREAMS = 4
"""Open streams at most. An agent has one; a restarted agent may dial before the old one ended."""
COPY_BYTES = 64 << 10
log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal comes; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m isthmus.sites.node.serve",
        description="Let a site's agent use this machine.",
    )
    parser.add_argument("--site", required=True, help="whose agent may dial")
    parser.add_argument("--bind", required=True, metavar="HOST:PORT")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s node: %(message)s")
    keep_private()
    adopt_orphans()
    host, _, port = options.bind.rpartition(":")
    try:
        return asyncio.run(_serve(options.site, host, int(port)))
    except (IsthmusError, OSError, ValueError) as error:
        print(f"error: {text_of(error)}", file=sys.stderr)  # noqa: T201
        return 1


async def _serve(site: str, host: str, port: int) -> int:
    ended = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, ended.set)
    supervisors: set[asyncio.subprocess.Process] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(supervisors) >= STREAMS or ended.is_set():
            log.warning("refused an agent: %d streams are open already", len(supervisors))
            return
        process = await start_leashed(
            own_command("isthmus.sites.node"),
            env=os.environ,
            log=sys.stderr.buffer,
            talks=True,
            umask=users_umask(),
            line_bytes=LINE_BYTES,
        )
        supervisors.add(process)
        try:
            await _join(process, reader, writer)
        finally:
            supervisors.discard(process)

    server = await serve_own(f"{site}.{AGENT}", host, port, handle)
    log.info("the agent of site %s may dial %s", site, _addresses(server))
    await ended.wait()
    server.close()
    for process in supervisors:
        send(process, signal.SIGTERM)
    await wait_ended(list(supervisors), _kill_at_s())
    await kill_descendants(list(supervisors))
    return 0


async def _join(
    process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Connect a stream to a supervisor's stdin and stdout until either ends."""
    assert process.stdin is not None
    assert process.stdout is not None
    stdin = process.stdin
    tasks = {
        asyncio.create_task(copy(reader, stdin), name="to the supervisor"),
        asyncio.create_task(copy(process.stdout, writer), name="to the agent"),
    }
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    stdin.close()
    if not await wait_ended([process], _kill_at_s()):
        send(process, signal.SIGKILL)
        await process.wait()
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def _kill_at_s() -> float:
    """Return when to kill a supervisor that is asked to end now, on the loop's clock."""
    return asyncio.get_running_loop().time() + save_within_s(os.environ) + LEAVE_S


async def copy(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
    """Copy bytes from one stream to another until either ends."""
    with contextlib.suppress(OSError):
        while data := await source.read(COPY_BYTES):
            to.write(data)
            await to.drain()


def _addresses(server: asyncio.Server) -> str:
    return ", ".join("{}:{}".format(*each.getsockname()[:2]) for each in server.sockets)


if __name__ == "__main__":
    sys.exit(main())
