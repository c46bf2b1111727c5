"""Put the constants of the congestion window on trial: turn off one at a time, and measure.

A constant is worth its line if some link is worse without it. Each is measured on the links that it
is meant for, among measurements of the shipped values on the same link. A row tells the median and
the longest time of a round as multiples of its bound (beside another flow: of what half of the link
allows, and then the other flow's part of its half).

What has been measured stays in --kept, one JSON line each, and isn't measured again: interrupt it
at will, and start it again. Needs root, for network namespaces.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from isthmus.orchestrator.emulator.emulator_child import running_emulator
from isthmus.orchestrator.emulator.emulator_config import NetnsConfig
from isthmus.orchestrator.emulator.link_shape import LinkShape
from isthmus.sites.gateway.config import HELD_BYTES
from isthmus.topology.spec.world import CrossTraffic
from scripts.bench.gateways import PAYLOAD_SHARE, SITES, Setting, both, chosen_chunk, pair

Changes = Mapping[str, Mapping[str, float]]
"""By module of `sites/gateway/links/congestion`, the new value of each constant."""

_SHIPPED_EVERY = 4
"""So often the shipped values are measured again: figures drift on a shared machine."""
_PACKAGE = "isthmus.sites.gateway.links.congestion"
_SITECUSTOMIZE = """
import importlib.abc, importlib.machinery, json, os, sys

CHANGES = json.loads(os.environ["ISTHMUS_BENCH_CONSTANTS"])


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name not in CHANGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            missing = CHANGES[name].keys() - vars(module).keys()
            assert not missing, missing
            vars(module).update(CHANGES[name])

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
"""
"""Python runs it at its start, from a folder on PYTHONPATH: gateways import changed modules."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A link to measure on, and how."""

    mbit_per_s: float = 500.0
    rtt_ms: float = 50.0
    mib: int = 32
    congestion: str = "bbr"
    loss: float = 0.0
    jitter_ms: float = 0.0
    queue_bdp: float = 1.0
    described: float = 1.0
    """Bandwidth that the gateways are told, as a multiple of the link's."""
    beside: str = ""
    """Congestion control of another flow in each direction; empty: there is none."""
    warmup: int = 2
    rounds: int = 5

    @property
    def setting(self) -> Setting:
        """The setting of the two gateways."""
        bits_per_s, rtt_s = self.mbit_per_s * 1e6, self.rtt_ms / 1e3
        return Setting(
            bits_per_s=bits_per_s,
            rtt_s=rtt_s,
            described=self.described,
            codec="fp32",
            channels=None,
            chunk_bytes=chosen_chunk("fp32", self.described * bits_per_s, rtt_s),
            held_bytes=HELD_BYTES,
            num_buckets=1,
            num_bytes=self.mib << 20,
            num_ranks=1,
            num_lanes=1,
        )


_BESIDE = Condition(mbit_per_s=200, mib=16, beside="cubic", warmup=10)
CONDITIONS: Mapping[str, Condition] = {
    "alone": Condition(),
    "alone_cubic": Condition(congestion="cubic"),
    "narrow": Condition(mbit_per_s=40, rtt_ms=20, mib=8),
    "short": Condition(mbit_per_s=260, rtt_ms=4),
    "lossy": Condition(loss=0.001),
    "lossy_cubic": Condition(loss=0.001, congestion="cubic", mib=16),
    "shallow": Condition(queue_bdp=0.25),
    "shallow_cubic": Condition(queue_bdp=0.25, congestion="cubic"),
    "jitter": Condition(jitter_ms=5),
    "slower": Condition(described=6, mib=16, rounds=7),
    "faster": Condition(described=1 / 6, mib=32, warmup=6),
    "beside_cubic": _BESIDE,
    "beside_cubic_20ms": dataclasses.replace(_BESIDE, rtt_ms=20),
    "beside_bbr": dataclasses.replace(_BESIDE, beside="bbr"),
    "cubic_beside_cubic": dataclasses.replace(_BESIDE, congestion="cubic"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """A constant, or several that only serve together, and what turns them off."""

    module: str
    off: Mapping[str, float]
    conditions: tuple[str, ...]


_ALONE = ("alone", "alone_cubic")
_BESIDES = ("beside_cubic", "beside_cubic_20ms", "cubic_beside_cubic")
TRIALS: tuple[Trial, ...] = (
    Trial("window", {"_SLACK": 0.0}, (*_ALONE, "narrow")),
    Trial("window", {"_GRADUALLY": 1e-9}, (*_ALONE, *_BESIDES)),
    Trial("window", {"_FOLLOWS": 1.0}, (*_ALONE, *_BESIDES)),
    Trial("window", {"_FULL": 1e9}, ("beside_cubic", "beside_bbr", "shallow_cubic", "slower")),
    Trial("window", {"_JITTER_S": 0.0}, ("alone", "jitter", "beside_cubic_20ms")),
    Trial("window", {"_VARIES": 1.0}, ("jitter", "alone")),
    Trial("window", {"_VARIES": 1e9}, ("jitter", "beside_cubic")),
    Trial("window", {"_ALONE": 9.0}, (*_ALONE, "beside_bbr")),
    Trial("window", {"_LEAVES": 1.15}, _BESIDES),
    Trial("window", {"_WIDENS": 0.0}, (*_BESIDES, "beside_bbr")),
    Trial("window", {"_OFTEN": 2.0}, ("beside_bbr",)),
    Trial("window", {"_STARVED": 1.0}, _BESIDES),
    Trial("window", {"_AVERAGED": 1.0}, _BESIDES),
    Trial("window", {"_LOSS_IGNORED_S": 0.0}, ("beside_bbr",)),
    Trial("window", {"_LOOK_SHARE": 0.0}, ("alone", "short")),
    Trial("window", {"_LOOK_BYTES": 0.0}, ("narrow",)),
    Trial("window", {"_RTT_MIN_S": 0.0}, ("short",)),
    Trial("rate", {"_HEADROOM": 1.0}, ("alone", "lossy", "slower")),
    Trial("rate", {"_HEADROOM": 9.0}, ("alone", "shallow", "shallow_cubic")),
    Trial("rate", {"_SEARCH": 1.0}, ("faster",)),
    Trial("rate", {"_FASTER": 1.0}, ("alone", "jitter")),
    Trial("rate", {"_SLOW": 1.0}, ("lossy_cubic", "shallow_cubic")),
    Trial("rate", {"_MEASUREMENTS": 1}, ("lossy_cubic", "shallow_cubic", "beside_cubic")),
    Trial("rate", {"_ENOUGH_S": 0.0}, ("alone", "faster", "beside_cubic")),
    Trial("rate", {"_SEARCH_S": 1e9}, ("faster",)),
    Trial("rate", {"_DRIFT": 0.0}, ("alone",)),
    Trial("rate", {"_LATELY_S": -1.0}, (*_ALONE, "beside_cubic")),
    Trial("rate", {"_CLOCK_S": 1e9}, ("alone",)),
    Trial("losses", {"_MANY_SHARE": 1.0}, ("slower", "beside_cubic", "shallow_cubic")),
    Trial("losses", {"_LOOKS": 1}, ("lossy", "shallow", *_BESIDES)),
    Trial("losses", {"_ROOM_S": 0.0}, ("beside_cubic", "cubic_beside_cubic", "shallow_cubic")),
    Trial("losses", {"_LASTS_S": 0.0}, ("lossy", "lossy_cubic")),
    Trial("connections", {"_LOOK_S": 0.2}, ("alone", "beside_cubic", "faster")),
    Trial("kernel", {"_UNSENT_BYTES": 1 << 30}, ("alone", "narrow")),
    Trial("kernel", {"_PAUSES_EVERY_S": 1e9}, ("alone", "jitter")),
    Trial("kernel", {"_LONGER": 1e9}, ("beside_cubic", "beside_bbr")),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--kept", type=Path, default=Path("build/window.jsonl"))
    parser.add_argument("--only", default="", help="constants whose name contains this")


def run(options: argparse.Namespace) -> int:
    """Measure what is missing, and print a row for each link and constant."""
    options.kept.parent.mkdir(parents=True, exist_ok=True)
    kept = _kept(options.kept)
    for condition, settings in CONDITIONS.items():
        for name, changes in _rows(condition, options.only):
            key = f"{condition:18} {name}"
            if key not in kept:
                kept[key] = _measured(settings, changes)
                with options.kept.open("a") as file:
                    file.write(json.dumps({"key": key, "figures": kept[key]}) + "\n")
            print(f"{key:54}", *(f"{value:6.2f}" for value in kept[key]), flush=True)
    return 0


def _rows(condition: str, only: str) -> Iterator[tuple[str, Changes]]:
    """Yield names and changes of a link's measurements: every few of them, none is changed."""
    trials = [
        trial
        for trial in TRIALS
        if condition in trial.conditions and any(only in name for name in trial.off)
    ]
    for number, trial in enumerate(trials):
        if number % _SHIPPED_EVERY == 0:
            yield f"as shipped {number // _SHIPPED_EVERY}", {}
        changes = ", ".join(f"{name}={value:g}" for name, value in trial.off.items())
        yield f"{trial.module}: {changes}", {f"{_PACKAGE}.{trial.module}": trial.off}
    if trials:
        yield "as shipped at last", {}


def _kept(path: Path) -> dict[str, list[float]]:
    """Return what earlier calls have measured."""
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["key"]: line["figures"] for line in lines}


def _measured(condition: Condition, changes: Changes) -> list[float]:
    """Return the median time over its bound, the worst, and the other flow's part of its half."""
    setting = condition.setting
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(_changed(changes, folder))
        emulator = stack.enter_context(running_emulator(_emulated(condition, folder)))
        _, ranks = stack.enter_context(pair(setting, emulator.sites))
        times_s = [both(ranks, number) for number in range(condition.warmup + condition.rounds)]
        measured_s = times_s[condition.warmup :]
        bound_s = setting.bound_s * (2 if condition.beside else 1)
        figures = [statistics.median(measured_s) / bound_s, max(measured_s) / bound_s]
        if condition.beside:
            half_bytes_per_s = PAYLOAD_SHARE * setting.bits_per_s / 8 / 2
            figures.append(_others_bytes_per_s(folder, sum(measured_s)) / half_bytes_per_s)
    return figures


def _emulated(condition: Condition, folder: Path) -> NetnsConfig:
    """Return the emulator's configuration."""
    bytes_per_s, rtt_s = condition.mbit_per_s * 1e6 / 8, condition.rtt_ms / 1e3
    return NetnsConfig(
        sites=SITES,
        links=tuple(
            LinkShape(
                source=source,
                target=target,
                bytes_per_s=bytes_per_s,
                delay_s=rtt_s / 2,
                jitter_s=condition.jitter_ms / 1e3,
                loss=condition.loss,
                queue_bytes=int(condition.queue_bdp * bytes_per_s * rtt_s),
            )
            for source, target in itertools.permutations(SITES, 2)
        ),
        seed=1,
        congestion=condition.congestion,
        cross_traffic=CrossTraffic(flows=1, congestion=condition.beside)
        if condition.beside
        else None,
        cross_traffic_folder=str(folder),
    )


def _others_bytes_per_s(folder: Path, lately_s: float) -> float:
    """Return the mean rate of the other flows over the latest seconds."""
    rates: list[float] = []
    for path in folder.glob("*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True)[:-1]]
        begin = next(line for line in lines if line["at_s"] >= lines[-1]["at_s"] - lately_s)
        spent_s = lines[-1]["at_s"] - begin["at_s"]
        received = [sum(line["received_bytes"].values()) for line in (begin, lines[-1])]
        rates.append((received[1] - received[0]) / spent_s)
    return float(statistics.mean(rates))


@contextlib.contextmanager
def _changed(changes: Changes, folder: Path) -> Iterator[None]:
    """Start gateways with changed constants within this context."""
    (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE)
    ours = {"PYTHONPATH": str(folder), "ISTHMUS_BENCH_CONSTANTS": json.dumps(changes)}
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
