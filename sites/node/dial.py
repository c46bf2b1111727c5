"""`python -m isthmus.sites.node.dial`: a stream to a machine that waits for its site's agent.

This process's stdin and stdout are connected to those of the supervisor that `python -m
isthmus.sites.node.serve` starts there.
"""

from __future__ import annotations

import argparse
import asyncio
import ssl
import sys
from collections.abc import Sequence

from isthmus.protos.errors import IsthmusError
from isthmus.protos.failure import text_of
from isthmus.protos.identities import AGENT
from isthmus.protos.mutual_streams import dial_own
from isthmus.sites.node.serve import copy

AGAIN_S = 0.5
"""Interval between attempts: a pod's name is not known before the pod is."""
STREAM_BYTES = 1 << 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Connect stdin and stdout to the machine's server; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m isthmus.sites.node.dial", description=__doc__)
    parser.add_argument("--site", required=True, help="whose agent dials")
    parser.add_argument("address", metavar="HOST:PORT")
    options = parser.parse_args(arguments)
    host, _, port = options.address.rpartition(":")
    try:
        return asyncio.run(_join(f"{options.site}.{AGENT}", host, int(port)))
    except (IsthmusError, ssl.SSLError, ValueError) as error:
        print(f"error: {options.address}: {text_of(error)}", file=sys.stderr)  # noqa: T201
        return 1


async def _reached(
    name: str, host: str, port: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Dial until a server answers; the agent ends this process if that takes too long."""
    while True:
        try:
            return await dial_own(name, host, port)
        except ssl.SSLError:
            raise
        except OSError:
            await asyncio.sleep(AGAIN_S)


async def _join(name: str, host: str, port: int) -> int:
    loop = asyncio.get_running_loop()
    reader, writer = await _reached(name, host, port)
    stdin = asyncio.StreamReader(limit=STREAM_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    transport, protocol = await loop.connect_write_pipe(
        lambda: asyncio.streams.FlowControlMixin(loop=loop), sys.stdout
    )
    stdout = asyncio.StreamWriter(transport, protocol, None, loop)
    sending = asyncio.create_task(copy(stdin, writer), name="to the supervisor")
    receiving = asyncio.create_task(copy(reader, stdout), name="from the supervisor")
    await asyncio.wait({sending, receiving}, return_when=asyncio.FIRST_COMPLETED)
    writer.close()
    if sending.done():
        return 0
    print("has closed its stream: see the log of its pod", file=sys.stderr)  # noqa: T201
    return 1


if __name__ == "__main__":
    sys.exit(main())
