"""An emulator for whoever has no event loop: tests, scripts, the comparison with Gloo.

It is a `Backend` on a loop of its own, in a thread.
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
"""What has passed each directed link, by source and target."""

Result = TypeVar("Result")


class EmulatorProcess:
    """An emulator that runs; its methods may be called by any thread."""

    def __init__(self, backend: Backend, loop: asyncio.AbstractEventLoop) -> None:
        self.pid = backend.pid
        self.endpoints: tuple[RelayEndpoint, ...] = backend.up.endpoints
        """Where to dial, in the order of the relay's configuration."""
        self.sites: Mapping[str, SiteNamespace] = {each.site: each for each in backend.up.sites}
        """How each site of the packet emulator is reached and entered."""
        self._backend = backend
        self._loop = loop
        self._counting = threading.Lock()

    def apply(self, changes: Sequence[Change]) -> None:
        """Change links, all at once; return when it has taken effect.

        Raises:
            ConfigError: it refuses, and has changed nothing, or it has ended; in its own words.
        """
        _wait(self._backend.apply(changes), self._loop)

    def counters(self) -> LinkCounters:
        """Return what has passed each link by now; errors as of `apply`."""
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
    """Run the emulator that `config` is for; it has ended when the block has.

    Raises:
        ConfigError: it refuses its configuration, this machine refuses it, or it is not up within
            `UP_WITHIN_S`; in its own words.
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
    """Return what a coroutine of the loop does; ConfigError for its EmulatorError."""
    try:
        return asyncio.run_coroutine_threadsafe(doing, loop).result()
    except EmulatorError as error:
        raise ConfigError(str(error)) from error
