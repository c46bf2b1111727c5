"""Jobs and topologies for simulations: equal sites, a step of about a second."""

import itertools
import math
from collections.abc import Iterator, Sequence

from isthmus.topology.simulator.settings import Settings
from isthmus.topology.simulator.simulation import SimulatedRun
from isthmus.topology.spec.job import Exchange, Job, Model, Reduction, Trainer
from isthmus.topology.spec.world import Accelerator, Fabric, Topology
from tests.fakes.small_worlds import small_site, small_world

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
    sites = (
        small_site(
            index,
            Accelerator(
                name="chip",
                peak_flops_per_s={"bf16": 50e9 * factors[index]},
                memory_bytes=1 << 34,
                mfu=1.0,
            ),
            ranks=counts[index],
            fabric=fabric,
            nic_bytes_per_s=nic_bytes_per_s,
        )
        for index in range(num_sites)
    )
    links = ((*way, bytes_per_s, rtt_s) for way in itertools.permutations(range(num_sites), 2))
    return small_world(sites, links, emulate=True, emulator=emulator)


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


def efficiency(run: SimulatedRun, alone: SimulatedRun, skip: int = 0) -> float:
    """Return the tokens per second of all sites together over the sum of the sites alone.

    Computed over steps, so outages only affect `goodput`. The first `skip` steps do not count.
    """
    together, apart = (
        math.fsum(
            of.tokens(site, skip) / of.step_s(site, skip) for site in range(len(of.work.sites))
        )
        for of in (run, alone)
    )
    return together / apart
