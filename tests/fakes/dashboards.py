"""A dashboard that serves in this process, and a run that is recorded while it looks."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from isthmus.orchestrator.coordinator.journal import Journal
from isthmus.orchestrator.core.epoch_record import detail_of
from isthmus.orchestrator.run_folder.home import TOPOLOGY, RunFolder, claim_run_folder
from isthmus.orchestrator.run_folder.run_files import RunFiles
from isthmus.topology.presets.templates import job_yaml, topology_yaml
from isthmus.topology.spec.epoch import Epoch
from tests.fakes.recorded_runs import BEGAN_S, SITES, metric
from tests.fakes.run_worlds import GATHER

WITHIN_S = 20.0


@dataclass(frozen=True)
class Answer:
    """What a request came to."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:  # noqa: ANN401 - any JSON value
        return json.loads(self.body)


@dataclass(frozen=True)
class Served:
    """A dashboard that answers."""

    port: int
    token: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, *, method: str = "GET", **headers: str) -> Answer:
        """Ask; a header is written as in Python, `if_none_match`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WITHIN_S)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, headers=named)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, found, answer.read())
        finally:
            connection.close()


def session_of(served: Served, address: str) -> tuple[str, str]:
    """Open an address with a token, as a browser does; return where it leads, and the cookie."""
    answer = served.get(address)
    found = re.search(r"0;url=(/[^\"]+)", answer.text)
    assert found is not None, answer
    return found[1], answer.headers["set-cookie"].partition(";")[0]


@contextmanager
def serving(
    home: Path,
    *,
    port: int = 0,
    token: str = "",
    host: str = "127.0.0.1",
    names: tuple[str, ...] = (),
    state: Path | None = None,
    allows_actions: bool = False,
) -> Iterator[Served]:
    """Serve on loopback; `host` is what the server takes for its address."""
    pytest.importorskip("starlette", reason="wants pip install 'isthmus[dashboard]'")
    pytest.importorskip("uvicorn", reason="wants pip install 'isthmus[dashboard]'")
    from isthmus.orchestrator.dashboard.access import Access
    from isthmus.orchestrator.dashboard.server import listen, serve

    listener = listen("127.0.0.1", port)
    port = listener.getsockname()[1]
    loop = asyncio.new_event_loop()
    serve_it = serve(listener, Access(host, port, token, names, allows_actions), home, state)
    task = loop.create_task(serve_it)

    def run() -> None:
        loop.run_until_complete(asyncio.gather(task, return_exceptions=True))

    thread = threading.Thread(target=run, name="dashboard")
    thread.start()
    try:
        yield Served(port, token)
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(WITHIN_S)
        loop.close()
        listener.close()


@dataclass
class GrowingRun:
    """A run that goes on: its coordinator's journal and metrics, written by a test."""

    folder: RunFolder
    sites: tuple[str, ...]
    journal: Journal
    files: RunFiles
    began_s: float = BEGAN_S
    """Wall time of its events before the first step."""
    step: int = 0
    members: list[str] = field(default_factory=list)
    epoch: int = 0

    def event(self, kind: str, site: str = "", **detail: object) -> None:
        """Append an event at the time of the last step."""
        self.journal.append(
            kind,
            wall_s=self.began_s + self.step,
            generation=1,
            run_id=self.folder.run_id,
            site=site,
            detail=detail,
        )

    def lose(self, site: str, message: str = "its agent was silent for 15 s") -> None:
        """Have the others go on without a site, as a coordinator writes it."""
        self._begin_epoch([each for each in self.members if each != site], {site: message})
        note = f"the run continues without site {site}: {message}"
        self.event("site.lost", site, message=message, note=note, is_out=True, state="LOST")

    def start_again(self, site: str) -> None:
        """Have a lost site start, without any rank as yet."""
        self.event("site.returning", site, note=f"site {site} is started again")

    def let_in(self, site: str) -> None:
        """Have a site that was started again take part."""
        self.event("site.running", site)
        self._begin_epoch([*self.members, site])
        self.event("site.returned", site, note=f"site {site} takes part again")

    def _begin_epoch(self, members: list[str], lost: Mapping[str, str] | None = None) -> None:
        self.epoch, self.members = self.epoch + 1, members
        epoch = Epoch(self.epoch, tuple(members), GATHER, self.step)
        self.event("epoch.begun", "", **detail_of(epoch, "of this test", lost=lost))

    def take_steps(self, num_steps: int, sites: tuple[str, ...] = ()) -> None:
        """Append steps of one second each, and the links' totals after each."""
        taking_part = sites or tuple(self.members)
        for _ in range(num_steps):
            self.step += 1
            self.files.append_metrics(list(self._records(taking_part)))
        totals = {"step": float(self.step), "loss": 3.0 + 1.0 / self.step, "step_s": 1.0}
        self.journal.save_progress(
            self.folder.run_id, {"totals": totals, "active_s": float(self.step)}
        )

    def _records(self, sites: tuple[str, ...]) -> Iterator[dict[str, Any]]:
        wall_s = self.began_s + self.step
        values = {
            "loss": 3.0 + 1.0 / self.step,
            "site_tokens": 1000.0,
            "step_s": 1.0,
            "compute_s": 0.7,
            "intra_s": 0.1,
            "exposed_inter_s": 0.15,
            "wait_s": 0.05,
            "hidden_inter_s": 0.3,
        }
        for site in sites:
            yield metric(site, "step", self.step, wall_s, values)
        for source in sites:
            for target in sites:
                if source != target:
                    sent = {"sent_bytes": self.step * 12.5e6, "busy_s": self.step * 0.8}
                    sent |= {"throughput_bytes_per_s": 15.625e6, "rtt_s": 0.06}
                    ends = {"source": source, "target": target, "gateway": "0"}
                    yield metric(source, "link", self.step, wall_s, sent, **ends)


@contextmanager
def growing_run(
    home: Path,
    run_id: str = "g1",
    *,
    name: str = "grows",
    sites: tuple[str, ...] = SITES,
    began_s: float = BEGAN_S,
) -> Iterator[GrowingRun]:
    """Record a run that has become active; until the end somebody holds its state folder."""
    folder, _ = claim_run_folder(home, run_id, job_yaml())
    (folder.path / TOPOLOGY).write_text(topology_yaml(), encoding="utf-8")
    journal = Journal(folder.path)
    try:
        journal.raise_generation()
        run = GrowingRun(folder, sites, journal, RunFiles(folder.path), began_s)
        run.members = list(sites)
        links = [
            {"source": source, "target": target, "bytes_per_s": 25e6, "rtt_s": 0.06}
            for source in sites
            for target in sites
            if source != target
        ]
        run.event("run.submitted", name=name, folder=str(folder.path), sites=sites, links=links)
        for site in sites:
            run.event("site.joined", site, host="here")
            run.event("site.running", site)
        run.event("run.active")
        yield run
    finally:
        journal.close()
