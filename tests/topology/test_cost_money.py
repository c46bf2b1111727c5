"""Money of a run."""

from __future__ import annotations

import pytest

from isthmus.topology.cost.money import accelerators_usd, egress_usd
from isthmus.topology.documents.load import load_topology
from isthmus.topology.spec.world import Topology


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
    topology = world()
    assert accelerators_usd(topology, {"one": 8, "two": 4}, 3600.0) == pytest.approx(8 * 2.0)
    sent = {("one", "two"): 1e9, ("two", "one"): 2e9}
    assert egress_usd(topology, sent) == pytest.approx(3 * 0.02)


def test_sending_where_there_is_no_link_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sent_bytes: there is no link from one to three"):
        egress_usd(world(), {("one", "three"): 1.0})
