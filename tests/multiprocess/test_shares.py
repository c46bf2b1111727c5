"""Sites get parts of the batch by how fast they compute, while the run goes on."""

from __future__ import annotations

import pytest

from tests.multiprocess.harness import Bench, job_yaml, topology_yaml

STEPS = 200
SLOW = "  slow: {peak: {fp32: 800MFLOP/s}, memory: 2GiB, mfu: 0.3}\n"
"""Half as fast as the others."""
PLACEMENT = "placement: [{site: a, sequences: 12}, {site: b, sequences: 12}]\n"


@pytest.mark.multiprocess
@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_site_that_is_half_as_fast_gets_half_as_much(run: Bench) -> None:
    topology = topology_yaml([(1, 1), (1, 1)], rtt="2ms").replace("50GFLOP/s", "1600MFLOP/s")
    topology = topology.replace("sites:\n", f"{SLOW}sites:\n")
    second = "- {name: b, nodes: 1, accelerators_per_node: 1, accelerator: "
    topology = topology.replace(f"{second}core", f"{second}slow")
    job = job_yaml(steps=STEPS, global_batch=24).replace("reduction: {tree: auto}\n", PLACEMENT)
    job = job.replace("  micro_batch", "  compute: modelled\n  micro_batch")
    path = run.write(topology, job + "plan: {replan: {lasting: 500ms}}\n")

    result = run.isthmus("launch", str(path), "--json").check()

    assert result.envelope["data"]["verified_steps"] == 1 + STEPS
    events = run.isthmus("events", "--json").check().envelope["data"]["events"]
    (replanned,) = [each for each in events if each["kind"] == "run.replanned"]
    assert replanned["detail"]["parts"] == {"a": 16, "b": 8}
    samples: dict[int, dict[str, float]] = {}
    for each in run.metrics():
        if each["kind"] == "step":
            samples.setdefault(each["step"], {})[each["site"]] = each["values"]["site_samples"]
    parts = [tuple(sorted(samples[step].items())) for step in sorted(samples)]
    assert len(parts) == STEPS
    before, after = (("a", 12.0), ("b", 12.0)), (("a", 16.0), ("b", 8.0))
    assert parts == [before] * parts.count(before) + [after] * parts.count(after)
    assert parts[-1] == after
