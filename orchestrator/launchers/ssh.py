"""The launcher of a site behind SSH, with asyncssh; host keys are checked, also of jump hosts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import getpass
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import asyncssh

from isthmus.orchestrator.launchers.launcher import LaunchError
from isthmus.orchestrator.launchers.local import LINE_BYTES
from isthmus.protos.failure import text_of
from isthmus.topology.spec.world import Launcher as Described

CONNECT_S = 20.0
KEEPALIVE_S = 5.0
KEEPALIVES = 4
"""Unanswered keepalives in a row after which a connection counts as lost."""


class SshStream:
    """A process on another machine, over its own SSH connection."""

    def __init__(self, process: Any, connections: Sequence[Any]) -> None:  # noqa: ANN401
        self._process = process
        self._connections = connections

    async def write(self, data: bytes) -> None:
        """Write to its stdin."""
        try:
            self._process.stdin.write(data)
            await self._process.stdin.drain()
        except (asyncssh.Error, BrokenPipeError) as error:
            raise ConnectionError(text_of(error)) from error

    async def readline(self) -> bytes:
        """Return the next line, empty once the connection is lost."""
        try:
            line: bytes = await self._process.stdout.readuntil(b"\n")
        except asyncio.IncompleteReadError as error:
            return error.partial
        except (asyncssh.Error, OSError):
            return b""
        return line

    async def close(self) -> None:
        """End its stdin."""
        with contextlib.suppress(OSError, asyncssh.Error):
            self._process.stdin.write_eof()

    async def wait(self) -> int | None:
        """Return its exit status; None: the connection was lost."""
        await self._process.wait_closed()
        status: int | None = self._process.returncode
        await self.abandon()
        return status

    async def abandon(self) -> None:
        """End the connection."""
        for connection in self._connections:
            connection.abort()
        for connection in self._connections:
            with contextlib.suppress(asyncssh.Error, OSError):
                await connection.wait_closed()


class SshLauncher:
    """Starts processes on a machine that has an sshd."""

    def __init__(self, described: Described, python: str, prefix: Sequence[str] = ()) -> None:
        """Connect to nothing yet.

        Args:
            described: Host, user and key. Paths are absolute.
            python: The interpreter there.
            prefix: Prefix of each command, such as srun.
        """
        assert described.host is not None
        self.python = python
        self._described = described
        self._prefix = tuple(prefix)

    async def start(self, command: Sequence[str]) -> SshStream:
        """Connect, and start a command.

        Raises:
            LaunchError: the machine cannot be reached, has another host key, or refuses.
        """
        where = self._described
        if where.key is not None and not os.path.isfile(where.key):  # noqa: PTH113, ASYNC240 - a local file
            raise LaunchError(
                "key_missing", f"{where.key}: no such key", f"ssh-keygen -t ed25519 -f {where.key}"
            )
        connections: list[Any] = []
        try:
            if where.jump is not None:
                user, host, port = parts_of_jump(where.jump)
                user = user or where.user or getpass.getuser()
                connections.append(await self._connect(host, port, user, None))
            tunnel = connections[0] if connections else None
            assert where.host is not None
            connections.append(await self._connect(where.host, where.port, where.user, tunnel))
            process = await connections[-1].create_process(
                shlex.join([*self._prefix, *command]),
                encoding=None,
                stderr=asyncssh.STDOUT,
                bufsize=LINE_BYTES,
            )
        except BaseException as error:
            for connection in connections:
                connection.abort()
            if isinstance(error, (asyncssh.Error, OSError, ValueError)):
                raise self._explained(error) from error
            raise
        return SshStream(process, connections[::-1])

    async def _connect(self, host: str, port: int, user: str | None, tunnel: Any) -> Any:  # noqa: ANN401
        where = self._described
        options: dict[str, Any] = {}
        if user is not None:
            options["username"] = user
        if where.key is not None:
            options |= {"client_keys": [where.key], "agent_path": None}
        if where.known_hosts is not None:
            options["known_hosts"] = where.known_hosts
        return await asyncssh.connect(
            host,
            port,
            tunnel=tunnel,
            connect_timeout=CONNECT_S,
            login_timeout=CONNECT_S,
            keepalive_interval=KEEPALIVE_S,
            keepalive_count_max=KEEPALIVES,
            **options,
        )

    def _explained(self, error: Exception) -> LaunchError:
        """Return the launch error of an exception, with its remedy."""
        where = self._described
        host = f"{where.host}:{where.port}" + (f" (by {where.jump})" if where.jump else "")
        as_user = f"{where.user}@{where.host}" if where.user else str(where.host)
        key = f"-i {where.key} " if where.key else ""
        known = where.known_hosts or "~/.ssh/known_hosts"
        ssh = f"-p {where.port} {as_user}"
        match error:
            case asyncssh.HostKeyNotVerifiable():
                return LaunchError(
                    "host_key_unknown",
                    f"{host}: its host key is not in {known}: {error}",
                    f"ssh-keyscan -p {where.port} {where.host} >> {known}, and compare what "
                    "ssh-keygen -lf says of it with what that machine's operator says",
                )
            case asyncssh.PermissionDenied():
                return LaunchError(
                    "permission_denied",
                    f"{host}: refuses {as_user}: {error}",
                    f"ssh-copy-id {key}{ssh}; then `ssh {key}{ssh} true` has to work",
                )
            case asyncssh.KeyImportError():
                return LaunchError(
                    "key_unusable",
                    f"{where.key or 'a key'}: {error}",
                    "want a private key without a passphrase; otherwise use ssh-agent, no `key`",
                )
            case OSError() if error.filename:
                return LaunchError(
                    "file_missing", f"{error.filename}: {error.strerror}", "see launcher's paths"
                )
        is_silent = isinstance(error, TimeoutError) and not str(error)
        told = "no answer" if is_silent else text_of(error)
        return LaunchError(
            "host_unreachable",
            f"{host}: cannot be reached: {told}",
            f"see host and port in the topology; `ssh {key}{ssh} true` has to work",
        )


def parts_of_jump(jump: str) -> tuple[str, str, int]:
    """Return user (empty: as for the site), host and port of user@host:port."""
    user, _, place = jump.rpartition("@")
    host, colon, port = place.partition(":")
    return user, host, int(port) if colon else 22


def absolute(described: Described, folder: Path) -> Described:
    """Return the settings with absolute paths; relative ones begin at the topology's folder."""

    def placed(path: str | None) -> str | None:
        return None if path is None else os.path.abspath(folder / Path(path).expanduser())  # noqa: PTH100

    return dataclasses.replace(
        described, key=placed(described.key), known_hosts=placed(described.known_hosts)
    )
