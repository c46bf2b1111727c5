"""Measure how long the dashboard takes to answer about a large run with a long history.

A run of many sites is recorded, with as many metrics as are kept of a month (16 times 64 MiB)
and the events of its journal. A dashboard of its own process then answers: while it reads them
for the first time, once it has, and while the run goes on with a step each second. Where the median
of an address is more than 200 ms in any of these, the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

from isthmus.orchestrator.coordinator.journal import Journal
from isthmus.orchestrator.run_folder.home import TOPOLOGY, RunFolder, claim_run_folder
from isthmus.orchestrator.run_folder.rotated_lines import PartWriter
from isthmus.orchestrator.run_folder.run_files import METRICS, METRICS_LIMITS
from isthmus.protos.own_processes import own_command
from isthmus.topology.presets.templates import job_yaml, topology_yaml

BUDGET_S = 0.2
RUN = "month"
BEGAN_S = 1_790_000_000.0
STEP_S = 1200.0
"""So that what is kept of a thousand sites lasts a month."""
ADDRESSES = ("/api/runs", "/api/runs/month", "/api/runs/month/steps", "/live/month", "/runs/month")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what may be asked for."""
    parser.add_argument("--sites", type=int, default=1000)
    parser.add_argument("--events", type=int, default=10_000)
    kept = METRICS_LIMITS.num_parts * METRICS_LIMITS.part_bytes
    parser.add_argument("--mib", type=int, default=kept >> 20, help="of metrics")
    parser.add_argument("--repeat", type=int, default=10)


def run(options: argparse.Namespace) -> int:
    """Print how long each answer takes; return 1 if one is over its budget."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        history = _History(home, options.sites)
        history.record_events(options.events)
        num_lines = history.record_metrics(options.mib << 20)
        print(f"{options.sites} sites, {num_lines} lines of metrics, {options.events} events")
        command = own_command(
            "isthmus.orchestrator.cli.main", "dashboard", "--home", folder, "--port", "0"
        )
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip().rstrip("/")
            return _measure(url, options.repeat, history)
        finally:
            process.terminate()
            process.wait()


def _measure(url: str, repeat: int, history: _History) -> int:
    began_s, while_read, is_complete = time.monotonic(), _Times(), False
    while not is_complete:
        for address in ADDRESSES:
            body = while_read.ask(url, address)
            if address == f"/api/runs/{RUN}":
                is_complete = json.loads(body)["metrics"]["is_complete"]
        time.sleep(0.0 if is_complete else 1.0)
    print(f"first reading {time.monotonic() - began_s:6.1f} s, and meanwhile an answer:")
    while_read.show()
    print("then:")
    then = _Times()
    for _ in range(repeat):
        for address in ADDRESSES:
            then.ask(url, address)
    then.show()
    print("while the run goes on:")
    going_on = _Times()
    for _ in range(repeat):
        history.append_step()
        time.sleep(1.0)
        for address in ADDRESSES:
            going_on.ask(url, address)
    going_on.show()
    return int(max(while_read.worst_s, then.worst_s, going_on.worst_s) > BUDGET_S)


class _Times:
    """How long answers took, by address."""

    def __init__(self) -> None:
        self._times_s: dict[str, list[float]] = {}

    def ask(self, url: str, address: str) -> bytes:
        """Ask, and return the answer."""
        spent_s, body = _ask(url + address)
        self._times_s.setdefault(address, []).append(spent_s)
        return body

    def show(self) -> None:
        """Print a row for each address."""
        for address, times_s in self._times_s.items():
            print(_row(address, times_s), flush=True)

    @property
    def worst_s(self) -> float:
        """The most of the medians."""
        return max(statistics.median(times_s) for times_s in self._times_s.values())


def _row(name: str, times_s: list[float]) -> str:
    median_ms, most_ms = statistics.median(times_s) * 1e3, max(times_s) * 1e3
    return f"{name:<24} median {median_ms:6.1f} ms, most {most_ms:6.1f} ms"


def _ask(url: str) -> tuple[float, bytes]:
    began_s = time.monotonic()
    with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310 - our own
        body = answer.read()
    return time.monotonic() - began_s, body


class _History:
    """A run's folder that is written as its coordinator does."""

    def __init__(self, home: Path, num_sites: int) -> None:
        self._sites = [f"site-{index:04}" for index in range(num_sites)]
        pairs = [(self._sites[index - 1], self._sites[index]) for index in range(num_sites)]
        self._pairs = [*pairs, *((target, source) for source, target in pairs)]
        self._folder, _ = claim_run_folder(home, RUN, job_yaml())
        (self._folder.path / TOPOLOGY).write_text(topology_yaml(), encoding="utf-8")
        self._writer = PartWriter(self._folder.path / METRICS, METRICS_LIMITS)
        self._step = 0

    def record_events(self, num_events: int) -> None:
        """Write the journal."""
        _journal(self._folder, self._sites, self._pairs, num_events)

    def record_metrics(self, num_bytes: int) -> int:
        """Write so many; return how many lines they are."""
        num_lines = written = 0
        while written < num_bytes:
            lines = self.append_step()
            num_lines += len(lines)
            written += sum(map(len, lines))
        return num_lines

    def append_step(self) -> list[str]:
        """Append a step of all sites, with each tenth what links have carried."""
        self._step += 1
        pairs = self._pairs if self._step % 10 == 0 else []
        lines = list(_lines(self._step, self._sites, pairs))
        self._writer.append(lines)
        return lines


def _journal(
    folder: RunFolder, sites: list[str], pairs: list[tuple[str, str]], num_events: int
) -> None:
    journal = Journal(folder.path)
    journal.raise_generation()
    links = [
        {"source": source, "target": target, "bytes_per_s": 1.25e9, "rtt_s": 0.05}
        for source, target in pairs
    ]
    submitted = {"name": RUN, "folder": str(folder.path), "sites": sites, "links": links}
    details: list[tuple[str, str, Mapping[str, object]]] = [("run.submitted", "", submitted)]
    details += [("site.joined", site, {"host": "here"}) for site in sites]
    details += [("site.running", site, {}) for site in sites]
    details.append(("run.active", "", {}))
    for index in range(num_events - len(details)):
        site = sites[index // 2 % len(sites)]
        if index % 2:
            details.append(("site.returned", site, {"note": f"{site} takes part again"}))
        else:
            details.append(("site.lost", site, {"message": "silent", "note": f"{site} was lost"}))
    connection = journal._connection
    connection.execute("PRAGMA synchronous = OFF")
    for at, (kind, site, detail) in enumerate(details):
        journal.append(
            kind, wall_s=BEGAN_S + at, generation=1, run_id=RUN, site=site, detail=detail
        )
    journal.close()


def _lines(step: int, sites: list[str], pairs: list[tuple[str, str]]) -> Iterator[str]:
    wall_s = BEGAN_S + 10_000 + step * STEP_S
    values = {
        "loss": 2.0 + 8.0 / step,
        "tokens": 4e6,
        "site_tokens": 4e3,
        "step_s": 9.5 + 0.1 * (step % 7),
        "compute_s": 7.0,
        "intra_s": 0.5,
        "exposed_inter_s": 1.5 + 0.1 * (step % 7),
        "wait_s": 0.5,
        "hidden_inter_s": 3.0,
        "encode_s": 0.2,
        "decode_s": 0.3,
        "raw_bytes": 4e9,
        "wire_bytes": 1e9,
    }
    common = {"run": RUN, "generation": 1, "rank": 0, "step": step, "wall_s": wall_s}
    one = json.dumps({**common, "kind": "step", "site": "SITE", "values": values, "labels": {}})
    for site in sites:
        yield one.replace("SITE", site) + "\n"
    sent = {"sent_bytes": step * 1e9, "busy_s": step * 2.0, "raw_bytes": step * 4e9, "rtt_s": 0.05}
    for source, target in pairs:
        labels = {"source": source, "target": target, "gateway": "0"}
        record = {**common, "kind": "link", "site": source, "values": sent, "labels": labels}
        yield json.dumps(record) + "\n"
