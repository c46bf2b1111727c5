"""All runs that the dashboard shows: journals that are watched, and metrics that are indexed.

A journal is small, and is read when it is asked about. Metrics are read by one thread, from when
somebody first looks at a run until nobody has for a while.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from isthmus.orchestrator.client.run_reader import TERMINAL
from isthmus.orchestrator.core.model_flops import ModelFlops
from isthmus.orchestrator.dashboard.run_places import (
    RunPlace,
    place_in_home,
    place_in_state,
    places_in_home,
    places_in_state,
)
from isthmus.orchestrator.dashboard.watched_run import Described, WatchedRun
from isthmus.orchestrator.documents import read_text
from isthmus.orchestrator.run_folder.home import JOB, TOPOLOGY
from isthmus.orchestrator.run_folder.run_files import RunFiles
from isthmus.orchestrator.run_folder.state_lock import is_abandoned
from isthmus.topology.documents.load import load_job, load_topology
from isthmus.topology.documents.placement import placed
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.run_spec import RunSpec
from isthmus.topology.spec.world import Topology

MAX_INDEXED = 8
"""Runs whose metrics are kept in memory: those that were looked at last."""
WATCHED_S = 60.0
"""Metrics are read on for so long after somebody has looked."""
PAUSE_S = 0.25
"""Between two looks whether there is more to read."""
GIVE_WAY_S = 0.05
"""The reading of a history waits so long, again and again, while somebody is answered."""
FIRST_ANSWER_S = 0.1
"""The first answer about a run waits so long for its metrics."""

log = logging.getLogger(__name__)


class RunLibrary:
    """Finds runs, and keeps what was read of them. Leaving its context ends its thread."""

    def __init__(
        self, home: Path, state: Path | None = None, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        """Read nothing yet.

        Args:
            home: HOME, of which all runs are shown.
            state: The state folder of a standing coordinator, whose runs are shown instead.
            now_s: The clock.
        """
        self._home, self._state, self._now_s = home, state, now_s
        self._lock = threading.Lock()
        self._runs: dict[str, WatchedRun] = {}
        self._indexed: OrderedDict[str, WatchedRun] = OrderedDict()
        self._wake, self._is_closed = threading.Event(), False
        self._num_answers, self._nobody_asks = 0, threading.Event()
        self._nobody_asks.set()
        self._reader = threading.Thread(target=self._read, name="metrics-reader", daemon=True)

    def __enter__(self) -> RunLibrary:
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed = True
        self._wake.set()
        self._reader.join()

    @property
    def source(self) -> Path:
        """Where the runs are."""
        return self._state or self._home

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Have the reading of histories give way while an answer is made."""
        with self._lock:
            self._num_answers += 1
            self._nobody_asks.clear()
        try:
            yield
        finally:
            with self._lock:
                self._num_answers -= 1
                if not self._num_answers:
                    self._nobody_asks.set()

    def runs(self) -> list[WatchedRun]:
        """Return all runs, newest first.

        Raises:
            JournalError: the journal of the standing coordinator cannot be read.
        """
        places = places_in_state(self._state) if self._state else places_in_home(self._home)
        with self._lock:
            kept = {place.run_id for place in places}
            for run_id in self._runs.keys() - kept:  # it was removed
                del self._runs[run_id]
                self._indexed.pop(run_id, None)
            return [self._watched(place) for place in places]

    def run(self, run_id: str) -> WatchedRun | None:
        """Return one run; None: there is none of that name."""
        place = (
            place_in_state(self._state, run_id)
            if self._state
            else place_in_home(self._home, run_id)
        )
        if place is None:
            return None
        with self._lock:
            return self._watched(place)

    def is_over(self, run_id: str) -> bool:
        """Whether nothing more will be written about a run, or it is not there."""
        watched = self.run(run_id)
        if watched is None or watched.place.state is None:
            return True
        return watched.run().state in TERMINAL or is_abandoned(watched.place.state)

    def _watched(self, place: RunPlace) -> WatchedRun:
        known = self._runs.get(place.run_id)
        if known is None or known.place != place:  # a run of that name was removed, say
            known = self._runs[place.run_id] = WatchedRun(place)
            self._indexed.pop(place.run_id, None)
        return known

    def open(self, watched: WatchedRun) -> None:
        """Have the metrics of a run be read from now on, unless it has no journal as yet."""
        watched.looked_at_s = self._now_s()
        with watched.opening:
            is_first = not watched.is_open
            if is_first:
                _open(watched)
        if not watched.is_open:
            return
        with self._lock:
            self._indexed[watched.place.run_id] = watched
            self._indexed.move_to_end(watched.place.run_id)
            while len(self._indexed) > MAX_INDEXED:
                self._indexed.popitem(last=False)[1].close()
        self._wake.set()
        if is_first:
            watched.wait_read(FIRST_ANSWER_S)

    def _read(self) -> None:
        """Read on in all runs that somebody looks at, until the library is closed."""
        while not self._is_closed:
            self._wake.clear()
            with self._lock:
                watched = list(self._indexed.values())
            since_s = self._now_s() - WATCHED_S
            has_read = False
            for each in watched:
                if each.looked_at_s >= since_s and not self._is_closed:
                    has_read |= self._read_one(each)
            if not has_read:
                self._wake.wait(PAUSE_S)

    def _read_one(self, watched: WatchedRun) -> bool:
        try:
            return watched.read(lambda: self._nobody_asks.wait(GIVE_WAY_S))
        except Exception:
            log.exception("run %s: its figures are not read on", watched.place.run_id)
            with self._lock:
                self._indexed.pop(watched.place.run_id, None)
            return False


def _open(watched: WatchedRun) -> None:
    """Have a run's metrics be read, if it has been submitted."""
    if watched.place.state is None:
        return
    run = watched.run()
    sites = tuple(site.site for site in run.sites)
    if not sites or not (run.folder or watched.place.is_own):
        return
    # Its own coordinator's folder may have another name by now than when it was written.
    folder = watched.place.state if watched.place.is_own else Path(run.folder)
    described = _described(folder, watched.about)
    if watched.place.home_folder is not None:
        described = replace(described, plan=watched.place.home_folder.plan)
    _ = described.predicted  # not while somebody waits for a page
    watched.described = described
    flops = None
    if described.job is not None and described.topology is not None:
        flops = ModelFlops(described.job, described.topology)
    watched.open(folder, sites, flops)


def _described(folder: Path, about: Mapping[str, Any]) -> Described:
    """Return what the coordinator decided, or else what was submitted."""
    try:
        spec = RunSpec.from_bytes(RunFiles(folder).read_spec())
    except (OSError, ConfigError):
        return _submitted(folder, about)
    return Described(spec.topology, spec.job, spec.reduction)


def _submitted(folder: Path, about: Mapping[str, Any]) -> Described:
    """Return the documents, of which there is no spec: as far as they can be read."""
    topology: Topology | None = None
    job: Job | None = None
    with contextlib.suppress(ConfigError):
        text, overrides = read_text(folder / TOPOLOGY), about.get("topology_overrides", [])
        topology = load_topology(text, TOPOLOGY, overrides)
    with contextlib.suppress(ConfigError):
        text, overrides = read_text(folder / JOB), about.get("job_overrides", [])
        job = load_job(text, JOB, overrides)
    if topology is not None and job is not None:
        topology = placed(job, topology)
    return Described(topology, job, None)
