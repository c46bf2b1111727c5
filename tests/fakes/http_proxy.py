"""A small HTTP proxy: takes CONNECT, and carries bytes both ways."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass
class HttpProxy:
    """What it was asked for."""

    port: int = 0
    asked: list[str] = field(default_factory=list)
    """HOST:PORT of each CONNECT."""
    credentials: list[str] = field(default_factory=list)
    """Proxy-Authorization of each that had one."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


async def _carry(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(1 << 16):
            target.write(data)
            await target.drain()
    target.close()


@asynccontextmanager
async def http_proxy() -> AsyncIterator[HttpProxy]:
    """Serve on a port of loopback until the block ends."""
    proxy = HttpProxy()
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("ascii").split("\r\n")
        method, target, _ = head[0].split()
        proxy.asked.append(target)
        for line in head[1:]:
            name, _, value = line.partition(": ")
            if name.lower() == "proxy-authorization":
                proxy.credentials.append(value)
        assert method == "CONNECT"
        host, _, port = target.rpartition(":")
        there, back = await asyncio.open_connection(host.strip("[]"), int(port))
        writers.extend((writer, back))
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await asyncio.gather(_carry(reader, back), _carry(there, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        for each in writers:
            each.close()
        await asyncio.gather(*(each.wait_closed() for each in writers), return_exceptions=True)
