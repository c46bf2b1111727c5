"""Simulated training: against the closed forms, and what must hold whatever is simulated."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.topology.documents.load import load_job, load_topology
from isthmus.topology.model.buckets import buckets_of
from isthmus.topology.model.step_model import exchange_time_s, step_time
from isthmus.topology.simulator.settings import Settings
from isthmus.topology.simulator.simulation import coding_s, simulate, simulate_alone
from isthmus.topology.spec.compute import num_parameters, step_compute_s
from isthmus.topology.spec.job import Exchange, Job, Model, Reduction, Trainer
from isthmus.topology.spec.world import Fabric
from isthmus.topology.trees.codec_costs import COSTS
from tests.topology.documents import JOB, TOPOLOGY, changed
from tests.topology.simulated import PLAIN, a_job, a_topology, efficiency, ends

TOLERANCE = 0.02
"""What buckets and chunks of a whole size leave: the closed forms know layers and mean chunks."""


@pytest.mark.parametrize("num_sites", [2, 3, 4])
@pytest.mark.parametrize("tree", ["gather", "star"])
@pytest.mark.parametrize("schedule", ["overlap", "serial"])
@pytest.mark.parametrize(("bytes_per_s", "rtt_s"), [(5e6, 0.005), (25e6, 0.08), (125e6, 0.02)])
def test_equal_sites_take_what_the_closed_form_says(
    num_sites: int, tree: str, schedule: str, bytes_per_s: float, rtt_s: float
) -> None:
    topology = a_topology(num_sites, bytes_per_s=bytes_per_s, rtt_s=rtt_s)
    job = a_job(tree=tree, schedule=schedule, global_batch=24 * num_sites)
    run = simulate(job, topology, PLAIN)
    assert run.mean_step_s == pytest.approx(step_time(job, topology).step_s, rel=TOLERANCE)
    if schedule == "serial":
        exchange_s = exchange_time_s(job, topology, 4 * num_parameters(job.trainer.model))
        compute_s = step_compute_s(job, topology, topology.sites[0])
        assert run.mean_step_s == pytest.approx(compute_s + exchange_s, rel=TOLERANCE)


@pytest.mark.parametrize("tree", ["gather", "star"])
@pytest.mark.parametrize("schedule", ["overlap", "serial"])
def test_unequal_sites_settle_at_the_pace_of_the_cycle(tree: str, schedule: str) -> None:
    topology = a_topology(3, speeds=[1.0, 0.7, 0.4])
    job = a_job(tree=tree, schedule=schedule, global_batch=72)
    run = simulate(job, topology, dataclasses.replace(PLAIN, steps=40))
    settled_s = math.fsum(run.step_s(site, skip=10) for site in range(3)) / 3
    assert settled_s == pytest.approx(step_time(job, topology).step_s, rel=TOLERANCE)


def test_slow_start_is_that_of_the_closed_form_once_connections_were_idle() -> None:
    topology = a_topology(2, rtt_s=0.08, bytes_per_s=50e6, emulator="netns")
    job = a_job(schedule="serial", global_batch=48)
    run = simulate(job, topology, PLAIN)
    assert run.mean_step_s == pytest.approx(step_time(job, topology).step_s, rel=TOLERANCE)
    without = simulate(job, topology, dataclasses.replace(PLAIN, slow_start=False))
    assert without.mean_step_s < run.mean_step_s
    relayed = dataclasses.replace(topology, emulator="relay")
    wanted = simulate(job, relayed, dataclasses.replace(PLAIN, slow_start=True))
    assert without.mean_step_s < wanted.mean_step_s <= run.mean_step_s


def test_links_that_cost_nothing_give_an_efficiency_of_one() -> None:
    topology = a_topology(3, bytes_per_s=1e18, rtt_s=0.0, ranks=[1, 2, 3])
    for tree in ("gather", "star", "ring"):
        job = a_job(tree=tree, global_batch=72)
        run = simulate(job, topology, PLAIN)
        assert efficiency(run, simulate_alone(job, topology, PLAIN)) == pytest.approx(1.0)


def test_what_a_step_takes_is_the_sum_of_its_parts_and_the_rest_is_beside_it() -> None:
    topology = a_topology(
        3,
        ranks=[2, 1, 2],
        fabric=Fabric(node_bytes_per_s=1e9, cluster_bytes_per_s=1e9, latency_s=1e-5),
    )
    for schedule in ("overlap", "serial", "off"):
        run = simulate(a_job(schedule=schedule, tree="star", codec="split"), topology)
        for step in run.steps:
            for site in step:
                parts = site.parts
                total = parts.compute_s + parts.intra_s + parts.exposed_inter_s + parts.wait_s
                assert total == pytest.approx(site.end_s - site.begin_s)
                assert (parts.hidden_inter_s > 0) == (schedule == "overlap")
        assert bool(run.links) == (schedule != "off")
        assert any(encode for encode, _ in coding_s(run.work)) == (schedule != "off")
        last = run.steps[-1][0].parts
        assert (last.intra_s > 0) is True, "the last bucket's collectives are never hidden"


def test_buckets_of_kept_steps_go_their_way_in_order() -> None:
    run = simulate(a_job(tree="star", timeline_every=4), a_topology(3), Settings(steps=9))
    kept = [index for index, step in enumerate(run.steps, 1) if step[0].buckets is not None]
    assert kept == [1, 2, 3, 4, 8]
    for index in kept:
        for site in run.steps[index - 1]:
            assert site.buckets is not None
            assert len(site.buckets) == len(run.work.buckets)
            for bucket in site.buckets:
                times = [bucket.submitted_s, bucket.posted_s, bucket.reduced_s, bucket.finished_s]
                assert times == sorted(times)
                assert site.begin_s <= bucket.submitted_s
                assert bucket.finished_s <= site.end_s
                assert bucket.wait_s <= bucket.reduced_s - bucket.posted_s + 1e-12
            assert max(b.submitted_s for b in site.buckets) == pytest.approx(site.computed_s)


def test_buckets_are_those_of_ddp() -> None:
    model = a_job().trainer.model
    whole = buckets_of(model, 1 << 40)
    assert [(each.raw_bytes, each.last_layer) for each in whole] == [(4 * num_parameters(model), 0)]
    cut = buckets_of(model, 1 << 20)
    assert sum(each.raw_bytes for each in cut) == 4 * num_parameters(model)
    assert all(each.raw_bytes >= 1 << 20 for each in cut[:-1])
    # 4 W^2 floats are exactly 1 MiB for W = 256; the head's norm goes with the last block's first.
    assert cut[0].raw_bytes == 2 * 4 * 256 + (1 << 20)
    assert [each.last_layer for each in cut] == sorted((b.last_layer for b in cut), reverse=True)


@pytest.mark.parametrize("sharing", ["fifo", "fair"])
def test_links_carry_what_the_plan_says(sharing: str) -> None:
    topology = a_topology(4)
    raw_bytes = 4 * num_parameters(a_job().trainer.model)
    run = simulate(a_job(tree="star"), topology, Settings(steps=2, sharing=sharing))
    assert len(run.links) == 6
    for link in run.links:
        assert link.raw_bytes == pytest.approx(raw_bytes)
        assert link.sent_bytes == pytest.approx(raw_bytes, rel=0.001)
        assert link.busy_s == pytest.approx(link.sent_bytes / 25e6)
    ring = simulate(a_job(tree="ring"), topology, Settings(steps=2, sharing=sharing))
    assert sum(link.raw_bytes for link in ring.links) == pytest.approx(6 * raw_bytes)
    assert len(ring.links) == 8


@pytest.mark.slow
def test_sharing_links_fairly_delays_but_a_little_and_narrow_ports_much() -> None:
    job, topology = a_job(tree="gather", global_batch=72), a_topology(3)
    fifo = simulate(job, topology, PLAIN)
    fair = simulate(job, topology, dataclasses.replace(PLAIN, sharing="fair"))
    assert fair.mean_step_s == pytest.approx(fifo.mean_step_s, rel=0.01)
    narrow = a_topology(3, nic_bytes_per_s=25e6)
    ported = simulate(job, narrow, PLAIN)
    # Half of each link's bandwidth is left.
    halved = simulate(job, a_topology(3, bytes_per_s=12.5e6), PLAIN)
    assert ported.mean_step_s == pytest.approx(halved.mean_step_s, rel=0.02)
    wide = simulate(job, a_topology(3, nic_bytes_per_s=50e6), PLAIN)
    assert wide.mean_step_s == fifo.mean_step_s


def test_gateways_take_time_where_codecs_are_slow() -> None:
    job, topology = a_job(codec="split"), a_topology(2, bytes_per_s=1e9, rtt_s=0.0)
    slow, free = simulate(job, topology), simulate(job, topology, PLAIN)
    encode_s, decode_s = coding_s(slow.work)[0]
    grad_bytes, cost = 4 * num_parameters(job.trainer.model), COSTS["split"]
    assert encode_s == pytest.approx(grad_bytes / cost.encode_bytes_per_s)
    assert decode_s == pytest.approx(2 * grad_bytes / cost.decode_bytes_per_s)
    assert free.mean_step_s < slow.mean_step_s < free.mean_step_s + encode_s + decode_s + 0.05


@pytest.mark.slow
@pytest.mark.parametrize("speeds", [[1.0, 1.0, 1.0], [1.0, 0.7, 0.4]])
@pytest.mark.parametrize("tree", ["gather", "star", "ring"])
def test_steps_that_repeat_themselves_are_those_that_a_simulation_would_make(
    tree: str, speeds: list[float]
) -> None:
    job, topology = a_job(tree=tree, global_batch=72), a_topology(3, speeds=speeds)
    reused = simulate(job, topology, Settings(steps=30))
    each = simulate(job, topology, Settings(steps=30, reuse_steps=False))
    assert list(ends(reused)) == pytest.approx(list(ends(each)), rel=1e-7)
    assert reused.num_actions < each.num_actions


def test_few_flows_tell_the_same_as_many() -> None:
    job, topology = a_job(tree="ring", global_batch=96, bucket_bytes=16 << 20), a_topology(4)
    fine = simulate(job, topology, PLAIN)
    coarse = simulate(job, topology, dataclasses.replace(PLAIN, flows_per_step=60))
    assert coarse.num_actions < fine.num_actions / 2
    assert coarse.mean_step_s == pytest.approx(fine.mean_step_s, rel=0.05)
    assert [each.raw_bytes for each in coarse.links] == pytest.approx(
        [each.raw_bytes for each in fine.links], rel=0.5
    )


@pytest.mark.slow
@settings(max_examples=25)
@given(
    num_sites=st.integers(2, 4),
    tree=st.sampled_from(["gather", "star", "ring", "auto"]),
    schedule=st.sampled_from(["overlap", "serial"]),
    bytes_per_s=st.floats(1e6, 1e9),
    rtt_s=st.floats(0.0, 0.2),
    factor=st.floats(1.0, 10.0),
)
def test_more_bandwidth_is_never_slower(
    num_sites: int, tree: str, schedule: str, bytes_per_s: float, rtt_s: float, factor: float
) -> None:
    if tree == "ring" and num_sites == 2:
        tree = "star"
    job = a_job(tree=tree, schedule=schedule, layers=2, width=128, global_batch=8 * num_sites)
    narrow = simulate(job, a_topology(num_sites, bytes_per_s=bytes_per_s, rtt_s=rtt_s))
    wide = simulate(job, a_topology(num_sites, bytes_per_s=factor * bytes_per_s, rtt_s=rtt_s))
    # Trees that meet on a link may pass it in another order: a granule is what that can cost.
    assert wide.mean_step_s <= narrow.mean_step_s * 1.01
    computes_s = step_compute_s(job, a_topology(num_sites), a_topology(num_sites).sites[0])
    assert wide.mean_step_s >= computes_s - 1e-9


def test_units_do_not_matter() -> None:
    texts = [
        changed(changed(TOPOLOGY, "bandwidth: 10Gbit/s", f"bandwidth: {rate}"), "rtt: 62ms", rtt)
        for rate, rtt in (("10Gbit/s", "rtt: 62ms"), ("10000Mbit/s", "rtt: 0.062s"))
    ]
    one, other = (load_topology(text, "topology.yaml") for text in texts)
    job = load_job(JOB, "job.yaml")
    assert simulate(job, one).steps == simulate(job, other).steps


@pytest.mark.slow
def test_sixteen_sites_of_a_thousand_accelerators_are_few_actions() -> None:
    """A hundred steps of 64 billion parameters.

    As much as three or four, for they repeat themselves.
    """
    topology = a_topology(16, bytes_per_s=50e9, rtt_s=0.08, ranks=[1000] * 16, emulator="netns")
    exchange = Exchange(codec="bf16", chunk_bytes=4 << 20, bucket_bytes=256 << 20)
    model = Model(layers=80, heads=64, width=8192, context=4096)
    trainer = Trainer(compute="modelled", global_batch=16_000, micro_batch=1, model=model)
    job = Job(
        name="large",
        topology="topology.yaml",
        exchange=exchange,
        reduction=Reduction(tree="star"),
        trainer=trainer,
    )
    run = simulate(job, topology, Settings(steps=100))
    assert len(run.steps) == 100
    assert run.num_actions < 300_000
    assert run.wall_s == pytest.approx(100 * run.mean_step_s, rel=0.01)
