"""Real runs on this machine.

Small topologies and jobs, the command line, and what is left afterwards.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fakes.certified import certify
from tests.fakes.folds import check_ended_runs
from tests.fakes.marked_processes import MarkedProcesses
from tests.fakes.waiting import PROCESSES_S, wait_for

RUN_S = 150.0
"""A small run ends long before this, even on a busy machine."""
SITES = "abcdefgh"
"""The sites' names."""
INSECURE, MTLS = "insecure", "mtls"
UNDER_BOTH_SECURITIES = pytest.mark.parametrize(
    "run", [INSECURE, pytest.param(MTLS, marks=pytest.mark.exhaustive)], indirect=True
)
"""For tests that start whole runs: once on loopback with a secret, once with certificates."""


def topology_yaml(
    sites: Sequence[tuple[int, int]],
    *,
    emulate: bool = True,
    emulator: str = "relay",
    addresses: Sequence[str] | None = None,
    detect_within: str = "15s",
    min_sites: int | None = None,
    max_restarts: int = 3,
    start_within: str = "100s",
    rtt: str = "10ms",
    bandwidth: str = "400Mbit/s",
    gateways: int | str = 1,
) -> str:
    """Return a full mesh of sites, each (nodes, ranks a node), named a, b, c, ...

    `gateways` a node.
    """
    names = SITES[: len(sites)]
    lines = [
        "version: 1",
        "name: test",
        "accelerators:",
        "  core: {peak: {fp32: 50GFLOP/s}, memory: 2GiB, mfu: 0.3}",
        "sites:",
    ]
    for index, (nodes, ranks) in enumerate(sites):
        address = f", address: {addresses[index]}" if addresses else ""
        lines.append(
            f"  - {{name: {names[index]}, nodes: {nodes}, accelerators_per_node: {ranks}, "
            f"accelerator: core, wan: {{gateways_per_node: {gateways}{address}}}}}"
        )
    lines.append("links:")
    lines += [
        f"  - {{between: [{one}, {other}], bandwidth: {bandwidth}, rtt: {rtt}}}"
        for place, one in enumerate(names)
        for other in names[place + 1 :]
    ]
    lines += [
        "failure: {"
        f"detect_within: {detect_within}, ride_out: {detect_within}, "
        f"min_sites: {len(sites) if min_sites is None else min_sites}, "
        f"max_restarts: {max_restarts}, start_within: {start_within}}}",
        "security: {mode: insecure}",
        f"emulate: {'true' if emulate else 'false'}",
        f"emulator: {emulator}",
    ]
    return "\n".join(lines) + "\n"


def job_yaml(
    *,
    steps: int = 4,
    codec: str = "fp32",
    tree: str = "auto",
    global_batch: int = 12,
    learning_rate: str = "1.0e-3",
    entrypoint: str | None = None,
    width: int = 32,
    chunk: str = "64KiB",
) -> str:
    """Return a job small enough for a test: thousands of parameters, a few steps."""
    return (
        "\n".join(
            [
                "version: 1",
                "name: test",
                "topology: topology.yaml",
                *([f"entrypoint: {entrypoint}"] if entrypoint else []),
                f"exchange: {{codec: {codec}, chunk: {chunk}, channels_per_link: 2, "
                "bucket: 256KiB}",
                f"reduction: {{tree: {tree}}}",
                "verify: {parameters_every: 1}",
                "trainer:",
                f"  steps: {steps}",
                f"  global_batch: {global_batch}",
                "  micro_batch: 4",
                f"  evaluate_every: {steps}",
                "  evaluation_batches: 1",
                f"  model: {{layers: 2, heads: 2, width: {width}, context: 32}}",
                "  data: {max_bytes: 1MiB}",
                f"  optimizer: {{learning_rate: {learning_rate}, min_learning_rate: 1.0e-4, "
                "warmup_steps: 10}",
            ]
        )
        + "\n"
    )


@dataclass
class Bench:
    """A folder for one run, the processes started for it, and a mark in their environment."""

    folder: Path
    security: str = INSECURE
    """The mode of all topologies that are written here."""
    processes: MarkedProcesses = field(default_factory=MarkedProcesses)
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def home(self) -> Path:
        """The --home of every command."""
        return self.folder / "home"

    def write(self, topology: str, job: str) -> Path:
        """Write both documents, and what certificates the topology takes; return the job's path."""
        self.write_topology("topology.yaml", topology)
        path = self.folder / "job.yaml"
        path.write_text(job)
        return path

    def write_topology(self, name: str, text: str) -> Path:
        """Write a topology with the bench's security, and the certificates for it; return where."""
        path = self.folder / name
        path.write_text(text.replace(f"mode: {INSECURE}", f"mode: {self.security}"))
        certs = self.folder / "certs"
        if self.security == MTLS and not certs.exists():
            certify(certs, *SITES)
        return path

    def start(
        self,
        *arguments: str,
        python: str = sys.executable,
        module: str = "isthmus.orchestrator.cli.main",
    ) -> subprocess.Popen[str]:
        """Start `isthmus ARGUMENTS`, or another module, with that interpreter."""
        # The mark goes to every descendant, so that what is left can be found by it.
        env = {**self.processes.env, "ISTHMUS_HOME": str(self.home), "NO_COLOR": "1"}
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "isthmus.sites.leash", str(os.getpid()), "--"),
                *(python, "-m", module, *arguments),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            env=env,
        )
        self.started.append(process)
        return process

    def isthmus(
        self, *arguments: str, timeout_s: float = RUN_S, python: str = sys.executable
    ) -> Result:
        """Run `isthmus ARGUMENTS` to its end."""
        process = self.start(*arguments, python=python)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"isthmus {arguments} did not end\n{self.logs()}") from error
        return Result(process.returncode, out, err, self)

    def launch(self, topology: str, job: str, *arguments: str) -> Result:
        """Launch a job with --json and wait for its end."""
        path = self.write(topology, job)
        return self.isthmus("launch", str(path), "--json", *arguments)

    def run_folder(self, run_id: str = "") -> Path:
        """Return a run's folder; without a name, the only one's."""
        if run_id:
            return self.home / "runs" / run_id
        (folder,) = (self.home / "runs").iterdir()
        return folder

    def metrics(self, run_id: str = "") -> list[dict[str, Any]]:
        """Return every metric that the run wrote."""
        return metrics_of(self.run_folder(run_id))

    def losses(self, run_id: str = "") -> list[float]:
        """Return the global batch's mean loss, by step."""
        return losses_of(self.run_folder(run_id))

    def pids(self, *words: str) -> list[int]:
        """Return the run's processes whose command line holds all `words`, lowest pid first."""
        return self.processes.pids(*words)

    def children(self, pid: int, *words: str) -> list[int]:
        """Return the descendants of `pid` whose command line holds all `words`."""
        below = {child.pid for child in psutil.Process(pid).children(recursive=True)}
        return [found for found in self.pids(*words) if found in below]

    def logs(self) -> str:
        """Return the end of every log of the run, for a failed test's message."""
        parts = []
        for path in sorted(self.folder.rglob("*.log")):
            text = path.read_text(errors="replace")
            parts.append(f"--- {path.relative_to(self.folder)}\n{text[-2000:]}")
        return "\n".join(parts)

    def wait_for(self, what: str, ready: Callable[[], bool], timeout_s: float = RUN_S) -> None:
        """Poll until `ready`; fail with the logs at the deadline."""
        wait_for(ready, lambda: f"{what}\n{self.logs()}", timeout_s, PROCESSES_S)

    def wait_for_nothing_left(self, timeout_s: float) -> None:
        """Wait until no marked process lives."""
        self.wait_for("end of all processes", lambda: not self.processes.living(), timeout_s)

    def close(self) -> None:
        """Kill whatever is left; the test has its verdict by now."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
        self.processes.kill()
        for process in self.started:
            process.communicate()


@dataclass
class Result:
    """What a command left behind."""

    code: int
    out: str
    err: str
    bench: Bench

    @property
    def envelope(self) -> dict[str, Any]:
        """The one JSON object on stdout."""
        try:
            value: dict[str, Any] = json.loads(self.out)
        except ValueError as error:
            raise AssertionError(f"not an envelope: {self.out!r}\n{self.err}") from error
        return value

    def check(self, code: int = 0) -> Result:
        """Assert the exit status, with everything that helps when it is another."""
        assert self.code == code, (
            f"exit {self.code}, want {code}\n{self.out}\n{self.err}\n{self.bench.logs()}"
        )
        return self


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Return every metric of a run's folder."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses_of(folder: Path) -> list[float]:
    """Return the global batch's mean loss, by step, from a run's folder."""
    sums: dict[int, list[float]] = {}
    for metric in metrics_of(folder):
        if metric["kind"] == "step" and "loss" in metric["values"]:
            values = metric["values"]
            entry = sums.setdefault(metric["step"], [0.0, 0.0])
            entry[0] += values["loss"] * values["site_tokens"]
            entry[1] += values["site_tokens"]
    return [total / tokens for _, (total, tokens) in sorted(sums.items())]


@contextmanager
def bench(folder: Path, security: str = INSECURE) -> Iterator[Bench]:
    """Give a bench, and leave no process behind whatever happens.

    What was said of each run's end has to be what the journal says.
    """
    made = Bench(folder, security)
    try:
        yield made
    finally:
        made.close()
    check_ended_runs(made.home)


def kill(pid: int) -> None:
    """SIGKILL a process that must exist."""
    os.kill(pid, signal.SIGKILL)
