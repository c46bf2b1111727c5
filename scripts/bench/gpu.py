"""Train a GPT at two sites that share this machine's accelerator, by regime and codec.

The link is free: both sites are here, and nothing is emulated. So a step is longer than without
exchange by what the exchange itself costs, and by how little of it is hidden. Medians are over the
last steps of each run. On a machine without an accelerator, --small shows that it works.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from isthmus.protos.own_processes import own_command

CONFIGURATIONS = {
    "no exchange": ["exchange.schedule=off"],
    "sync, fp32": ["exchange.codec=fp32"],
    "sync, int8": ["exchange.codec=int8"],
    "delayed, fp32": ["exchange.codec=fp32", "regime=delayed"],
    "delayed, int8": ["exchange.codec=int8", "regime=delayed"],
    "diloco, H = 5": ["exchange.codec=fp32", "regime={kind: diloco, sync_every: 5}"],
}
LARGE = {"layers": 24, "heads": 16, "width": 1024, "context": 1024}
SMALL = {"layers": 2, "heads": 2, "width": 64, "context": 64}
MICRO_BATCH, MICRO_BATCHES = 8, 16
TOPOLOGY = """
version: 1
name: one-machine
sites:
  - {name: east, nodes: 1, accelerators_per_node: 1, accelerator: ACCELERATOR}
  - {name: west, like: east}
links: [{between: [east, west], bandwidth: 100Gbit/s, rtt: 0.1ms}]
failure: {start_within: 120s, detect_within: 20s}
security: {mode: insecure}
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what may be asked for."""
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--small", action="store_true", help="a tiny model, on CPUs")
    parser.add_argument("--accelerator", default="h200", help="as topologies name it")
    parser.add_argument("--only", default="", help="configurations whose names have this in them")


def run(options: argparse.Namespace) -> int:
    """Print a row for each configuration; return 1 if a run has failed."""
    status = 0
    print(f"{'':16}{'step':>9}{'compute':>9}{'inside':>9}{'exposed':>9}{'waiting':>9}{'hidden':>9}")
    for name, settings in CONFIGURATIONS.items():
        if options.only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            steps = _steps(Path(folder), settings, options)
        if not steps:
            status = 1
            continue
        keys = ("step_s", "compute_s", "intra_s", "exposed_inter_s", "wait_s", "hidden_inter_s")
        late = [each for each in steps if each["step"] > options.steps // 2]
        means = [statistics.fmean(each["values"][key] for each in late) for key in keys]
        if "diloco" not in name:  # there, one step in several exchanges
            means = [statistics.median(each["values"][key] for each in late) for key in keys]
        print(f"{name:16}" + "".join(f"{each:8.3f}s" for each in means), flush=True)
    return status


def _steps(folder: Path, settings: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run a job; return its steps' records, of both sites."""
    accelerator = "cpu" if options.small else options.accelerator
    (folder / "topology.yaml").write_text(TOPOLOGY.replace("ACCELERATOR", accelerator))
    batch = 2 * MICRO_BATCH * (2 if options.small else MICRO_BATCHES)
    trainer = {
        "steps": options.steps,
        "global_batch": batch,
        "micro_batch": MICRO_BATCH,
        "precision": "fp32" if options.small else "bf16",
        "evaluation_batches": 1,
        "model": SMALL if options.small else LARGE,
    }
    job = {"version": 1, "name": "gpu", "topology": "topology.yaml", "trainer": trainer}
    (folder / "job.yaml").write_text(json.dumps(job))
    home = folder / "home"
    arguments = ["launch", str(folder / "job.yaml"), "--home", str(home)]
    for each in settings:
        arguments += ["--set", each]
    began_s = time.monotonic()
    done = subprocess.run(
        own_command("isthmus.orchestrator.cli.main", *arguments),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if done.returncode != 0:
        print(f"{done.stdout[-1500:]}\n{done.stderr[-1500:]}", flush=True)
        for log in sorted(home.glob("runs/*/sites/*/rank*.log")):
            print(log, log.read_text()[-1500:], flush=True)
        return []
    print(f"# {time.monotonic() - began_s:.0f} s in all", flush=True)
    (metrics,) = home.glob("runs/*/metrics.jsonl")
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [each for each in records if each["kind"] == "step"]
