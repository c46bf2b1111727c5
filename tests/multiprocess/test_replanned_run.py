"""A run whose link is cut to a tenth on the way: planned again, and switched at one round at all sites."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from tests.multiprocess.harness import Bench, topology_yaml

STEPS = 40
JOB = f"""
version: 1
name: test
topology: topology.yaml
plan: {{sites: all, replan: {{lasting: 500ms}}}}
exchange: {{codec: fp32, chunk: 64KiB, bucket: 256KiB}}
verify: {{parameters_every: 1}}
trainer:
  compute: modelled
  steps: {STEPS}
  global_batch: 6
  evaluate_every: {STEPS}
  evaluation_batches: 1
  model: {{layers: 2, heads: 2, width: 48, context: 32}}
  data: {{max_bytes: 1MiB}}
"""
FAULTS = """
version: 1
seed: 1
faults:
  - {at: 300ms, link: [a, b], rate: 4Mbit/s}
"""


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_link_that_is_cut_to_a_tenth_is_planned_around(run: Bench) -> None:
    topology = topology_yaml([(1, 1), (1, 1), (1, 1)], rtt="4ms", bandwidth="40Mbit/s")
    topology = topology.replace("[b, c], bandwidth: 40Mbit/s", "[b, c], bandwidth: 20Mbit/s")
    faults = run.folder / "faults.yaml"
    faults.write_text(FAULTS)

    result = run.launch(topology, JOB, "--faults", str(faults)).check()

    # Every step's parameters were the same at all sites, before and after.
    assert result.envelope["data"]["verified_steps"] == 1 + STEPS
    events = run.isthmus("events", "--json").check().envelope["data"]["events"]
    # On a busy machine other links may seem to have drifted too; this one has.
    (first, *_) = [
        each["detail"]
        for each in events
        if each["kind"] == "run.replanned" and _farthest(each["detail"]) == {"a", "b"}
    ]
    assert first["links"][0]["measured"] < 0.3 * first["links"][0]["assumed"], first
    assert first["after_s"] < 0.95 * first["before_s"]
    begun = {
        (each["site"], each["detail"]["round"])
        for each in events
        if each["kind"] == "site.replanned" and each["detail"]["epoch"] == first["epoch"]
    }
    assert begun == {(site, first["from_round"]) for site in "abc"}, json.dumps(events, indent=1)
    assert first["note"] in result.envelope["data"]["notes"]


def _farthest(detail: Mapping[str, Any]) -> set[str]:
    """Return the ends of the link that was farthest off."""
    return {detail["links"][0]["source"], detail["links"][0]["target"]}
