"""A figure of a run has one name in status and in the API, whose page lists them all."""

import dataclasses
import re
from pathlib import Path

import pytest

from isthmus.orchestrator.api.run import RunStatus
from isthmus.orchestrator.cli.views import outcome_view, run_view
from isthmus.orchestrator.coordinator.control_messages import run_message
from isthmus.orchestrator.core.journaled_run import JournaledRun
from isthmus.orchestrator.core.run_metrics import RunMetrics
from isthmus.orchestrator.runs.facts import LinkFacts, SiteFacts, TotalFacts, site_facts, to_json
from isthmus.protos.control.v1 import control_pb2
from isthmus.topology.spec.regime import AS_LAUNCHED, Rung

API = Path(__file__).resolve().parents[2] / "docs" / "dashboard.md"


def names(kind: type[TotalFacts | SiteFacts | LinkFacts]) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def a_run() -> control_pb2.Run:
    run = control_pb2.Run(run_id="r1", active_s=10.0)
    run.totals.update({"step": 7, "tokens": 70.0, "wire_bytes": 900.0, "verified_steps": 6})
    run.links.add(source="a", target="b", bytes_per_s=1e6, latest={"sent_bytes": 900.0})
    return run


@pytest.mark.parametrize(
    ("row", "kind"), [("a run", TotalFacts), ("a site", SiteFacts), ("a link", LinkFacts)]
)
def test_the_page_lists_every_figure(
    row: str, kind: type[TotalFacts | SiteFacts | LinkFacts]
) -> None:
    [listed] = re.findall(rf"^\| {row} \| ([^:|]*)", API.read_text(encoding="utf-8"), re.MULTILINE)
    assert re.findall(r"`(\w+)`", listed) == names(kind)


def test_status_has_the_names_of_the_api() -> None:
    view = run_view(a_run())
    assert view["totals"].keys() <= {*names(TotalFacts), "verified_steps"}
    assert (view["totals"]["steps"], view["totals"]["sent_bytes"]) == (7, 900.0)
    [link] = view["links"]
    assert list(link) == names(LinkFacts)
    assert (link["configured_bytes_per_s"], link["sent_bytes"]) == (1e6, 900.0)


def test_status_has_the_figures_of_sites_that_the_summary_has() -> None:
    measured = RunMetrics(("a", "b"))
    for step in (1, 2):
        parts = {"compute_s": 2.0 * step, "wait_s": 1.0, "encode_s": 0.25}
        measured.add("a", "step", step, {"step_s": 2.0 * step + 1, "site_tokens": 6.0, **parts}, {})
    view = JournaledRun("r1", ("a", "b"))
    run = run_message(view, measured.progress())
    sites = run_view(run)["sites"]
    own = [{name: site[name] for name in names(SiteFacts)} for site in sites]
    assert own == [to_json(each) for each in site_facts(measured).values()]
    assert (own[0]["num_steps"], own[0]["tokens"], own[0]["step_s"]) == (2, 12.0, 4.0)
    assert sites[0].keys() - own[0].keys() == {"state", "host"}
    assert [site.figures for site in RunStatus.of(run).sites] == own


@pytest.mark.parametrize("rung", [AS_LAUNCHED, Rung(3, "delayed")])
def test_a_run_tells_the_regime_that_it_went_over_to(rung: Rung) -> None:
    begun = JournaledRun("r1", ("a", "b"))
    gone_over = dataclasses.replace(begun.epochs.epoch, rung=rung)
    run = run_message(JournaledRun("r1", ("a", "b"), gone_over), {})
    assert run.regime == rung.kind


def test_figures_of_the_summary_count_where_it_is_there() -> None:
    summary = {"links": [{"source": "a", "target": "b", "sent_bytes": 950.0}], "steps": 8}
    outcome = outcome_view(a_run(), summary)
    assert (outcome["steps"], outcome["links"][0]["sent_bytes"]) == (8, 950.0)
