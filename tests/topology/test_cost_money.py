"""Money of a run."""

from __future__ import annotations

import pytest

from topology.cost.money import money
from topology.documents.load import load_topology
from topology.world import Topology


def world(rate: str = "1Gbit/s") -> Topology:
    text = f"""
version: 1
name: priced
accelerators:
  a: {{peak: {{bf16: 100TFLOP/s}}, memory: 80GiB, mfu: 0.4, price: 2USD/h}}
  b: {{peak: {{bf16: 100TFLOP/s}}, memory: 80GiB, mfu: 0.4}}
sites:
  - {{name: one, nodes: 1, accelerators_per_node: 8, accelerator: a}}
  - {{name: two, nodes: 1, accelerators_per_node: 8, accelerator: b}}
links:
  - {{between: [one, two], bandwidth: {rate}, rtt: 10ms, egress: 0.02USD/GB}}
failure: {{detect_within: 5s, min_sites: 2}}
security: {{mode: insecure}}
"""
    return load_topology(text, "priced.yaml")


def test_hours_and_bytes() -> None:
    found = money(
        world(), {"one": 8, "two": 4}, {("one", "two"): 1e9, ("two", "one"): 2e9}, 36.0, steps=100
    )
    assert found.accelerators_usd == pytest.approx(8 * 2.0)
    assert found.egress_usd == pytest.approx(100 * 3 * 0.02)
    assert found.total_usd == pytest.approx(22.0)
    assert found.unpriced == ("b",)


def test_a_site_that_takes_no_part_is_not_missed() -> None:
    assert money(world(), {"one": 8, "two": 0}, {}, 36.0).unpriced == ()


def test_sending_where_there_is_no_link_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sent_bytes: there is no link from one to three"):
        money(world(), {"one": 8}, {("one", "three"): 1.0}, 36.0)
