"""Train through one fault after another, and tell what they cost.

Usage: python -m tests.tools.soak [--regime KIND] [--tls] [--script trainer|plain|both]
    [--minutes N] [--every FROM-TO] [--seed N] [--kinds KIND,..] [--folder DIR]

A coordinator and the agents of three sites run on this machine as separate commands, in a network
namespace of their own (root), each site on an address of its own; with `--tls` all show
certificates. Beside them, as a service manager would, this script starts again whatever of these
four has ended. After so many seconds, drawn from the seed, something fails: each kind as often as
any other. Unless `--kinds` names others, that is SIGKILL of any process. A step has 0.1 s of
modelled compute with the shipped trainer, and 0.25 s with a script without `site.sampler`.

Printed: what each fault and each return cost, and goodput, which is steps times their median over
the wall time; descriptors, threads and memory of coordinator, agents and gateways in the first and
the last fifth. Ctrl-C ends it earlier. It ends with 1 where the run has ended, a step was lost, a
site did not come back, a return has held the others up for more than 2 steps and a tenth of the
state's transfer, goodput is too low, or something has grown.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import shutil
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
from isthmus.protos.security import TLS_VARIABLES
from tests.fakes.certified import certify
from tests.fakes.waiting import wait_for

SITES = {"a": "127.0.0.2", "b": "127.0.0.3", "c": "127.0.0.4"}
COORDINATOR = "127.0.0.5"
DETECT_S = 5.0
RUN = "soak"
KILLED = ("gateway", "rank", "torchrun", "agent", "site", "coordinator")
KINDS = (
    *KILLED,
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
    "rank": "isthmus.sites.node.rank",
    "torchrun": "isthmus.sites.node.launcher",
}
SAMPLE_S = 5.0
LOOK_S = 0.2
FIRST_RECORDS = 30
BEGIN_S = 300.0
"""The first steps have so long to come."""
COORDINATOR_DOWN_S = 8.0
"""Less than from fault to fault: while it is away, nobody decides that a site is lost."""
BACK_S = 120.0
"""A site is back so long after the latest fault at the most."""
WANTED_GOODPUT = 0.9
HELD_UP_STEPS = 2.0
HELD_UP_SHARE = 0.1
"""So many steps, and so much of the time for which the state is fetched, a return may hold the
others up."""
REGIMES = {
    "sync": "sync",
    "delayed": "delayed",
    "diloco": "{kind: diloco, sync_every: 8}",
    "streaming": "{kind: streaming, sync_every: 8, fragments: 2}",
}
PLAIN = Path(__file__).with_name("soak_plain.py")
FLAT = 1.25
"""Figures of the last fifth are at most so many times those of the first, or `SLACK` more."""
SLACK = {"descriptors": 8, "threads": 8, "memory, MiB": 24}

TOPOLOGY = """version: 1
name: soak
accelerators:
  core: {peak: {fp32: 3GFLOP/s}, memory: 2GiB, mfu: 0.3}
sites:
  - {name: a, nodes: 1, accelerators_per_node: 1, accelerator: core, wan: {address: 127.0.0.2}}
  - {name: b, nodes: 1, accelerators_per_node: 1, accelerator: core, wan: {address: 127.0.0.3}}
  - {name: c, nodes: 1, accelerators_per_node: 2, accelerator: core, wan: {address: 127.0.0.4}}
links:
  - {between: [a, b], bandwidth: 400Mbit/s, rtt: 2ms}
  - {between: [b, c], bandwidth: 400Mbit/s, rtt: 2ms}
  - {between: [a, c], bandwidth: 400Mbit/s, rtt: 2ms}
failure: {detect_within: DETECT, ride_out: 60s, min_sites: 1, max_restarts: 1000,
  allow_losses: true}
security: {mode: SECURITY}
"""
JOB = """version: 1
name: soak
topology: topology.yaml
regime: REGIME
exchange: {codec: int8, chunk: 64KiB, bucket: 256KiB}
verify: {parameters_every: 1}
checkpoint: {every: 200 steps, keep: 2}
trainer:
  steps: 1000000
  compute: modelled
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

    def __init__(self, folder: Path, regime: str, script: str, *, has_tls: bool) -> None:
        self.folder = folder
        self._topology = TOPOLOGY.replace("DETECT", f"{DETECT_S:g}s").replace(
            "SECURITY", "mtls" if has_tls else "insecure"
        )
        self._job = JOB.replace("REGIME", REGIMES[regime])
        if script == "plain":
            self._job += f"entrypoint: {PLAIN}\n"
        if has_tls:
            files = certify(folder / "certs", *SITES)
            os.environ |= {name: getattr(files, key) for key, name in TLS_VARIABLES.items()}
        self.state = folder / "coordinator"
        self.down_until_s: dict[str, float] = {}
        """What is not to be started again before some time."""
        self._commands: dict[str, tuple[str, ...]] = {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._logs = folder / "commands.log"

    def start(self) -> None:
        """Start the coordinator, the agents and the run."""
        (self.folder / "topology.yaml").write_text(self._topology)
        (self.folder / "job.yaml").write_text(self._job)
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

    def events(self) -> list[dict[str, Any]]:
        """Return all events of the run; none where the coordinator does not answer."""
        done = self.isthmus("events", RUN, "--json")
        return json.loads(done.stdout)["data"]["events"] if done.returncode == 0 else []

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

    def records(self, kind: str = "step") -> list[dict[str, Any]]:
        """Return every record of a kind, oldest first."""
        found = []
        paths = (self.state / "runs" / RUN).glob("metrics.jsonl*")
        for path in sorted(
            paths, key=lambda path: int(path.suffix[1:]) if path.suffix[1:].isdigit() else 0
        ):
            lines = path.read_text().splitlines()
            found += [json.loads(line) for line in lines if f'"kind": "{kind}"' in line]
        return found


def strike(deployment: Deployment, kind: str, site: str, rng: random.Random) -> float:
    """Let something fail; return for how many seconds it lasts."""
    agent = deployment.process(site)
    if kind == "coordinator":
        down_s = rng.uniform(1.0, COORDINATOR_DOWN_S)
        deployment.down_until_s["coordinator"] = time.monotonic() + down_s
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
    scripts = ("trainer", "plain") if options.script == "both" else (options.script,)
    bad = [script for script in scripts if not soak_with(script, folder / script, options)]
    if not options.folder and not bad:
        shutil.rmtree(folder)
    return 1 if bad else 0


def soak_with(script: str, folder: Path, options: argparse.Namespace) -> bool:
    """Let one script train, and return whether all was well."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["ISTHMUS_HOME"] = str(folder / "home")
    print(f"{options.regime}, {script}: seed {options.seed}, {folder}", flush=True)
    deployment = Deployment(folder, options.regime, script, has_tls=options.tls)
    try:
        deployment.start()
        return soak(deployment, options)
    finally:
        deployment.stop()


def soak(deployment: Deployment, options: argparse.Namespace) -> bool:
    """Let things fail until the time is over; return whether all was well."""
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
    next_s = begun_s + rng.uniform(*options.every)
    ends: list[tuple[float, str, str]] = []
    sampled_s = 0.0
    ended: list[int] = []
    signal.signal(signal.SIGINT, lambda signum, _: ended.append(signum))
    while (now_s := time.time()) < end_s and not ended:
        deployment.keep_up()
        for each in [each for each in ends if each[0] <= now_s]:
            ends.remove(each)
            mend(deployment, *each[1:])
        if now_s >= next_s and now_s < end_s - options.every[1]:
            next_s += rng.uniform(*options.every)
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
    is_back = wait_until_back(deployment)
    run = Run(
        deployment.records(),
        deployment.records("entry"),
        deployment.events(),
        faults,
        begun_s,
        end_s,
    )
    status = json.loads(deployment.isthmus("status", RUN, "--json").stdout)["data"]
    deployment.isthmus("cancel", RUN)
    verdicts = {
        f"state {status['state']}, {status['totals']['verified_steps']} steps compared": (
            status["state"] == "ACTIVE"
        ),
        "every site back": is_back,
        **tell_faults(run),
        **tell_returns(run),
        "nothing has grown": tell_usage(samples, begun_s, end_s),
    }
    for what, is_good in verdicts.items():
        print(f"{'ok' if is_good else 'MISSED':7} {what}", flush=True)
    return all(verdicts.values())


def wait_until_back(deployment: Deployment) -> bool:
    """Wait until every site takes part in a step after the last fault; return whether it was so."""

    def is_back() -> bool:
        deployment.keep_up()
        events = deployment.events()
        return not events or not out_at_end(events)

    try:
        wait_for(is_back, "every site to be back", BACK_S, look_s=2.0)
    except AssertionError:
        return False
    return bool(deployment.events())


def out_at_end(events: list[dict[str, Any]]) -> set[str]:
    """Return the sites whose latest loss no return has followed."""
    out = set()
    for each in events:
        if each["kind"] == "site.lost":
            out.add(each["site"])
        elif each["kind"] == "site.returned":
            out.discard(each["site"])
    return out


@dataclasses.dataclass(frozen=True)
class Run:
    """What is known of a run that is over."""

    records: list[dict[str, Any]]
    """One for each step of each site. Times are those at which the coordinator heard of it: while
    there is none, nobody hears."""
    entries: list[dict[str, Any]]
    events: list[dict[str, Any]]
    faults: list[Fault]
    begun_s: float
    end_s: float

    @property
    def steps(self) -> list[tuple[float, str, int, float]]:
        """Return end, site, number and length of each step that was measured."""
        return [
            (float(each["wall_s"]), each["site"], int(each["step"]), each["values"]["step_s"])
            for each in self.records
            if "step_s" in each["values"] and each["wall_s"] >= self.begun_s
        ]

    @property
    def usual_s(self) -> float:
        """The median step."""
        return median(step_s for *_, step_s in self.steps)


def tell_faults(run: Run) -> dict[str, bool]:
    """Print what each fault cost; return what is to hold, and whether it does."""
    steps = [each for each in run.steps if each[0] <= run.end_s]
    print(f"{'at':>7} {'what':14} {'site':4} {'longest step, s':>16}   what became of sites")
    ends = [*(each.at_s for each in run.faults[1:]), run.end_s]
    for fault, until_s in zip(run.faults, ends, strict=True):
        longest_s = max((it for at, *_, it in steps if fault.at_s <= at < until_s), default=0.0)
        became = [
            f"{each['site']} {each['kind'].removeprefix('site.')} {each['wall_s'] - fault.at_s:.1f}"
            for each in run.events
            if each["kind"] in ("site.lost", "site.returned")
            and fault.at_s <= each["wall_s"] < until_s
        ]
        at = f"{fault.at_s - run.begun_s:7.0f} {fault.kind:14} {fault.site:4}"
        print(f"{at} {longest_s:16.2f}   {', '.join(became)}")
    numbers = {step for _, _, step, _ in steps}
    wall_s = run.end_s - run.begun_s
    good = len(numbers) * run.usual_s / wall_s
    missing = max(numbers) - min(numbers) + 1 - len(numbers)
    print(f"a step           {1e3 * run.usual_s:.1f} ms, the median")
    return {
        f"{len(numbers)} steps in {wall_s:.0f} s, {missing} lost": missing == 0,
        f"goodput {good:.1%}, want {WANTED_GOODPUT:.0%}": good >= WANTED_GOODPUT,
    }


def tell_returns(run: Run) -> dict[str, bool]:
    """Print how long each return has held the others up; return what is to hold.

    Counted from when the site begins to catch up until a second after it takes part. Steps in which
    something failed are the fault's.
    """
    print(f"{'at':>7} {'back':4} {'after, s':>9} {'state, s':>9} {'held up, s':>10} {'bar, s':>7}")
    lost_s: dict[str, float] = {}
    entering_s: dict[str, float] = {}
    held_up = 0
    for each in run.events:
        site, at_s = each["site"], each["wall_s"]
        if each["kind"] == "site.lost":
            lost_s.setdefault(site, at_s)
        elif each["kind"] == "epoch.entering":
            entering_s.setdefault(site, at_s)
        elif each["kind"] == "site.returned" and site in lost_s:
            since_s = entering_s.pop(site, at_s)
            fetched_s = [
                one["values"]["fetch_s"]
                for one in run.entries
                if one["site"] == site and since_s <= one["wall_s"] <= at_s
            ]
            bar_s = HELD_UP_STEPS * run.usual_s + HELD_UP_SHARE * sum(fetched_s[-1:])
            longest_s = max(
                (
                    step_s - run.usual_s
                    for end_s, other, _, step_s in run.steps
                    if other != site
                    and since_s <= end_s <= at_s + 1.0 + step_s
                    and not any(end_s - step_s - 0.5 <= fault.at_s <= end_s for fault in run.faults)
                ),
                default=0.0,
            )
            held_up += longest_s > bar_s
            after_s = at_s - lost_s.pop(site)
            print(
                f"{at_s - run.begun_s:7.0f} {site:4} {after_s:9.1f} {sum(fetched_s[-1:]):9.2f} "
                f"{longest_s:10.3f} {bar_s:7.3f}{'  MISSED' if longest_s > bar_s else ''}"
            )
    return {f"{held_up} returns have held the others up for longer than the bar": not held_up}


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
    parser.add_argument("--regime", choices=REGIMES, default="sync")
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--script", choices=("trainer", "plain", "both"), default="both")
    parser.add_argument("--minutes", type=float, default=12.0, help="with each script")
    parser.add_argument(
        "--every",
        type=lambda text: tuple(map(float, text.split("-"))),
        default=(15.0, 40.0),
        help="seconds from fault to fault",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=KILLED)
    parser.add_argument("--folder", help="keep what is written here; else a temporary folder")
    options = parser.parse_args()
    if unknown := set(options.kinds) - set(KINDS):
        parser.error(f"--kinds: no {', '.join(sorted(unknown))}; want some of {', '.join(KINDS)}")
    return options


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
