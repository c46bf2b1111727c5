"""A run that does what its plan says: one site left out, the batch uneven over the others."""

from __future__ import annotations

import pytest

from isthmus.sites.trainer.reference import train_alone
from isthmus.topology.documents.load import load_job
from tests.multiprocess.harness import Bench, job_yaml, topology_yaml

STEPS = 6
SLOW = "  slow: {peak: {fp32: 10MFLOP/s}, memory: 2GiB, mfu: 0.3}\n"


@pytest.mark.multiprocess
@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_plan_is_executed(run: Bench) -> None:
    topology = topology_yaml([(1, 1), (1, 1), (1, 1)], rtt="2ms").replace("50GFLOP/s", "30MFLOP/s")
    # The second site computes a third as fast, and the third is behind links that nothing crosses
    # in time.
    topology = topology.replace("sites:\n", f"{SLOW}sites:\n")
    second = "- {name: b, nodes: 1, accelerators_per_node: 1, accelerator: "
    topology = topology.replace(f"{second}core", f"{second}slow")
    for pair in ("[a, c]", "[b, c]"):
        link = f"- {{between: {pair}, bandwidth: "
        topology = topology.replace(f"{link}400Mbit/s", f"{link}10kbit/s")
    job = job_yaml(steps=STEPS, codec="fp32", global_batch=13)
    path = run.write(topology, job)
    plan = run.folder / "plan.yaml"
    decided = run.isthmus("plan", str(path), "--out", str(plan), "--json").check().envelope
    placement = {
        each["site"]: each["sequences"]
        for each in decided["data"]["plan"]["decisions"]["placement"]
    }
    assert set(placement) == {"a", "b"}
    assert placement["a"] >= 2 * placement["b"]

    result = run.isthmus("launch", str(path), "--plan", str(plan), "--json").check()

    assert result.envelope["data"]["verified_steps"] == 1 + STEPS
    steps = [each for each in run.metrics() if each["kind"] == "step"]
    context = load_job(job, "job.yaml").trainer.model.context
    tokens = {each["site"]: each["values"]["site_tokens"] for each in steps}
    assert tokens == {site: count * context for site, count in placement.items()}
    assert not (run.run_folder() / "sites" / "c").exists(), "no agent was started there"
    alone = train_alone(load_job(job, "job.yaml"), run.folder)
    # As in test_same_training: the same sums in another order.
    assert run.losses() == pytest.approx(alone.losses, rel=1e-5)
