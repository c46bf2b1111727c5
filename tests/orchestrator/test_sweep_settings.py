"""Sweeps, and the documents of the runs that they make."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from isthmus.orchestrator.documents import load_pair
from isthmus.orchestrator.evidence.bench.sweep_settings import (
    Point,
    load_points,
    parse_sweep,
    parse_sweeps,
    planned_runs,
    points,
)
from isthmus.orchestrator.plans import as_launched
from isthmus.sites.trainer.sampler import samples_of
from isthmus.topology.spec.errors import ConfigError
from tests.fakes.benches import a_question

TOPOLOGY = """\
version: 1
name: three
accelerators: {chip: {peak: {bf16: 50GFLOP/s}, memory: 4GiB, mfu: 0.5}}
sites:
  - {name: a, nodes: 1, accelerators_per_node: 2, accelerator: chip, wan: {address: 127.0.0.2}}
  - {name: b, like: a, nodes: 2}
  - {name: c, like: b, accelerators_per_node: 1}
links:
  - {between: [a, b], bandwidth: 100Mbit/s, rtt: 10ms}
  - {between: [b, c], bandwidth: 100Mbit/s, rtt: 10ms}
  - {between: [a, c], bandwidth: 100Mbit/s, rtt: 10ms, measured: {rtt: 12ms}}
coordinator: {site: b}
failure: {min_sites: 3}
emulate: true
"""
JOB = """\
version: 1
name: job
topology: topology.yaml
exchange: {bucket: 256KiB, codec: bf16}
reduction: {tree: star, hub: b}
trainer: {global_batch: 29, steps: 7}
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "topology.yaml").write_text(TOPOLOGY)
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path / "job.yaml"


def load(job: Path, *sweeps: str, **changes: object) -> list[Point]:
    return load_points(a_question(*sweeps, **changes), job, None)


def test_a_sweep_is_a_path_and_its_values() -> None:
    sweep = parse_sweep("sites.0.location={lat: 1, lon: 2}, {lat: 3, lon: 4}")
    assert sweep.path == "sites.0.location"
    assert sweep.values == ("{lat: 1, lon: 2}", "{lat: 3, lon: 4}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rtt", "want PATH=V1,V2"),
        ("a..b=1", "want PATH=V1,V2"),
        ("codec=fp32,,bf16", "want PATH=V1,V2"),
        ("codec=fp32,fp32", "a value twice"),
        ("trainer.steps=1,2", "--steps"),
        ("trainer.compute=real,modelled", "--compute"),
        ("emulate=true,false", "always emulated"),
    ],
)
def test_what_is_no_sweep(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_sweep(text)
    assert message in str(raised.value)
    assert "--sweep" in str(raised.value)


def test_sweeps_must_be_of_different_paths_and_not_too_many() -> None:
    with pytest.raises(ConfigError, match="swept twice"):
        parse_sweeps(["codec=fp32", "exchange.codec=bf16"])
    many = ",".join(map(str, range(100)))
    with pytest.raises(ConfigError, match="10000 settings"):
        parse_sweeps([f"trainer.seed={many}", f"trainer.global_batch={many}"])


def test_every_combination_is_a_setting() -> None:
    found = list(points(parse_sweeps(["a=1,2", "b=x,y"])))
    assert found == [
        {"a": "1", "b": "x"},
        {"a": "1", "b": "y"},
        {"a": "2", "b": "x"},
        {"a": "2", "b": "y"},
    ]
    assert list(points(())) == [{}]


def test_a_star_is_every_position(job: Path) -> None:
    first, second = load(job, "links.*.bandwidth=1Mbit/s,8Mbit/s")
    assert {link.bytes_per_s for link in first.together.topology.links} == {125e3}
    assert {link.bytes_per_s for link in second.together.topology.links} == {1e6}
    assert second.overrides == {"links.*.bandwidth": "8Mbit/s"}


def test_codec_is_short(job: Path) -> None:
    assert [p.together.job.exchange.codec for p in load(job, "codec=fp32,split")] == [
        "fp32",
        "split",
    ]


@pytest.mark.parametrize(
    ("sweep", "source", "message"),
    [
        ("links.*.rtx=5ms", "--sweep links.*.rtx=5ms", "did you mean 'rtt'"),
        ("nonsense=1", "--sweep nonsense=1", "nonsense"),
        ("codec=fp31", "--sweep codec=fp31", "fp31"),
        ("links.*.rtt=5", "--sweep links.*.rtt=5", "without a unit"),
        ("links.7.rtt=5ms", "--sweep links.7.rtt=5ms", "has 3 items"),
        ("exchange.*.codec=fp32", "--sweep exchange.*.codec", "is no list"),
        ("trainer.global_batch=29,3", "global_batch", "want at least"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused_at_once(
    job: Path, sweep: str, source: str, message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        load(job, sweep)
    assert source in str(raised.value)
    assert message in str(raised.value)


def test_a_sweep_that_changes_nothing_is_refused(job: Path) -> None:
    with pytest.raises(ConfigError, match=r"makes no difference.*measured figure"):
        load(job, "links.2.rtt=5ms,20ms")


def test_what_all_sites_run(job: Path) -> None:
    (point,) = load(job, schedule="serial", emulator="relay", overrides=("trainer.seed=5",))
    found = point.together
    assert (found.job.trainer.steps, found.job.trainer.evaluate_every) == (6, 6)
    assert found.job.trainer.compute == "modelled"
    assert found.job.trainer.seed == 5
    assert found.job.exchange.schedule == "serial"
    assert (found.topology.emulate, found.topology.emulator) == (True, "relay")
    assert found.job.verify_every > 0


def test_links_are_emulated_whatever_the_topology_says(job: Path) -> None:
    (point,) = load(job, overrides=("emulate=false",))
    assert point.together.topology.emulate
    assert not point.solo["a"].topology.emulate


def test_without_exchange_parameters_are_not_compared(job: Path) -> None:
    (point,) = load(job, schedule="off")
    assert point.together.job.exchange.schedule == "off"
    assert point.together.job.verify_every == 0


@pytest.mark.parametrize("regime", ["delayed", "{kind: diloco, sync_every: 10}"])
def test_what_exchanges_nothing_has_no_regime(job: Path, regime: str) -> None:
    told = (f"regime={regime}",)
    [together] = load(job, overrides=told)
    assert not together.together.job.regime.is_sync
    [off] = load(job, schedule="off", overrides=told)
    for point in (together, off):
        assert all(each.job.regime.is_sync for each in point.solo.values())
    assert off.together.job.regime.is_sync
    # So settings that differ in it share their solo runs.
    assert together.solo_keys == load(job)[0].solo_keys


@pytest.mark.parametrize("site", ["a", "b", "c"])
def test_what_a_site_runs_alone(job: Path, site: str) -> None:
    (point,) = load(job)
    found, together = point.solo[site], point.together
    (alone,) = found.topology.sites
    was = together.topology.site(site)
    assert dataclasses.replace(alone, index=was.index, nic_bytes_per_s=None) == was
    assert found.topology.links == ()
    assert not found.topology.emulate
    assert found.topology.failure.min_sites == 1
    assert found.job.exchange.schedule == "off"
    assert found.job.exchange.bucket_bytes == together.job.exchange.bucket_bytes
    assert found.job.trainer.steps == together.job.trainer.steps
    assert found.job.verify_every == 0


@pytest.mark.parametrize("global_batch", [8, 9, 29, 48, 61])
def test_a_site_alone_has_the_samples_that_it_has_among_all(job: Path, global_batch: int) -> None:
    (point,) = load(job, overrides=(f"trainer.global_batch={global_batch}",))
    ranks, first = point.together.topology.num_ranks, 0
    for site in point.together.topology.sites:
        shares = [
            len(samples_of(3, global_batch, ranks, first + rank)) for rank in range(site.num_ranks)
        ]
        first += site.num_ranks
        batch = point.solo[site.name].job.trainer.global_batch
        alone = [len(samples_of(3, batch, site.num_ranks, rank)) for rank in range(site.num_ranks)]
        assert sorted(alone) == sorted(shares)


def test_a_user_script_cannot_be_modelled(job: Path) -> None:
    with pytest.raises(ConfigError, match="--compute real"):
        load(job, overrides=("entrypoint=train.py",))
    (point,) = load(job, overrides=("entrypoint=train.py",), compute="real")
    assert point.together.job.entrypoint == "train.py"


def test_settings_that_differ_in_links_and_codec_share_solo_runs(job: Path) -> None:
    found = load(job, "links.*.bandwidth=50Mbit/s,100Mbit/s", "codec=fp32,bf16")
    (keys,) = {tuple(point.solo_keys.items()) for point in found}
    assert len(keys) == 3
    names = [(planned.setting, planned.site) for planned in planned_runs(found, 1)]
    assert names == [(0, "a"), (0, "b"), (0, "c"), *((index, None) for index in range(4))]


def test_settings_that_differ_in_a_site_share_those_of_the_others(job: Path) -> None:
    found = load(job, "sites.2.accelerators_per_node=1,2", overrides=("trainer.global_batch=56",))
    made = list(planned_runs(found, 2))
    # Other shares of the batch make other solo runs: with 8 ranks each takes 7, with 10 fewer.
    assert len(made) == 2 * (2 + 6)
    found = load(
        job,
        "sites.2.fabric={node: 1GB/s, cluster: 1GB/s, latency: 1us},"
        "{node: 2GB/s, cluster: 1GB/s, latency: 1us}",
    )
    made = list(planned_runs(found, 1))
    assert [each.site for each in made if each.setting == 1] == ["c", None]


PLAN = "plan: {}\n"
SLOW = ("links.1.bandwidth=1kbit/s", "links.2.bandwidth=1kbit/s")
"""By itself, c cannot be reached in time: plans leave it out, and are made quickly."""


@pytest.mark.no_cover  # they plan
def test_a_job_that_asks_for_a_plan_is_measured_as_launch_would_run_it(job: Path) -> None:
    job.write_text(JOB.replace("reduction: {tree: star, hub: b}\n", PLAN))
    [point] = load(job, overrides=SLOW)
    assert point.plan is not None
    assert "2 of 3 sites take part" in point.plan
    launched, plan = as_launched(load_pair(job, SLOW))
    assert plan == point.plan
    assert point.together.job.placement == launched.job.placement
    assert point.together.job.exchange == launched.job.exchange
    assert set(point.solo) == {"a", "b"}
    assert not any(each.job.is_to_plan for each in point.solo.values())
    fast, slow = load(job, "links.0.bandwidth=1Gbit/s,1kbit/s", overrides=SLOW)
    assert fast.plan is not None
    assert "2 of 3 sites take part" in fast.plan
    assert slow.plan is not None
    assert "1 of 3 sites take part" in slow.plan


@pytest.mark.no_cover  # they plan
def test_without_an_exchange_the_plan_is_that_with_one(job: Path) -> None:
    job.write_text(JOB.replace("reduction: {tree: star, hub: b}\n", PLAN))
    [point] = load(job, schedule="off", overrides=SLOW)
    [planned] = load(job, overrides=SLOW)
    assert point.plan == planned.plan
    assert point.together.job.exchange.schedule == "off"
    assert point.together.job.placement == planned.together.job.placement


@pytest.mark.no_cover  # they plan
def test_settings_that_a_plan_makes_alike_are_settings_all_the_same(job: Path) -> None:
    job.write_text(JOB.replace("reduction: {tree: star, hub: b}\n", PLAN))
    one, other = load(job, "links.1.rtt=1ms,2ms", overrides=SLOW)
    assert one.plan == other.plan


def test_a_batch_too_small_for_all_ranks_leaves_sites_out(job: Path) -> None:
    text = JOB.replace("reduction: {tree: star, hub: b}\n", PLAN)
    job.write_text(text.replace("global_batch: 29", "global_batch: 3"))
    [point] = load(job)
    assert point.plan is not None
    assert sum(site.num_ranks for site in point.together.topology.sites) <= 3
