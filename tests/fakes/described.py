"""Jobs that describe their model, and sites of many accelerators, to test the planner's cuts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from isthmus.topology.spec.job import Exchange, Job
from isthmus.topology.spec.plan_wishes import PlanWishes
from isthmus.topology.spec.workload import DescribedModel, Limits
from isthmus.topology.spec.world import Accelerator, Fabric, Topology
from tests.fakes.plannable import a_world

FABRIC = Fabric(node_bytes_per_s=450e9, cluster_bytes_per_s=100e9, latency_s=8e-6)
MODEL = DescribedModel(
    layers=8, width=2048, heads=16, vocabulary=32000, context=2048, global_batch=16
)
"""Half a billion parameters."""
TWO_SITES_YAML = """\
version: 1
name: two
accelerators: {chip: {peak: {bf16: 100TFLOP/s}, memory: 80GiB, mfu: 0.5}}
sites:
  - name: a
    nodes: 2
    accelerators_per_node: 4
    accelerator: chip
    fabric: {node: 450GB/s, cluster: 100GB/s, latency: 8us}
  - {name: b, like: a}
links:
  - {between: [a, b], bandwidth: 1Tbit/s, rtt: 2ms}
"""
"""Two sites of eight accelerators each."""


def described_job(model: DescribedModel = MODEL, **wishes: object) -> Job:
    """Return a job of a script of one's own, whose plan may decide what `wishes` say."""
    return Job(
        name="j",
        topology="t.yaml",
        entrypoint="train.py",
        exchange=Exchange(codec="fp32"),
        plan=dataclasses.replace(PlanWishes(), **wishes),  # type: ignore[arg-type] # by name
        workload=model,
    )


def few_degrees(model: DescribedModel = MODEL, **changes: object) -> DescribedModel:
    """Return a model whose script can do little, so that everything can be enumerated."""
    limits = Limits(context=1, zero_stage=1, virtual_stages=1)
    return dataclasses.replace(model, micro_batch=1, at_most=limits, **changes)  # type: ignore[arg-type] # by name


def sites_of_nodes(
    nodes: Sequence[int],
    links: Iterable[tuple[int, int, float, float]],
    *,
    per_node: int = 4,
    memory_bytes: int = 80 << 30,
    speeds: Sequence[float] | None = None,
    price: float | None = None,
) -> Topology:
    """Return sites s0, s1, ... of so many nodes, and links (one, other, bytes/s, RTT) both ways."""
    world = a_world([1e14] * len(nodes), links, price=price)
    sites = tuple(
        dataclasses.replace(
            site,
            nodes=count,
            accelerators_per_node=per_node,
            fabric=FABRIC,
            accelerator=Accelerator(
                name="chip",
                peak_flops_per_s={"bf16": 1e14 if speeds is None else speeds[site.index]},
                memory_bytes=memory_bytes,
                mfu=0.5,
                price_usd_per_h=price,
            ),
        )
        for site, count in zip(world.sites, nodes, strict=True)
    )
    return dataclasses.replace(world, sites=sites)
