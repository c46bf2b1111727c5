"""A run whose link is cut to a tenth on the way.

Planned again, and switched at one round at all sites.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from isthmus.orchestrator.coordinator.journal import JournalReader
from isthmus.orchestrator.core.journaled_run import RecordedEvent, fold
from tests.multiprocess.harness import RUN_S, UNDER_BOTH_SECURITIES, Bench, topology_yaml

JOB = """
version: 1
name: test
topology: topology.yaml
plan: {sites: all, replan: {shares: fixed, lasting: 500ms}}
exchange: {codec: fp32, chunk: 64KiB, bucket: 256KiB}
verify: {parameters_every: 1}
trainer:
  compute: modelled
  steps: 100000
  global_batch: 6
  model: {layers: 2, heads: 2, width: 48, context: 32}
  data: {max_bytes: 1MiB}
"""
FAULTS = """
version: 1
seed: 1
faults:
  - {at: 100ms, link: [a, b], rate: 4Mbit/s}
"""
NARROW_FOR_A_WHILE = """
version: 1
seed: 1
faults:
  - {at: 100ms, link: [a, b], rate: 1Mbit/s}
  - {at: 60s, link: [a, b], rate: 400Mbit/s}
"""
STEPS_AFTER = 2
"""With the new trees, before the run is ended.

However long a switch takes, there is no more to see.
"""


@pytest.mark.multiprocess
@pytest.mark.exhaustive
@pytest.mark.slow
@UNDER_BOTH_SECURITIES
def test_a_link_that_is_cut_to_a_tenth_is_planned_around(run: Bench) -> None:
    topology = topology_yaml([(1, 1), (1, 1), (1, 1)], rtt="4ms", bandwidth="40Mbit/s")
    topology = topology.replace("[b, c], bandwidth: 40Mbit/s", "[b, c], bandwidth: 20Mbit/s")
    (run.folder / "faults.yaml").write_text(FAULTS)
    job, faults = run.write(topology, JOB), run.folder / "faults.yaml"

    launched = run.start("launch", str(job), "--json", "--faults", str(faults))
    run.wait_for("a switch, and steps after it", lambda: _has_gone_on(run) or _has_ended(run))
    run.isthmus("cancel", "--json").check()
    launched.communicate(timeout=RUN_S)

    events, verified_steps = _recorded(run)
    view = fold(run.run_folder().name, events)
    assert view.reason_code == "CANCELLED", f"{view}\n{run.logs()}"
    first = _around_the_cut_link(events)
    assert first is not None
    # Every step's parameters were the same at all sites, before and after.
    assert verified_steps >= first["from_round"] + STEPS_AFTER
    assert first["links"][0]["measured"] < 0.3 * first["links"][0]["assumed"], first
    assert first["after_s"] < 0.95 * first["before_s"]
    resumed = {
        each.site
        for each in events
        if each.kind == "site.resumed" and each.detail["epoch"] == first["epoch"]
    }
    assert resumed == set("abc"), events
    assert first["note"] in view.notes


@pytest.mark.multiprocess
@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(400)
@UNDER_BOTH_SECURITIES
def test_a_run_is_less_exact_while_its_link_is_narrow(run: Bench) -> None:
    """All sites change the codec at one round, and their parameters stay the same."""
    topology = topology_yaml([(1, 1), (1, 1)], rtt="4ms", bandwidth="400Mbit/s")
    (run.folder / "faults.yaml").write_text(NARROW_FOR_A_WHILE)
    text = JOB.replace("lasting: 500ms", "lasting: 500ms, least_exact: int8")
    job = run.write(topology, text.replace("global_batch: 6", "global_batch: 768"))
    faults = run.folder / "faults.yaml"
    launched = run.start("launch", str(job), "--json", "--faults", str(faults))
    run.wait_for("the codec, and back", lambda: _is_exact_again(run) or _has_ended(run), 300.0)
    run.isthmus("cancel", "--json").check()
    launched.communicate(timeout=RUN_S)
    events, verified_steps = _recorded(run)
    view = fold(run.run_folder().name, events)
    assert view.reason_code == "CANCELLED", f"{view}\n{run.logs()}"
    moves = _codec_moves(events)
    assert moves[0]["codec"] in ("bf16", "bf16-split", "int8"), moves
    assert moves[0]["after_s"] < moves[0]["before_s"]
    assert moves[-1]["codec"] == "fp32", moves
    assert verified_steps >= moves[-1]["from_round"] + STEPS_AFTER


def _codec_moves(events: list[RecordedEvent]) -> list[Mapping[str, Any]]:
    found = [each.detail for each in events if each.kind == "run.replanned"]
    return [each for each in found if each["codec"]]


def _is_exact_again(run: Bench) -> bool:
    """Whether steps have been verified that fp32 carried after another codec."""
    if not any(run.home.glob("runs/*/coordinator.json")):
        return False
    events, verified_steps = _recorded(run)
    moves = _codec_moves(events)
    if len(moves) < 2 or moves[-1]["codec"] != "fp32":
        return False
    return verified_steps >= float(moves[-1]["from_round"]) + STEPS_AFTER


def _recorded(run: Bench) -> tuple[list[RecordedEvent], float]:
    """Return a run's events, and after how many steps its parameters were seen to be the same."""
    run_id = run.run_folder().name
    with JournalReader(run.run_folder()) as journal:
        totals = journal.progress(run_id).get("totals", {})
        verified_steps: float = totals.get("verified_steps", 0.0)
        return journal.events(run_id), verified_steps


def _has_gone_on(run: Bench) -> bool:
    """Whether steps have been verified that the new trees carried, at all sites."""
    if not any(run.home.glob("runs/*/coordinator.json")):
        return False
    events, verified_steps = _recorded(run)
    switch = _around_the_cut_link(events)
    if switch is None:
        return False
    resumed = [
        each.site
        for each in events
        if each.kind == "site.resumed" and each.detail["epoch"] == switch["epoch"]
    ]
    return len(resumed) == 3 and verified_steps >= switch["from_round"] + STEPS_AFTER


def _has_ended(run: Bench) -> bool:
    return any(run.home.glob("runs/*/summary.json"))


def _around_the_cut_link(events: list[RecordedEvent]) -> Mapping[str, Any] | None:
    """Return the first switch for the link that was cut.

    On a busy machine others may seem to have drifted, too.
    """
    for each in events:
        if each.kind == "run.replanned":
            link = each.detail["links"][0]
            if (link["what"], {link["source"], link["target"]}) == ("bandwidth", {"a", "b"}):
                return each.detail
    return None
