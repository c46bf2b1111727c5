"""A call whose messages are all there, and whose answers are kept."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

from isthmus.sites.gateway.links.inbox import Taker
from isthmus.sites.gateway.links.status import Status
from isthmus.sites.gateway.links.transport import SESSION_KEY


class ToldCall:
    """Stands where a server's call does. Its caller shows no certificate."""

    def __init__(self, *messages: bytes, session: str = "") -> None:
        self.over = asyncio.Event()
        self.answers: list[bytes] = []
        self._messages = [memoryview(each) for each in messages]
        self._session = session

    async def read(self) -> memoryview | None:
        return self._messages.pop(0) if self._messages else None

    async def take_each(self, take: Taker) -> None:
        while (message := await self.read()) is not None:
            if (answer := take(message)) is not None:
                await self.write(answer)

    async def write(self, message: bytes | memoryview) -> None:
        self.answers.append(bytes(message))

    async def end(self, status: Status, why: str) -> None:
        raise AssertionError(f"{status.name}: {why}")

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ((SESSION_KEY, self._session),)

    def auth_context(self) -> Mapping[str, Collection[bytes]]:
        return {}

    def peer(self) -> str:
        return "nobody"
