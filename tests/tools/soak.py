"""Train through a fault a minute, and tell how much of the time was training.

Usage: python -m tests.tools.soak [--minutes N] [--every S] [--seed N] [--kinds KIND,..]

A coordinator and the agents of three sites run on this machine as separate commands, in a network
namespace of their own (root), each site on an address of its own. Beside them, as a service manager
would, this script starts again whatever of these four has ended. Every so often something fails:
drawn from the seed, each kind as often as any other.

Printed: what each fault cost; goodput, which is steps times their median over the wall time; and
descriptors, threads and memory of coordinator, agents and gateways in the first and the last fifth.
Ctrl-C ends it earlier. It ends with 1 where the run has ended, goodput is below 85 %, or something
has grown.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from isthmus.protos.own_processes import leashed, own_command
from tests.fakes.waiting import wait_for

SITES = {"a": "127.0.0.2", "b": "127.0.0.3", "c": "127.0.0.4"}
COORDINATOR = "127.0.0.5"
DETECT_S = 5.0
RUN = "soak"
KINDS = (
    *("gateway", "rank", "torchrun", "agent", "site", "coordinator"),  # SIGKILL
    *("reset-data", "reset-control"),  # all connections of one process, with a reset
    *("outage", "blackhole"),  # between all, for less than ride_out; to and from one site, for long
    *(
        "stopped-rank",
        "paused-site",
        "frozen-site",
    ),  # SIGSTOP; a pause is shorter than detect_within
)
CUTS = ("outage", "blackhole")
MODULES = {
    "gateway": "isthmus.sites.gateway",
    "rank": "isthmus.sites.launcher.rank",
    "torchrun": "isthmus.sites.launcher.node",
}
SAMPLE_S = 5.0
LOOK_S = 0.2
FIRST_RECORDS = 30
BEGIN_S = 300.0
"""The first steps have so long to come."""
WANTED_GOODPUT = 0.85
FLAT = 1.25
"""Figures of the last fifth are at most so many times those of the first, or `SLACK` more."""
SLACK = {"descriptors": 8, "threads": 8, "memory, MiB": 24}

TOPOLOGY = f"""version: 1
name: soak
accelerators:
  core: {{peak: {{fp32: 50GFLOP/s}}, memory: 2GiB, mfu: 0.3}}
sites:
  - {{name: a, nodes: 1, accelerators_per_node: 1, accelerator: core, wan: {{address: 127.0.0.2}}}}
  - {{name: b, nodes: 1, accelerators_per_node: 1, accelerator: core, wan: {{address: 127.0.0.3}}}}
  - {{name: c, nodes: 1, accelerators_per_node: 2, accelerator: core, wan: {{address: 127.0.0.4}}}}
links:
  - {{between: [a, b], bandwidth: 400Mbit/s, rtt: 2ms}}
  - {{between: [b, c], bandwidth: 400Mbit/s, rtt: 2ms}}
  - {{between: [a, c], bandwidth: 400Mbit/s, rtt: 2ms}}
failure: {{detect_within: {DETECT_S:g}s, ride_out: 60s, min_sites: 1, max_restarts: 1000,
  allow_losses: true}}
security: {{mode: insecure}}
"""
JOB = """version: 1
name: soak
topology: topology.yaml
exchange: {codec: int8, chunk: 64KiB, bucket: 256KiB}
verify: {parameters_every: 1}
checkpoint: {every: 200 steps, keep: 2}
trainer:
  steps: 1000000
  global_batch: 12
  micro_batch: 4
  evaluate_every: 1000000
  evaluation_batches: 1
  model: {layers: 2, heads: 2, width: 64, context: 64}
  data: {max_bytes: 1MiB}
"""


@dataclasses.dataclass(frozen=True)
class Fault:
    """What failed, and when by the wall clock."""

    kind: str
    site: str
    """Empty: none, or all."""
    at_s: float
    until_s: float
    """When it was undone; for what is not, `at_s`."""


def below(agent: psutil.Process, word: str) -> list[psutil.Process]:
    """Return an agent's descendants whose command lines hold a word, the oldest first."""
    found = []
    for process in agent.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            command = " ".join(process.cmdline())
            if word in command and "isthmus.sites.leash" not in command:
                found.append((process.create_time(), process))
    return [process for _, process in sorted(found, key=lambda pair: pair[0])]


def send(signum: int, processes: Iterable[psutil.Process]) -> None:
    """Send a signal to what may have ended."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signum)


class Deployment:
    """The four commands, started again whenever they end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "coordinator"
        self.down_until_s: dict[str, float] = {}
        """What is not to be started again before some time."""
        self._commands: dict[str, tuple[str, ...]] = {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._logs = folder / "commands.log"

    def start(self) -> None:
        """Start the coordinator, the agents and the run."""
        (self.folder / "topology.yaml").write_text(TOPOLOGY)
        (self.folder / "job.yaml").write_text(JOB)
        topology = ("--topology", str(self.folder / "topology.yaml"))
        state = ("--state", str(self.state))
        bind = f"{COORDINATOR}:7443"
        self._commands["coordinator"] = ("coordinator", *topology, *state, "--bind", bind)
        for site in SITES:
            state = ("--state", str(self.folder / site))
            dial = ("--site", site, "--coordinator", bind)
            self._commands[site] = ("agent", *dial, *topology, *state)
        self.keep_up()
        announced = self.state / "coordinator.json"
        wait_for(announced.exists, "the coordinator to come up", look_s=LOOK_S)
        self.isthmus("launch", str(self.folder / "job.yaml"), "--run-id", RUN, "--detach")

    def keep_up(self) -> None:
        """Start what has ended, a second or so after it did."""
        for name, command in self._commands.items():
            process = self._running.get(name)
            if process is not None and process.poll() is None:
                continue
            if process is not None:
                until_s = self.down_until_s.setdefault(name, time.monotonic() + 1.0)
                if time.monotonic() < until_s:
                    continue
            self.down_until_s.pop(name, None)
            with self._logs.open("ab") as log:
                self._running[name] = subprocess.Popen(
                    leashed(own_command("isthmus.orchestrator.cli.main", *command)),
                    stdout=log,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                )

    def isthmus(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command about the run."""
        done = subprocess.run(
            [
                *own_command("isthmus.orchestrator.cli.main", *arguments),
                *("--coordinator", f"{COORDINATOR}:7443"),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode not in (0, 6):
            print(f"isthmus {' '.join(arguments)}: {done.stdout}{done.stderr}", flush=True)
        return done

    def process(self, name: str) -> psutil.Process | None:
        """Return a site's agent, or the coordinator, if it runs."""
        process = self._running[name]
        return psutil.Process(process.pid) if process.poll() is None else None

    def stop(self) -> None:
        """End everything."""
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()

    def records(self) -> list[dict[str, Any]]:
        """Return every step record of the run, oldest first."""
        found = []
        paths = (self.state / "runs" / RUN).glob("metrics.jsonl*")
        for path in sorted(
            paths, key=lambda path: int(path.suffix[1:]) if path.suffix[1:].isdigit() else 0
        ):
            lines = path.read_text().splitlines()
            found += [json.loads(line) for line in lines if '"kind": "step"' in line]
        return found


def strike(deployment: Deployment, kind: str, site: str, rng: random.Random) -> float:
    """Let something fail; return for how many seconds it lasts."""
    agent = deployment.process(site)
    if kind == "coordinator":
        deployment.down_until_s["coordinator"] = time.monotonic() + rng.uniform(1.0, 20.0)
        if coordinator := deployment.process("coordinator"):
            coordinator.kill()
        return 0.0
    if kind in CUTS:
        cut(kind, site, "add")
        return rng.uniform(2.0, 20.0) if kind == "outage" else 3 * DETECT_S
    if agent is None:
        return 0.0
    whole = [agent, *agent.children(recursive=True)]
    if kind in MODULES:
        send(signal.SIGKILL, below(agent, MODULES[kind])[-1:])
    elif kind in ("agent", "site"):
        send(signal.SIGKILL, whole if kind == "site" else [agent])
    elif kind == "reset-data":
        for gateway in below(agent, MODULES["gateway"]):
            reset(gateway)
    elif kind == "reset-control":
        reset(agent)
    elif kind == "stopped-rank":
        send(signal.SIGSTOP, below(agent, MODULES["rank"])[-1:])
    else:
        send(signal.SIGSTOP, whole)
        return rng.uniform(0.2, 0.6) * DETECT_S if kind == "paused-site" else 3 * DETECT_S
    return 0.0


def mend(deployment: Deployment, kind: str, site: str) -> None:
    """Undo what lasts."""
    if kind in CUTS:
        cut(kind, site, "del")
    elif agent := deployment.process(site):
        send(signal.SIGCONT, [agent, *agent.children(recursive=True)])


def reset(process: psutil.Process) -> None:
    """Have the kernel abort all connections of a process."""
    found = []
    with contextlib.suppress(psutil.Error):
        found = process.net_connections(kind="tcp")
    for connection in found:
        if connection.status == psutil.CONN_ESTABLISHED:
            near, far = connection.laddr, connection.raddr
            source = ("src", near.ip.removeprefix("::ffff:"), "sport", "=", str(near.port))
            ends = [*source, "dport", "=", str(far.port)]
            subprocess.run(["ss", "-K", *ends], capture_output=True, check=False)


def cut(kind: str, site: str, change: str) -> None:
    """Let packets to and from some addresses vanish (`add`), or cross again (`del`)."""
    for address in SITES.values() if kind == "outage" else [SITES[site]]:
        for way in ("to", "from"):
            rule = ["pref", "10", way, address, "blackhole"]
            subprocess.run(["ip", "rule", change, *rule], check=True)


def usage(deployment: Deployment) -> Iterator[tuple[str, str, float]]:
    """Yield role, figure and value of every process that is to stay as it is."""
    found = {"coordinator": deployment.process("coordinator")}
    for site in SITES:
        agent = found[f"agent {site}"] = deployment.process(site)
        for gateway in below(agent, MODULES["gateway"]) if agent else []:
            found[f"gateway {site}"] = gateway
    for role, process in found.items():
        with contextlib.suppress(psutil.Error):
            if process is not None:
                yield role, "descriptors", process.num_fds()
                yield role, "threads", process.num_threads()
                yield role, "memory, MiB", process.memory_info().rss / 2**20


def main() -> int:
    """Enter a namespace, train, let things fail, and judge."""
    options = _options()
    if os.environ.get("ISTHMUS_SOAK") != "1":
        os.environ["ISTHMUS_SOAK"] = "1"
        os.execvp(
            "unshare", ["unshare", "--net", sys.executable, "-m", "tests.tools.soak", *sys.argv[1:]]
        )
    for line in ("link set lo up", "rule add pref 100 lookup local", "rule del pref 0"):
        subprocess.run(["ip", *line.split()], check=True)
    folder = Path(options.folder or tempfile.mkdtemp(prefix="soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["ISTHMUS_HOME"] = str(folder / "home")
    deployment = Deployment(folder)
    print(f"seed {options.seed}, {folder}", flush=True)
    try:
        deployment.start()
        return soak(deployment, options)
    finally:
        deployment.stop()


def soak(deployment: Deployment, options: argparse.Namespace) -> int:
    """Let things fail until the time is over; return the exit status."""
    rng = random.Random(options.seed)

    def has_begun() -> bool:
        deployment.keep_up()
        return len(deployment.records()) >= FIRST_RECORDS

    wait_for(has_begun, "the first steps", BEGIN_S, look_s=1.0)
    begun_s = time.time()
    end_s = begun_s + 60 * options.minutes
    faults: list[Fault] = []
    samples: list[tuple[float, str, str, float]] = []
    deck: list[str] = []
    next_s = begun_s + options.every / 2
    ends: list[tuple[float, str, str]] = []
    sampled_s = 0.0
    ended: list[int] = []
    signal.signal(signal.SIGINT, lambda signum, _: ended.append(signum))
    while (now_s := time.time()) < end_s and not ended:
        deployment.keep_up()
        for each in [each for each in ends if each[0] <= now_s]:
            ends.remove(each)
            mend(deployment, *each[1:])
        if now_s >= next_s and now_s < end_s - options.every / 2:
            next_s += options.every
            if not deck:
                deck = list(options.kinds)
                rng.shuffle(deck)
            kind, site = deck.pop(), rng.choice(list(SITES))
            lasts_s = strike(deployment, kind, site, rng)
            if lasts_s:
                ends.append((now_s + lasts_s, kind, site))
            where = "" if kind in ("coordinator", "outage") else site
            faults.append(Fault(kind, where, now_s, now_s + lasts_s))
            print(f"{now_s - begun_s:6.0f} s  {kind} {where}", flush=True)
        if now_s - sampled_s >= SAMPLE_S:
            sampled_s = now_s
            samples += [(now_s, *each) for each in usage(deployment)]
        time.sleep(0.2)
    end_s = now_s
    for each in ends:
        mend(deployment, *each[1:])
    num_records = len(deployment.records())
    wait_for(
        lambda: len(deployment.records()) > num_records,
        "a step after the last fault",
        look_s=LOOK_S,
    )
    records = deployment.records()
    status = json.loads(deployment.isthmus("status", RUN, "--json").stdout)["data"]
    events = json.loads(deployment.isthmus("events", RUN, "--json").stdout)["data"]
    deployment.isthmus("cancel", RUN)
    good = tell(records, events["events"], faults, begun_s, end_s)
    is_flat = tell_usage(samples, begun_s, end_s)
    print(
        f"state            {status['state']}; {status['totals']['verified_steps']} steps compared"
    )
    return 0 if good >= WANTED_GOODPUT and is_flat and status["state"] == "ACTIVE" else 1


def tell(
    records: list[dict[str, Any]],
    events: list[dict[str, Any]],
    faults: list[Fault],
    begun_s: float,
    end_s: float,
) -> float:
    """Print what each fault cost, and the goodput; return that."""
    # Times are those at which the coordinator heard of it: while there is none, nobody hears.
    told = [
        (float(each["wall_s"]), int(each["step"]), float(each["values"]["step_s"]))
        for each in records
        if "step_s" in each["values"] and begun_s <= each["wall_s"] <= end_s
    ]
    steps = {step for _, step, _ in told}
    usual_s = median(step_s for *_, step_s in told)
    print(f"{'at':>7} {'what':14} {'site':4} {'longest step, s':>16}   what became of sites")
    ends = [*(each.at_s for each in faults[1:]), end_s]
    for fault, until_s in zip(faults, ends, strict=True):
        longest_s = max((it for at, _, it in told if fault.at_s <= at < until_s), default=math.nan)
        became = [
            f"{each['site']} {each['kind'].removeprefix('site.')} {each['wall_s'] - fault.at_s:.1f}"
            for each in events
            if each["kind"] in ("site.lost", "site.returned")
            and fault.at_s <= each["wall_s"] < until_s
        ]
        at = f"{fault.at_s - begun_s:7.0f} {fault.kind:14} {fault.site:4}"
        print(f"{at} {longest_s:16.2f}   {', '.join(became)}")
    wall_s = end_s - begun_s
    good = len(steps) * usual_s / wall_s
    missing = max(steps) - min(steps) + 1 - len(steps)
    print(f"steps            {len(steps)} in {wall_s:.0f} s, {missing} missing")
    print(f"a step           {1e3 * usual_s:.1f} ms, the median")
    print(f"goodput          {good:.1%}")
    return good


def tell_usage(samples: list[tuple[float, str, str, float]], begun_s: float, end_s: float) -> bool:
    """Print what processes had in the first and the last fifth; return whether nothing grew."""
    fifth_s = (end_s - begun_s) / 5
    early: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    late: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for at_s, role, figure, value in samples:
        if at_s < begun_s + fifth_s:
            early[role, figure].append(value)
        if at_s >= end_s - fifth_s:
            late[role, figure].append(value)
    is_flat = True
    print(f"{'':16} " + "".join(f"{figure + ': first, last':>28}" for figure in SLACK))
    for role in dict.fromkeys(role for role, _ in early):
        cells = []
        for figure, slack in SLACK.items():
            if not late[role, figure]:
                cells.append("gone")
                continue
            before, after = median(early[role, figure]), median(late[role, figure])
            has_grown = after > max(before * FLAT, before + slack)
            is_flat = is_flat and not has_grown
            cells.append(f"{before:.0f}, {after:.0f}{' GROWN' if has_grown else ''}")
        print(f"{role:16} " + "".join(f"{cell:>28}" for cell in cells))
    return is_flat


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds from fault to fault")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=KINDS)
    parser.add_argument("--folder", help="keep what is written here; else a temporary folder")
    options = parser.parse_args()
    if unknown := set(options.kinds) - set(KINDS):
        parser.error(f"--kinds: no {', '.join(sorted(unknown))}; want some of {', '.join(KINDS)}")
    return options


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
