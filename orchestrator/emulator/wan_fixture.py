"""The object of the `wan` fixture: relays, changes of their links, and fault scripts."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from isthmus.orchestrator.emulator.emulator_child import (
    EmulatorProcess,
    LinkCounters,
    running_emulator,
)
from isthmus.orchestrator.emulator.emulator_config import (
    RelayConfig,
    RelayEndpoint,
    check_changes,
    shapes_of,
)
from isthmus.orchestrator.emulator.fault_player import needs_run
from isthmus.orchestrator.emulator.link_shape import LinkShape
from isthmus.topology.faults.loading import load_faults
from isthmus.topology.faults.script import Change, FaultScript, TimedChange, expand
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.world import Accelerator, Detection, Link, Site, Topology

STOP_WITHIN_S = 60.0


class Changed(Protocol):
    """An emulation whose links can be changed."""

    def apply(self, changes: Sequence[Change], /) -> None:
        """Change links now; errors as in EmulatorProcess.apply."""


class PlayingFaults:
    """A fault script that is played in a thread; its creator stops it."""

    def __init__(self, wan: Changed, times: Sequence[TimedChange]) -> None:
        self.times = tuple(times)
        """All changes of the script."""
        self._wan = wan
        self._stopping = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._play, name="faults")
        self._thread.start()

    def wait(self, within_s: float) -> None:
        """Wait until all changes are made.

        Raises:
            TimeoutError: some changes are still to come after `within_s`.
            ConfigError: a change could not be made; the rest was not tried.
        """
        self._thread.join(within_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the fault script goes on after {within_s:g} s")
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Skip the remaining changes. Idempotent."""
        self._stopping.set()
        self._thread.join(STOP_WITHIN_S)

    def _play(self) -> None:
        began_s = time.monotonic()
        for at_s, together in itertools.groupby(self.times, key=lambda each: each.at_s):
            if self._stopping.wait(max(0.0, began_s + at_s - time.monotonic())):
                return
            changes = [each.change for each in together if isinstance(each.change, Change)]
            try:
                self._wan.apply(changes)
            except ConfigError as error:  # raised again by `wait`
                self._error = error
                return


class Wan:
    """An emulated WAN for one test. A call starts a relay; several calls are allowed."""

    def __init__(self) -> None:
        self._relays: list[tuple[EmulatorProcess, dict[tuple[str, str], LinkShape]]] = []
        self._playing: list[PlayingFaults] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Wan:
        return self

    def __exit__(self, *_: object) -> None:
        for playing in self._playing:
            playing.stop()
        self._stack.close()

    def __call__(
        self,
        links: Topology | Iterable[LinkShape],
        endpoints: Iterable[RelayEndpoint],
        seed: int = 0,
    ) -> tuple[RelayEndpoint, ...]:
        """Start a relay (a process that ends with the test) between listening gateways.

        Returns:
            The addresses to dial instead, in the order of `endpoints`.

        Raises:
            ConfigError: the links and endpoints do not fit together, or a host has no address.
        """
        shapes = shapes_of(links) if isinstance(links, Topology) else tuple(links)
        config = RelayConfig(links=shapes, endpoints=tuple(endpoints), seed=seed)
        relay = self._stack.enter_context(running_emulator(config))
        self._relays.append((relay, {(each.source, each.target): each for each in shapes}))
        return relay.endpoints

    def apply(self, changes: Iterable[Change]) -> None:
        """Change links now, and wait for the effect. Errors as in EmulatorProcess.apply."""
        changes = list(changes)
        check_changes(changes, self._links())
        for relay, links in self._relays:
            own = [each for each in changes if (each.source, each.target) in links]
            if own:
                relay.apply(own)

    def run_faults(self, script: str | FaultScript, seed: int | None = None) -> PlayingFaults:
        """Begin to play a fault script (YAML, or loaded) beside the test.

        `seed` overrides the script's own.

        Raises:
            ConfigError: with every mistake of the YAML; or the script pauses a site, whose
                processes this fixture does not know.
        """
        if isinstance(script, str):
            script = load_faults(script, "faults", _topology(self._links().values()))
        if needs_run(script.faults):
            raise ConfigError("the wan fixture cannot pause a site: stop its processes yourself")
        playing = PlayingFaults(self, expand(script, seed))
        self._playing.append(playing)
        return playing

    def counters(self) -> LinkCounters:
        """Return the current counters of each directed link.

        For a link in several relays, those of the last.
        """
        found: dict[tuple[str, str], dict[str, int]] = {}
        for relay, _ in self._relays:
            found.update({pair: dict(counts) for pair, counts in relay.counters().items()})
        return found

    def _links(self) -> dict[tuple[str, str], LinkShape]:
        return {pair: shape for _, links in self._relays for pair, shape in links.items()}


def _topology(shapes: Iterable[LinkShape]) -> Topology:
    """Return a topology with these links, and sites with only names."""
    shapes = list(shapes)
    nothing = Accelerator.named("none")
    names = dict.fromkeys(name for each in shapes for name in (each.source, each.target))
    return Topology(
        name="wan",
        sites=tuple(
            Site(
                name=name,
                index=index,
                nodes=1,
                accelerators_per_node=1,
                accelerator=nothing,
            )
            for index, name in enumerate(names)
        ),
        links=tuple(
            Link(
                ends=(each.source, each.target),
                bytes_per_s=each.bytes_per_s,
                rtt_s=2 * each.delay_s,
                rtt_origin="rtt",
                jitter_s=each.jitter_s,
                loss=each.loss,
            )
            for each in shapes
        ),
        failure=Detection(detect_within_s=15.0, start_within_s=120.0),
    )
