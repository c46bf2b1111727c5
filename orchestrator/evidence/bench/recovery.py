"""The recovery benchmark: how long a run stands still when something at a site fails.

Each kind of failure has a run of its own, with a fault script of one fault. What counts is the
longest step of the surviving sites from the fault on: the training that people wait for.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Final, TypeAlias

from isthmus.orchestrator.documents import Pair
from isthmus.orchestrator.evidence.bench.experiment import Experiment, Part
from isthmus.orchestrator.evidence.record.bench_record import Failed, Made, Record
from isthmus.orchestrator.evidence.record.measured_steps import MeasurementError
from isthmus.orchestrator.evidence.view import formats
from isthmus.protos import metrics

RECOVERY: Final = "recovery.json"
"""The file in the benchmark's folder with all figures."""

KILLS: Final = ("gateway", "rank", "torchrun", "agent", "site")
PATHS: Final = ("blackhole", "frozen", "outage")
RETURN: Final = "return"
KINDS: Final = (*KILLS, *PATHS, RETURN)
"""The kinds of failure. The first five get SIGKILL. `blackhole`: nothing goes to or from the site
any more. `frozen`: all of its processes stop where they are. `outage`: for a while nothing crosses
between any two sites. `return`: the gateway gets SIGKILL, and it counts how the site comes back."""
LASTING: Final = frozenset({"outage"})
"""Kinds after which every site still takes part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery(Made):
    """What one failure cost."""

    kind: str
    site: str
    """Where it happened; empty: between all."""
    step_s: float | None = None
    """Median step of the survivors before the fault."""
    stalled_s: float | None = None
    """Longest step of a survivor from the fault on, without a median step; of an outage, also
    without the outage itself."""
    lost_steps: int | None = None
    """Steps that a survivor left out or did twice."""
    away_s: float | None = None
    """From the fault until the site has taken part in a step again."""
    beside_s: float | None = None
    """Median step of the survivors while the site was away, or followed them."""
    longest_s: float | None = None
    """The longest of them while it followed."""
    state_bytes: float | None = None
    """What the site took over of the others."""
    fetch_s: float | None = None
    """How long that took, from when it was let in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What was asked."""

    site: str
    at_s: float
    """Time of the fault, since the run was active."""
    outage_s: float
    detect_within_s: float


RecoveryBench: TypeAlias = Record[Question, Recovery]
"""The whole file: a setting is a failure."""


def fault_script(kind: str, site: str, others: Sequence[str], at_s: float, outage_s: float) -> str:
    """Return the script of a kind of failure, as YAML."""
    match kind:
        case "blackhole":
            fault = f"partition: [[{site}], [{', '.join(others)}]]"
        case "frozen":
            fault = f"pause: {site}, for: 1h"
        case "outage":
            groups = ", ".join(f"[{each}]" for each in (site, *others))
            fault = f"partition: [{groups}], for: {outage_s:g}s"
        case "return":
            fault = f"kill: {site}, what: gateway"
        case _:
            fault = f"kill: {site}, what: {kind}"
    return f"version: 1\nfaults:\n  - {{at: {at_s:g}s, {fault}}}\n"


def recovery_of(
    records: Iterable[Mapping[str, Any]], survivors: Sequence[str], outage_s: float
) -> tuple[float, float, int]:
    """Return a median step before the fault, the stall after it, and the steps lost.

    Args:
        records: Lines of metrics.jsonl.
        survivors: Sites that go on.
        outage_s: What the stall is counted without.

    Raises:
        MeasurementError: there was no fault, or there are too few steps before or after it.
    """
    fault_s = math.inf
    steps: dict[str, list[tuple[float, int, float]]] = defaultdict(list)
    for record in records:
        if record.get("kind") == metrics.FAULT:
            fault_s = min(fault_s, record["wall_s"])
        elif record.get("kind") == metrics.STEP and record.get("site") in survivors:
            step_s = record["values"][metrics.STEP_S]
            steps[record["site"]].append((record["wall_s"], record["step"], step_s))
    if fault_s == math.inf:
        raise MeasurementError("the fault was not played: the run ended before it")
    usual_s, stall_s, lost = [], 0.0, 0
    for site in survivors:
        before = [step_s for wall_s, _, step_s in steps[site] if wall_s < fault_s][1:]
        after = [step_s for wall_s, _, step_s in steps[site] if wall_s >= fault_s]
        if len(before) < 3 or len(after) < 3:
            raise MeasurementError(
                f"site {site} made {len(before)} steps before the fault and {len(after)} after it: "
                "want three of each; let the job make more steps"
            )
        numbers = [number for _, number, _ in steps[site]]
        lost += len(set(range(min(numbers), max(numbers) + 1)) ^ set(numbers))
        lost += len(numbers) - len(set(numbers))
        usual_s.append(median(before))
        stall_s = max(stall_s, max(after) - median(before))
    return median(usual_s), max(0.0, stall_s - outage_s), lost


def return_of(
    made: Recovery, records: Iterable[Mapping[str, Any]], survivors: Sequence[str]
) -> Recovery:
    """Return how the site came back; `stalled_s` is of the step that it entered with.

    Args:
        made: With the site, and a usual step of the others.
        records: Lines of metrics.jsonl.
        survivors: The others.

    Raises:
        MeasurementError: it has not come back.
    """
    site, step_s = made.site, made.step_s or 0.0
    fault_s, entry, first, back_s = math.inf, None, math.inf, math.inf
    steps: list[tuple[float, int, float]] = []
    for record in records:
        kind, of, wall_s = record.get("kind"), record.get("site"), record["wall_s"]
        if kind == metrics.FAULT:
            fault_s = min(fault_s, wall_s)
        elif kind == metrics.ENTRY and of == site:
            entry = record
        elif kind == metrics.ENTERED and of == site:
            first = record["step"] + 1
        elif kind == metrics.STEP and of in survivors:
            steps.append((wall_s, record["step"], record["values"][metrics.STEP_S]))
        elif kind == metrics.STEP and of == site and record["step"] >= first:
            back_s = min(back_s, wall_s)
    if entry is None or back_s == math.inf:
        raise MeasurementError(f"site {site} has not come back: let the job make more steps")
    values = entry["values"]
    let_in_s = entry["wall_s"] - values[metrics.FETCH_S]
    before = [each for wall_s, step, each in steps if fault_s < wall_s - each and step < first]
    followed = [each for wall_s, step, each in steps if let_in_s <= wall_s and step < first]
    entered = [each for _, step, each in steps if step == first]
    if not followed or not entered:
        raise MeasurementError("too few steps while the site came back")
    return dataclasses.replace(
        made,
        away_s=back_s - fault_s,
        beside_s=median(before),
        longest_s=max(followed),
        stalled_s=max(0.0, max(entered) - step_s),
        state_bytes=values[metrics.STATE_BYTES],
        fetch_s=values[metrics.FETCH_S],
    )


@dataclass(slots=True, kw_only=True)
class RecoveryRuns(Experiment[RecoveryBench]):
    """The recovery benchmark: a run for each kind of failure."""

    file: str = RECOVERY
    pair: Pair
    kinds: Sequence[str]

    def parts(self) -> list[Part]:
        """Return a run a kind."""
        return [Part(kind, kind, partial(self._measure, kind)) for kind in self.kinds]

    def _measure(self, kind: str) -> tuple[str, str | Failed]:
        asked = self.bench.question
        others = [each.name for each in self.pair.topology.sites if each.name != asked.site]
        script = self.folder / f"{kind}.yaml"
        text = fault_script(kind, asked.site, others, asked.at_s, asked.outage_s)
        script.write_text(text, encoding="utf-8")
        is_lasting = kind in LASTING
        survivors = [*others, asked.site] if is_lasting else others
        failure = Recovery(kind=kind, site="" if is_lasting else asked.site)

        def measure(lines: Iterable[Mapping[str, Any]], _: Made) -> Recovery:
            nonlocal failure
            records = list(lines)
            outage_s = asked.outage_s if is_lasting else 0.0
            step_s, stalled_s, lost = recovery_of(records, survivors, outage_s)
            failure = dataclasses.replace(
                failure, step_s=step_s, stalled_s=stalled_s, lost_steps=lost
            )
            return return_of(failure, records, survivors) if kind == RETURN else failure

        made, measured = self.made(self.pair, measure, ("--faults", str(script)))
        failure = dataclasses.replace(measured or failure, **made.fields())
        self.keep(settings=(*self.bench.settings, failure))
        if made.failed is not None:
            return made.run_id, made.failed
        assert failure.stalled_s is not None
        outcome = f"stalled for {formats.duration(failure.stalled_s)}"
        if failure.away_s is not None:
            outcome += f", back after {formats.duration(failure.away_s)}"
        return made.run_id, outcome
