"""The dashboard that ships uses names that are exported, and has the form that Grafana imports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isthmus.orchestrator.exporters.families import FAMILIES, Family

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "examples/monitoring/grafana.json").read_text())
BY_NAME: dict[str, Family] = {each.prometheus: each for each in FAMILIES}


def targets() -> Iterator[dict[str, Any]]:
    for panel in DASHBOARD["panels"]:
        yield from panel.get("targets", [])


def expressions() -> list[str]:
    variables = [each["definition"] for each in DASHBOARD["templating"]["list"][1:]]
    return [*(each["expr"] for each in targets()), *variables]


def test_every_name_is_exported_and_nearly_every_one_is_shown() -> None:
    used = {name for text in expressions() for name in re.findall(r"isthmus_\w+", text)}
    assert used <= BY_NAME.keys()
    assert len(BY_NAME.keys() - used) <= 2


def test_labels_are_those_of_the_figures() -> None:
    for target in targets():
        named = [BY_NAME[name] for name in re.findall(r"isthmus_\w+", target["expr"])]
        labels = {"run"}.union(*(each.labels for each in named))
        selected = re.findall(r"(\w+)=\"", target["expr"])
        shown = re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", ""))
        assert labels >= {*selected, *shown}, target["expr"]
        assert target["expr"].count("{") == target["expr"].count('{run="$run"'), "one run's only"


def test_counters_are_shown_as_rates_but_for_money() -> None:
    for target in targets():
        for name in re.findall(r"isthmus_\w+_total", target["expr"]):
            is_rate = re.search(rf"(rate|increase)\({name}\{{", target["expr"]) is not None
            assert is_rate or name == "isthmus_link_egress_dollars_total", target["expr"]


def test_it_has_what_an_import_wants() -> None:
    assert DASHBOARD["id"] is None, "Grafana gives one"
    assert DASHBOARD["title"]
    assert DASHBOARD["schemaVersion"] >= 36
    panels = DASHBOARD["panels"]
    ids = [each["id"] for each in panels]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (column, row)
            for column in range(place["x"], place["x"] + place["w"])
            for row in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
            assert len({each["refId"] for each in panel["targets"]}) == len(panel["targets"])
