"""Measure how long the dashboard takes to answer about a large run with a long history.

A run of many sites is recorded, with as many metrics as are kept of a month (16 times 64 MiB)
and the events of its journal. A dashboard of its own process then answers: while it reads them
for the first time, and once it has. With more than 200 ms then, the exit status is 1.
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
        num_lines = _record(home, options.sites, options.events, options.mib << 20)
        print(f"{options.sites} sites, {num_lines} lines of metrics, {options.events} events")
        command = own_command(
            "isthmus.orchestrator.cli.main", "dashboard", "--home", folder, "--port", "0"
        )
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            return _measure(process.stdout.readline().strip().rstrip("/"), options.repeat)
        finally:
            process.terminate()
            process.wait()


def _measure(url: str, repeat: int) -> int:
    began_s, while_read_s = time.monotonic(), []
    while True:
        spent_s, body = _ask(f"{url}/api/runs/{RUN}")
        while_read_s.append(spent_s)
        if json.loads(body)["metrics"]["is_complete"]:
            break
        time.sleep(0.2)
    print(f"first reading {time.monotonic() - began_s:6.1f} s, and meanwhile an answer:")
    print(_row(f"/api/runs/{RUN}", while_read_s))
    print("then:")
    worst_s = 0.0
    for address in ADDRESSES:
        times_s = [_ask(url + address)[0] for _ in range(repeat)]
        worst_s = max(worst_s, statistics.median(times_s))
        print(_row(address, times_s), flush=True)
    return int(worst_s > BUDGET_S)


def _row(name: str, times_s: list[float]) -> str:
    median_ms, most_ms = statistics.median(times_s) * 1e3, max(times_s) * 1e3
    return f"{name:<24} median {median_ms:6.1f} ms, most {most_ms:6.1f} ms"


def _ask(url: str) -> tuple[float, bytes]:
    began_s = time.monotonic()
    with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310 - our own
        body = answer.read()
    return time.monotonic() - began_s, body


def _record(home: Path, num_sites: int, num_events: int, num_bytes: int) -> int:
    """Record the run; return how many lines of metrics it has."""
    sites = [f"site-{index:04}" for index in range(num_sites)]
    pairs = [(sites[index - 1], sites[index]) for index in range(num_sites)]
    pairs += [(target, source) for source, target in pairs]
    folder, _ = claim_run_folder(home, RUN, job_yaml())
    (folder.path / TOPOLOGY).write_text(topology_yaml(), encoding="utf-8")
    _journal(folder, sites, pairs, num_events)
    writer = PartWriter(folder.path / METRICS, METRICS_LIMITS)
    num_lines = written = step = 0
    while written < num_bytes:
        step += 1
        lines = list(_lines(step, sites, pairs if step % 10 == 0 else []))
        writer.append(lines)
        num_lines += len(lines)
        written += sum(map(len, lines))
    return num_lines


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
