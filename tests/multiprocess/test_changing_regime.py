"""A run whose link is narrow for a while: it goes over to another regime, and comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isthmus.orchestrator.coordinator.journal import JournalReader
from isthmus.orchestrator.core.journaled_run import RecordedEvent, fold
from isthmus.protos import metrics
from tests.multiprocess.harness import (
    RUN_S,
    UNDER_BOTH_SECURITIES,
    Bench,
    kill,
    metrics_of,
    topology_yaml,
)
from tests.multiprocess.test_coordinator_restart import Deployment
from tests.multiprocess.test_lost_site import victim

JOB = """
version: 1
name: test
topology: topology.yaml
plan: {sites: all, max_sync_period: 10, replan: {shares: fixed, regime: follow, lasting: 500ms}}
exchange: {codec: fp32, chunk: 64KiB, bucket: 256KiB}
verify: {parameters_every: 1}
trainer:
  compute: modelled
  steps: 100000
  global_batch: 768
  model: {layers: 2, heads: 2, width: 48, context: 32}
  data: {max_bytes: 1MiB}
"""
NARROW_FOR_A_WHILE = """
version: 1
seed: 1
faults:
  - {at: 5s, link: [a, b], rate: 2Mbit/s}
  - {at: 40s, link: [a, b], rate: 400Mbit/s}
"""
NARROW = """
version: 1
seed: 1
faults:
  - {at: 5s, link: [a, b], rate: 2Mbit/s}
  - {at: 5s, link: [a, c], rate: 2Mbit/s}
  - {at: 5s, link: [b, c], rate: 2Mbit/s}
"""
STEPS = 3000
OF_SHORT_STEPS = JOB.replace("steps: 100000", f"steps: {STEPS}").replace("768", "12")
"""Where a step takes less time than its exchange on loopback."""
RUNGS = ["sync", "delayed", "diloco"]
STEPS_AFTER = 5
"""In the regime that is waited for, before something else happens."""


@pytest.mark.multiprocess
@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(400)
@UNDER_BOTH_SECURITIES
def test_a_run_leaves_sync_while_its_link_is_narrow(run: Bench) -> None:
    """All ranks have the same parameters in each regime, and the journal says why."""
    topology = topology_yaml([(1, 1), (1, 2)], rtt="4ms", bandwidth="400Mbit/s")
    (run.folder / "faults.yaml").write_text(NARROW_FOR_A_WHILE)
    job, faults = run.write(topology, JOB), run.folder / "faults.yaml"
    launched = run.start("launch", str(job), "--json", "--faults", str(faults))
    run.wait_for("another regime, and back", lambda: is_back(run) or has_ended(run), 300.0)
    run.isthmus("cancel", "--json").check()
    launched.communicate(timeout=RUN_S)
    events = recorded(run)
    view = fold(run.run_folder().name, events)
    assert view.reason_code == "CANCELLED", f"{view}\n{run.logs()}"
    moves = moves_of(events)
    assert moves[0]["regime"] in ("delayed", "diloco"), moves
    assert moves[0]["after_s"] < moves[0]["before_s"]
    assert moves[-1]["regime"] == "sync", moves
    assert moves[-1]["note"] in view.notes
    rungs = rungs_of(run, "a")
    assert {0.0, 1.0 if moves[0]["regime"] == "delayed" else 2.0} <= {*rungs}, rungs
    status = run.isthmus("status", "--json").check().envelope["data"]
    assert status["totals"]["verified_steps"] > STEPS_AFTER


@pytest.mark.multiprocess
@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(500)
@UNDER_BOTH_SECURITIES
def test_a_site_comes_back_in_the_regime_of_the_others(run: Bench) -> None:
    """It begins in sync by its job, and is told better."""
    topology = topology_yaml(
        [(1, 1), (1, 1), (1, 1)], rtt="4ms", bandwidth="400Mbit/s", detect_within="5s", min_sites=1
    )
    (run.folder / "faults.yaml").write_text(NARROW)
    job, faults = run.write(topology, JOB), run.folder / "faults.yaml"
    launched = run.start("launch", str(job), "--json", "--faults", str(faults))
    run.wait_for("another regime", lambda: has_left(run, "c") or has_ended(run), 200.0)
    kill(victim(run, "gateway"))
    run.wait_for("the site is back", lambda: has_returned(run) or has_ended(run), 200.0)
    num_before = len(rungs_of(run, "c"))
    run.wait_for(
        "its steps",
        lambda: len(rungs_of(run, "c")) > num_before + STEPS_AFTER or has_ended(run),
        100.0,
    )
    run.isthmus("cancel", "--json").check()
    launched.communicate(timeout=RUN_S)
    events = recorded(run)
    view = fold(run.run_folder().name, events)
    assert view.reason_code == "CANCELLED", f"{view}\n{run.logs()}"
    returned = next(at for at, each in enumerate(events) if each.kind == "site.returned")
    now = moves_of(events[:returned])[-1]["regime"]
    assert now != "sync"
    place = 1.0 if now == "delayed" else 2.0
    assert place in rungs_of(run, "c")[num_before:], "the one that the others had"


@pytest.mark.multiprocess
@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(300)
@UNDER_BOTH_SECURITIES
def test_the_next_coordinator_goes_on_in_the_regime_of_the_run(run: Bench) -> None:
    """The coordinator is killed when the run has left sync; a lower rung is in the journal."""
    deployed = Deployment(run, OF_SHORT_STEPS)
    folder = deployed.state / "runs" / "one"
    run.wait_for("another regime", lambda: any(rungs_in(folder, "a")), 100.0)
    deployed.kill()
    deployed.start(deployed.address)
    done = deployed.isthmus("wait", "one", "--timeout", "150s")
    assert done.code == 0, f"{done.out}\n{done.err}\n{run.logs()}"
    with JournalReader(deployed.state) as journal:
        events = journal.events("one")
    assert [each.kind for each in events].count("run.resumed") == 1
    resumed = next(at for at, each in enumerate(events) if each.kind == "run.resumed")
    before = moves_of(events[:resumed])[-1]["regime"]
    after = moves_of(events[resumed:])
    for site in "ab":
        rungs = rungs_in(folder, site)
        assert rungs[-1] == (RUNGS.index(after[-1]["regime"] if after else before)), rungs
        assert len(rungs) == STEPS


def recorded(run: Bench) -> list[RecordedEvent]:
    with JournalReader(run.run_folder()) as journal:
        return journal.events(run.run_folder().name)


def moves_of(events: list[RecordedEvent]) -> list[dict[str, Any]]:
    return [dict(each.detail) for each in events if each.kind == "run.regime"]


def rungs_of(run: Bench, site: str) -> list[float]:
    """Return the place in the ladder of each step that a site has told."""
    return rungs_in(run.run_folder(), site)


def rungs_in(folder: Path, site: str) -> list[float]:
    """Return the same of a run's folder."""
    if not (folder / "metrics.jsonl").exists():
        return []
    steps = [each for each in metrics_of(folder) if (each["kind"], each["site"]) == ("step", site)]
    return [each["values"][metrics.RUNG] for each in steps]


def is_back(run: Bench) -> bool:
    """Whether both sites have taken steps in sync again."""
    if not any(run.home.glob("runs/*/coordinator.json")):
        return False
    moves = moves_of(recorded(run))
    if len(moves) < 2 or moves[-1]["regime"] != "sync":
        return False
    return all(
        len(rungs := rungs_of(run, site)) > STEPS_AFTER and not any(rungs[-STEPS_AFTER:])
        for site in "ab"
    )


def has_ended(run: Bench) -> bool:
    return any(run.home.glob("runs/*/summary.json"))


def has_left(run: Bench, site: str) -> bool:
    """Whether a site has taken steps in another regime than sync."""
    if not any(run.home.glob("runs/*/metrics.jsonl")):
        return False
    return len([rung for rung in rungs_of(run, site) if rung]) > STEPS_AFTER


def has_returned(run: Bench) -> bool:
    return any(each.kind == "site.returned" for each in recorded(run))
