"""The parent's side of a gateway process: configures it, sends commands, reads messages.

docs/protocols.md lists the messages.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import time
from pathlib import Path

from isthmus.protos.errors import RemoteProtocolError
from isthmus.protos.failure import Failure, text_of
from isthmus.protos.own_processes import own_command
from isthmus.sites.gateway.agent_port import (
    SAID,
    Address,
    Command,
    Connected,
    Joined,
    Listening,
    Probed,
    Said,
)
from isthmus.sites.gateway.config import GatewayConfig
from isthmus.sites.local.rank_messages import Failed
from isthmus.sites.node.children import start_leashed
from isthmus.sites.node.failures import describe_end
from isthmus.sites.node.kernel_kills import KernelKills
from isthmus.sites.node.node import Listener
from isthmus.topology.spec.json_lines import line_of

MODULE = "isthmus.sites.gateway"
"""The module that runs as a gateway."""
MALLOC = (
    "glibc.malloc.arena_max=1:glibc.malloc.mmap_threshold=1073741824"
    ":glibc.malloc.trim_threshold=4294967296:glibc.malloc.top_pad=268435456"
)
"""Buffers of megabytes come and go.

By default each is an mmap with page faults, at half the throughput. One arena, because frames pass
between threads, and with an arena per thread freed memory stays there. glibc reads the variables
only when a process starts.
"""
_EXIT_S = 2.0
"""Time between the end of a gateway's output and that of its process."""

log = logging.getLogger(__name__)


class Gateway:
    """A running gateway process. `read` handles its messages and sets the events."""

    def __init__(
        self,
        config: GatewayConfig,
        node: int,
        process: asyncio.subprocess.Process,
        log_path: Path,
    ) -> None:
        self.index = config.gateway
        """Number of the gateway at its site."""
        self.node = node
        self.log_path = log_path
        self.process = process
        self.address: Address | None = None
        self.listening = asyncio.Event()
        self.connected = asyncio.Event()
        self.joined = asyncio.Event()
        self.probed = asyncio.Event()
        self.closing = False
        self._site = config.site
        self._failed = False
        self._kernel_kills: KernelKills | None = None

    @classmethod
    async def start(
        cls,
        config: GatewayConfig,
        node: int,
        log_path: Path,
        namespaces: tuple[str, str] | None = None,
    ) -> Gateway:
        """Start a gateway of a node, in `namespaces` if given, and send its configuration."""
        env = {**os.environ, "GLIBC_TUNABLES": MALLOC, "PYTHONUNBUFFERED": "1"}
        with log_path.open("ab") as log_file:
            process = await start_leashed(
                own_command(MODULE),
                env=env,
                log=log_file,
                talks=True,
                namespaces=namespaces,
            )
        gateway = cls(config, node, process, log_path)
        gateway._kernel_kills = KernelKills()
        gateway.tell(config)
        return gateway

    def tell(self, message: GatewayConfig | Command) -> None:
        """Send one command; if the gateway has ended, `read` notices."""
        assert self.process.stdin is not None
        if not self.process.stdin.is_closing():
            self.process.stdin.write(line_of(message))

    def close(self) -> None:
        """Close the gateway's stdin, so that it leaves. Idempotent."""
        self.closing = True
        if self.process.stdin is not None:
            self.process.stdin.close()

    async def read(self, listener: Listener) -> None:
        """Handle the gateway's messages until it ends.

        An unrequested end, or an exit status other than 0, is a failure.
        """
        on_failed = listener.on_failed
        assert self.process.stdout is not None
        while True:
            try:
                line = await self.process.stdout.readline()
            except ValueError:  # longer than any line of the protocol
                on_failed(self._found("PROTOCOL_VIOLATION", "its gateway wrote too long a line"))
                break
            if not line:
                break
            try:
                self._handle(SAID.read(line), listener)
            except (RemoteProtocolError, ValueError) as error:
                text = line[:200].decode(errors="replace").strip()
                said = f"its gateway said {text!r}: {text_of(error)}"
                log.warning("gateway %d: %s", self.index, said)
                on_failed(self._found("INTERNAL", said))
        try:
            async with asyncio.timeout(None if self.closing else _EXIT_S):
                exit_code = await self.process.wait()
        except TimeoutError:
            on_failed(self._found("GATEWAY_EXITED", "its gateway closed its output"))
            return
        if not self._failed and (exit_code != 0 or not self.closing):
            on_failed(self._ended(exit_code))

    def _handle(self, message: Said, listener: Listener) -> None:
        match message:
            case Listening(host=host, port=port):
                self.address = Address(site=self._site, gateway=self.index, host=host, port=port)
                self.listening.set()
            case Connected():
                self.connected.set()
            case Joined():
                self.joined.set()
            case Probed():
                self.probed.set()
            case Failed(failure=failure):
                self._failed = True
                listener.on_failed(self._reported(failure))
            case _:
                listener.on_said(self.index, message)

    def _reported(self, failure: Failure) -> Failure:
        """Return the gateway's failure with its place (default: here) and the current time."""
        return dataclasses.replace(
            failure,
            at_s=time.monotonic(),
            site=failure.site or self._site,
            node=self.node,
            gateway=self.index,
            log_path=str(self.log_path),
        )

    def _found(self, code: str, message: str) -> Failure:
        return self._reported(Failure(code=code, message=message))

    def _ended(self, exit_code: int) -> Failure:
        killer = self._kernel_kills
        end = describe_end(exit_code, killer.explain(exit_code) if killer else "")
        message = f"gateway {self.index} of site {self._site} {end}"
        return self._reported(Failure(code="GATEWAY_EXITED", message=message, exit_code=exit_code))
