"""An emulator for callers without an event loop: tests, scripts, the comparison with Gloo.

It is a `Backend` on its own loop, in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from isthmus.orchestrator.core.run_events import SiteNamespace
from isthmus.orchestrator.emulator.backend import Backend, EmulatorError
from isthmus.orchestrator.emulator.emulator_config import NetnsConfig, RelayConfig, RelayEndpoint
from isthmus.topology.faults.script import Change
from isthmus.topology.spec.errors import ConfigError

UP_WITHIN_S = 20.0
LinkCounters = Mapping[tuple[str, str], Mapping[str, int]]
"""Counters of directed links, by source and target."""

Result = TypeVar("Result")


class EmulatorProcess:
    """A running emulator; its methods may be called from any thread."""

    def __init__(self, backend: Backend, loop: asyncio.AbstractEventLoop) -> None:
        self.pid = backend.pid
        self.endpoints: tuple[RelayEndpoint, ...] = backend.up.endpoints
        """Addresses to dial, in the order of the relay's configuration."""
        self.sites: Mapping[str, SiteNamespace] = {each.site: each for each in backend.up.sites}
        """How each site of the packet emulator is reached and entered."""
        self._backend = backend
        self._loop = loop
        self._counting = threading.Lock()

    def apply(self, changes: Sequence[Change]) -> None:
        """Change links, all at once; return when the changes have taken effect.

        Raises:
            ConfigError: the emulator refuses all changes, or has ended; with its own message.
        """
        _wait(self._backend.apply(changes), self._loop)

    def counters(self) -> LinkCounters:
        """Return the links' current counters; errors as in `apply`."""
        with self._counting:
            links = _wait(self._backend.count(), self._loop)
        return {
            (each["source"], each["target"]): {
                name: value for name, value in each.items() if name not in {"source", "target"}
            }
            for each in links
        }


@contextlib.contextmanager
def running_emulator(config: RelayConfig | NetnsConfig) -> Iterator[EmulatorProcess]:
    """Run the emulator of `config` while the block runs.

    Raises:
        ConfigError: the emulator refuses its configuration, the machine does not allow it, or it is
            not up within `UP_WITHIN_S`; with its own message.
    """
    with _running_loop() as loop:
        backend = _wait(Backend.start(config, loop.time() + UP_WITHIN_S), loop)
        try:
            yield EmulatorProcess(backend, loop)
        finally:
            _wait(backend.close(), loop)


@contextlib.contextmanager
def _running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="emulator")
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _wait(doing: Coroutine[Any, Any, Result], loop: asyncio.AbstractEventLoop) -> Result:
    """Return the result of a coroutine on the loop; EmulatorError becomes ConfigError."""
    try:
        return asyncio.run_coroutine_threadsafe(doing, loop).result()
    except EmulatorError as error:
        raise ConfigError(str(error)) from error
