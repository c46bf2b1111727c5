"""What a run has sent over its links is the same wherever it stands, whatever was lost."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from isthmus.orchestrator.core.journaled_run import RecordedEvent
from isthmus.orchestrator.dashboard.run_places import RunPlace
from isthmus.orchestrator.dashboard.watched_run import WatchedRun
from isthmus.orchestrator.exporters.figures import RunFigures
from isthmus.orchestrator.run_folder.run_files import RunFiles
from isthmus.orchestrator.runs.follower import RunFollower
from isthmus.protos import metrics
from isthmus.topology.spec.run_spec import RunSpec
from tests.multiprocess.harness import UNDER_BOTH_SECURITIES, Bench, job_yaml, kill, topology_yaml
from tests.multiprocess.test_lost_site import is_training, victim

pytestmark = [
    UNDER_BOTH_SECURITIES,
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.timeout(600),
]

STEPS = 1_000_000
"""It is stopped before."""
USD_PER_BYTE = 0.05 / 1e9
Pair = tuple[str, str]


def test_bytes_and_money_of_a_run_with_two_losses_are_all_that_gateways_sent(run: Bench) -> None:
    topology = topology_yaml(
        [(1, 1), (1, 1), (1, 1)], emulate=False, detect_within="5s", min_sites=1
    ).replace("rtt: 10ms}", "rtt: 10ms, egress: 0.05USD/GB}")
    job = run.write(topology, job_yaml(steps=STEPS, codec="int8"))
    process = run.start("launch", str(job), "--json")
    run.wait_for("first steps", lambda: is_training(run, 20))
    kill(victim(run, "gateway"))
    run.wait_for("a return", lambda: num_returns(run) == 1)
    before = shown_by_status(run)
    kill(victim(run, "rank"))
    run.wait_for("another", lambda: num_returns(run) == 2)
    run.isthmus("cancel").check()
    process.communicate(timeout=60)

    sent = sent_by_gateways(run)
    assert sum(before.values()) < sum(sent.values())
    for pair, sent_bytes in before.items():
        assert sent_bytes <= sent[pair], f"what was sent over {pair} has become less"
    folder = run.run_folder()
    summary = json.loads((folder / "summary.json").read_text())
    assert {(each["source"], each["target"]): each["sent_bytes"] for each in summary["links"]} == (
        sent
    )
    assert shown_by_status(run) == sent
    report = run.isthmus("report", folder.name, "--json").check().envelope["data"]["runs"][0]
    assert links_of(report["links"], "sent_bytes") == sent
    assert links_of(report["links"], "egress_usd") == priced(sent)
    assert report["sent_bytes"] == sum(sent.values())
    assert report["egress_usd"] == pytest.approx(USD_PER_BYTE * sum(sent.values()))

    place = RunPlace(folder.name, run.home, is_own=False, elsewhere="", submitted_wall_s=0.0)
    watched = WatchedRun(place)
    watched.open(folder, ("a", "b", "c"), None)
    while watched.read():
        pass
    assert {
        pair: carried[metrics.SENT_BYTES]
        for pair, (carried, _) in watched.figures()["links"].items()
    } == sent
    exported = exported_figures(run, folder)
    assert {
        labels: value for name, labels, value in exported if name == "isthmus_link_sent_bytes_total"
    } == sent
    usd = {
        labels: value
        for name, labels, value in exported
        if name == "isthmus_link_egress_dollars_total"
    }
    assert usd == priced(sent)


def num_returns(run: Bench) -> int:
    found = run.isthmus("events", "--json").check().envelope["data"]["events"]
    return sum(each["kind"] == "site.returned" for each in found)


def shown_by_status(run: Bench) -> dict[Pair, float]:
    status = run.isthmus("status", "--json").check().envelope["data"]
    return {(each["source"], each["target"]): each["sent_bytes"] for each in status["links"]}


def links_of(links: list[dict[str, Any]], key: str) -> dict[Pair, float]:
    return {(each["source"], each["target"]): each[key] for each in links}


def priced(sent: dict[Pair, float]) -> dict[Pair, Any]:
    return {pair: pytest.approx(USD_PER_BYTE * sent_bytes) for pair, sent_bytes in sent.items()}


def sent_by_gateways(run: Bench) -> dict[Pair, float]:
    """Return what all processes of gateways have sent, by what each has said last."""
    last: dict[tuple[str, str, str], float] = {}
    for each in run.metrics():
        if each["kind"] == "link":
            labels, sent_bytes = each["labels"], each["values"]["sent_bytes"]
            key = (labels["source"], labels["target"], labels[metrics.PROCESS])
            assert sent_bytes >= last.get(key, 0.0), "a process's totals never fall"
            last[key] = sent_bytes
    processes = [process for source, _, process in last if source == "c"]
    assert len(set(processes)) == 3, "c was started twice again"
    assert len({process for source, _, process in last if source == "a"}) == 1
    sent: dict[Pair, float] = {}
    for (source, target, _), sent_bytes in last.items():
        sent[source, target] = sent.get((source, target), 0.0) + sent_bytes
    # What ranks count by themselves, of the sites that were never lost; results come on top.
    for site in "ab":
        steps = [each for each in run.metrics() if each["kind"] == "step" and each["site"] == site]
        crossed = math.fsum(each["values"]["wire_bytes"] for each in steps)
        assert crossed <= 1.001 * sum(value for pair, value in sent.items() if pair[0] == site)
    return sent


def exported_figures(run: Bench, folder: Path) -> list[tuple[str, tuple[str, ...], float]]:
    spec = RunSpec.from_bytes(RunFiles(folder).read_spec())
    figures, follower = RunFigures(folder.name, spec), RunFollower(folder.name, folder, run.home)
    while entries := follower.read():
        for each in entries:
            if isinstance(each, RecordedEvent):
                figures.add_event(each)
            else:
                figures.add_metric(each)
    return [(each.family.prometheus, each.labels, each.value) for each in figures.samples()]
