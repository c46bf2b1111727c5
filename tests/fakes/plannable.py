"""Jobs and topologies for tests of the planner: made in code, from a seed where there are many."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Sequence

from isthmus.topology.spec.job import Exchange, Job, Model, Trainer
from isthmus.topology.spec.plan_wishes import PlanWishes
from isthmus.topology.spec.world import Accelerator, Topology
from tests.fakes.small_worlds import small_site, small_world

SMALL = Model(layers=2, heads=2, width=64, context=32)
"""A hundred thousand parameters."""
FACTORS = (1.01, 1.1, 1.5, 3.0, 10.0)
"""How many times as wide links become."""


def a_world(
    speeds: Sequence[float],
    links: Iterable[tuple[int, int, float, float]],
    *,
    ranks: Sequence[int] | None = None,
    price: float | None = None,
    egress: float = 0.0,
) -> Topology:
    """Return sites s0, s1, ... with these FLOP/s a rank, and links both ways.

    `links` holds (one, other, bytes/s, RTT).
    """
    sites = (
        small_site(
            index,
            Accelerator(
                name=f"chip{index}",
                peak_flops_per_s={"bf16": speed},
                memory_bytes=1 << 30,
                mfu=1.0,
                price_usd_per_h=price,
            ),
            ranks=1 if ranks is None else ranks[index],
        )
        for index, speed in enumerate(speeds)
    )
    directed = (
        (*way, rate, rtt_s)
        for one, other, rate, rtt_s in links
        for way in ((one, other), (other, one))
    )
    return small_world(sites, directed, egress=egress, emulate=True, emulator="relay")


def a_random_world(
    chance: random.Random,
    num_sites: int,
    *,
    density: float = 1.0,
    rates: tuple[float, float] = (5.5, 8.0),
) -> Topology:
    """Return sites of several speeds, joined: by a random tree, and by more links with `density`.

    `rates` are between which powers of ten the links' bytes per second lie.
    """
    pairs = {(chance.randrange(child), child) for child in range(1, num_sites)}
    pairs |= {
        (one, other)
        for other in range(num_sites)
        for one in range(other)
        if chance.random() < density
    }
    links = [
        (one, other, 10 ** chance.uniform(*rates), chance.uniform(0.002, 0.2))
        for one, other in sorted(pairs)
    ]
    return a_world([chance.choice((4e8, 2e8, 1e8)) for _ in range(num_sites)], links)


def widened(topology: Topology, names: frozenset[str] | None, factor: float) -> Topology:
    """Return a topology with the links between two sites so many times as wide; None: all links."""
    links = tuple(
        dataclasses.replace(link, bytes_per_s=link.bytes_per_s * factor)
        if names is None or {link.source, link.target} == names
        else link
        for link in topology.links
    )
    return dataclasses.replace(topology, links=links)


def randomly_widened(chance: random.Random, topology: Topology) -> Topology:
    """Return a topology with all links, or those between two sites, some times as wide."""
    picked = chance.choice(topology.links)
    names = None if chance.random() < 0.3 else frozenset((picked.source, picked.target))
    return widened(topology, names, chance.choice(FACTORS))


def a_job(batch: int = 16, **wishes: object) -> Job:
    """Return a job of modelled compute, whose plan may decide what `wishes` say."""
    return Job(
        name="j",
        topology="t.yaml",
        exchange=Exchange(codec="fp32", chunk_bytes=64 << 10, bucket_bytes=256 << 10),
        trainer=Trainer(compute="modelled", global_batch=batch, micro_batch=2, model=SMALL),
        plan=dataclasses.replace(PlanWishes(), **wishes),  # type: ignore[arg-type] # by name
    )


def a_job_of_one_size(batch: int, **wishes: object) -> Job:
    """Return a job whose chunks and buckets have one size: plans are made faster."""
    job = a_job(batch, **wishes)
    one = dataclasses.replace(
        job.exchange, window_bytes=job.exchange.chunk_bytes, schedule="serial"
    )
    return dataclasses.replace(job, exchange=one)
