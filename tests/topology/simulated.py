"""Jobs and topologies for simulations: equal sites, a step of about a second."""

import itertools
from collections.abc import Iterator, Sequence

from topology.job import Exchange, Job, Model, Reduction, Trainer
from topology.simulator.run import SimulatedRun
from topology.simulator.settings import Settings
from topology.world import Accelerator, Endpoint, Fabric, Failure, Link, Site, Topology

PLAIN = Settings(gateways_take_time=False)
"""Only links and compute, as the closed forms have it."""


def a_topology(
    num_sites: int = 2,
    *,
    bytes_per_s: float = 25e6,
    rtt_s: float = 0.02,
    ranks: Sequence[int] | None = None,
    speeds: Sequence[float] | None = None,
    emulator: str = "relay",
    fabric: Fabric | None = None,
    nic_bytes_per_s: float | None = None,
) -> Topology:
    """Return sites that are all joined alike."""
    counts, factors = ranks or [1] * num_sites, speeds or [1.0] * num_sites
    sites = tuple(
        Site(
            name=f"s{index}",
            index=index,
            nodes=1,
            accelerators_per_node=counts[index],
            accelerator=Accelerator(
                name="chip",
                peak_flops_per_s={"bf16": 50e9 * factors[index]},
                memory_bytes=1 << 34,
                mfu=1.0,
            ),
            address="127.0.0.1",
            fabric=fabric,
            nic_bytes_per_s=nic_bytes_per_s,
        )
        for index in range(num_sites)
    )
    links = tuple(
        Link(
            source=f"s{one}",
            target=f"s{other}",
            bytes_per_s=bytes_per_s,
            rtt_s=rtt_s,
            rtt_origin="rtt",
        )
        for one, other in itertools.permutations(range(num_sites), 2)
    )
    return Topology(
        name="t",
        sites=sites,
        links=links,
        failure=Failure(detect_within_s=15, min_sites=1, start_within_s=120),
        coordinator=Endpoint(host="127.0.0.1", port=0),
        emulate=True,
        emulator=emulator,
    )


def a_job(
    *,
    tree: str = "auto",
    schedule: str = "overlap",
    codec: str = "fp32",
    global_batch: int = 48,
    bucket_bytes: int = 1 << 20,
    layers: int = 4,
    width: int = 256,
    timeline_every: int = 10,
) -> Job:
    """Return a job of modelled compute: 13 MB of gradients, unless the model is another."""
    return Job(
        name="simulated",
        topology="topology.yaml",
        exchange=Exchange(
            codec=codec,
            chunk_bytes=256 << 10,
            bucket_bytes=bucket_bytes,
            channels_per_link=2,
            schedule=schedule,
        ),
        reduction=Reduction(tree=tree),
        timeline_every=timeline_every,
        trainer=Trainer(
            compute="modelled",
            global_batch=global_batch,
            micro_batch=8,
            model=Model(layers=layers, heads=4, width=width, context=128),
        ),
    )


def ends(run: SimulatedRun) -> Iterator[float]:
    """Yield when each site ends each step."""
    for step in run.steps:
        yield from (site.end_s for site in step)
