"""Figures of all-reduce benchmarks against numbers worked out by hand, and Gloo over real links.

What the runs of an all-reduce benchmark are told.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from isthmus.orchestrator.evidence.bench.allreduce_baselines import (
    LOOPBACK,
    measure_baseline,
    outputs_of,
    require_full_mesh,
)
from isthmus.orchestrator.evidence.bench.allreduce_bench import (
    PAYLOAD_SHARE,
    Asked,
    Figures,
    Question,
    combinations,
    figures_of,
)
from isthmus.orchestrator.evidence.bench.allreduce_conditions import (
    Conditions,
    others_bytes_per_s,
    varying_script,
)
from isthmus.orchestrator.evidence.record.measured_steps import MeasurementError
from isthmus.protos import metrics
from isthmus.topology.faults.loading import load_faults
from isthmus.topology.faults.script import Change, expand
from isthmus.topology.model.step_model import exchange_time_s
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.job import Exchange, Job, Reduction
from isthmus.topology.spec.world import CrossTraffic, Emulation, Topology
from tests.fakes import benches
from tests.fakes.measured_allreduces import link_totals, repetition

SITES = benches.SITES
TOPOLOGY = benches.a_topology()
LINK = TOPOLOGY.links[0]
SIZE_BYTES = 100 << 20
ASKED = Asked(
    job=Job(name="x", topology="t", exchange=Exchange(codec="fp32")),
    topology=TOPOLOGY,
    size_bytes=SIZE_BYTES,
    warmup=1,
    repeats=3,
    emulator="netns",
)


def records(asked: Asked = ASKED, sent_share: float = 1.0) -> list[dict[str, Any]]:
    """Two sites; repetition n takes n + 1 s, of which the second site misses the first 0.25 s."""
    found = [
        repetition(
            site,
            step,
            begin_s=100.0 * step + 0.25 * index,
            end_s=100.0 * step + 1.25 + step - 0.1 * index,
            gateways_cpu_s=0.2 * (1 + index),
        )
        for step in range(asked.count)
        for index, site in enumerate(SITES)
    ]
    found[-2]["values"][metrics.RELATIVE_ERROR] = 0.125
    raw_bytes = float(asked.count * asked.size_bytes)
    found += [
        link_totals(*pair, sent_bytes=sent_share * raw_bytes, raw_bytes=raw_bytes)
        for pair in (SITES, SITES[::-1])
    ]
    return found


def figures(asked: Asked = ASKED, sent_share: float = 1.0) -> Figures:
    return figures_of(records(asked, sent_share), asked)


def test_a_repetition_lasts_from_the_last_begin_to_the_last_end() -> None:
    found = figures()
    assert found.times.cold_s == pytest.approx(1.0)
    assert found.times.all_s == pytest.approx((2.0, 3.0, 4.0))
    assert (found.times.min_s, found.times.median_s) == pytest.approx((2.0, 3.0))
    assert found.times.max_s == pytest.approx(4.0)
    assert found.algorithm_bytes_per_s == pytest.approx(SIZE_BYTES / 3)
    assert found.relative_error == 0.125


def test_links_carry_a_repetitions_part_of_their_totals() -> None:
    found = figures(sent_share=0.25)
    assert [(each.source, each.target) for each in found.links] == [SITES, SITES[::-1]]
    assert found.site_sent_bytes == SIZE_BYTES / 4
    for link in found.links:
        assert link.sent_bytes == SIZE_BYTES / 4
        assert link.share == pytest.approx(SIZE_BYTES / 4 / (LINK.bytes_per_s * 3.0))


@pytest.mark.parametrize(("emulator", "share"), [("netns", PAYLOAD_SHARE), ("relay", 1.0)])
def test_the_bound_of_a_gather_is_its_bytes_and_half_a_round_trip(
    emulator: str, share: float
) -> None:
    found = figures(dataclasses.replace(ASKED, emulator=emulator), sent_share=0.5)
    expected_s = SIZE_BYTES / 2 / (share * LINK.bytes_per_s) + LINK.rtt_s / 2
    # wire_time adds the headers of frames to bytes that hold them already: 69 a chunk of 128 KiB.
    assert found.bound_s == pytest.approx(expected_s, rel=6e-4)
    assert found.bound_s is not None
    assert found.over_bound == pytest.approx(3.0 / found.bound_s)


def test_the_bound_of_a_tree_is_wire_times_without_slow_start() -> None:
    job = dataclasses.replace(ASKED.job, reduction=Reduction(tree="star"))
    warm = dataclasses.replace(
        TOPOLOGY,
        emulate=True,
        emulator="relay",
        links=tuple(
            dataclasses.replace(link, bytes_per_s=PAYLOAD_SHARE * link.bytes_per_s)
            for link in TOPOLOGY.links
        ),
    )
    found = figures(dataclasses.replace(ASKED, job=job))
    assert found.bound_s == pytest.approx(exchange_time_s(job, warm, SIZE_BYTES), rel=2e-4)


def test_without_an_emulated_wan_nothing_is_compared_with_links() -> None:
    found = figures(dataclasses.replace(ASKED, emulator="none"))
    assert found.bound_s is None
    assert found.over_bound is None
    assert all(link.share is None for link in found.links)


def test_cpu_is_the_mean_over_sites_after_the_warm_up() -> None:
    found = figures()
    num_gb = SIZE_BYTES / 1e9
    assert found.gateways_cpu_s_per_gb == pytest.approx((0.2 + 0.4) / 2 / num_gb)
    assert found.ranks_cpu_s_per_gb == pytest.approx(0.5 / num_gb)


def without(found: Iterable[dict[str, Any]], site: str, step: int) -> list[dict[str, Any]]:
    return [each for each in found if (each["site"], each["step"]) != (site, step)]


def test_a_repetition_that_is_missing_is_named() -> None:
    with pytest.raises(
        MeasurementError, match=f"rank 0 of {SITES[1]} has no record of repetition 3 of 4"
    ):
        figures_of(without(records(), SITES[1], 2), ASKED)


@pytest.mark.parametrize("step", [0, 3])
def test_results_that_differ_in_a_bit_are_an_error(step: int) -> None:
    found = records()
    for each in found:
        if (each["site"], each["step"]) == (SITES[1], step) and each["kind"] == metrics.ALLREDUCE:
            each["labels"] = {metrics.DIGEST: "another"}
    with pytest.raises(MeasurementError, match=rf"repetition {step + 1}: the results of .* differ"):
        figures_of(found, ASKED)


def test_gloo_is_refused_where_sites_cannot_reach_each_other() -> None:
    one_way = dataclasses.replace(TOPOLOGY, links=TOPOLOGY.links[:1])
    with pytest.raises(ConfigError, match=f"none from {LINK.target} to {LINK.source}"):
        require_full_mesh(one_way, ["tcp"])
    require_full_mesh(TOPOLOGY, ["gloo", "tcp"])


def test_a_flow_of_others_is_the_mean_over_links_and_over_the_time_of_repetitions() -> None:
    topology = beside(CrossTraffic(flows=2))
    # 1000 B/s to the first site; to the second 3000 B/s, but none from 3 s on.
    received = {
        SITES[0]: [(0.0, 100.0), (10.0, 10_100.0)],
        SITES[1]: [(0.0, 1.0), (3.0, 9_001.0), (10.0, 9_001.0)],
    }
    found = others_bytes_per_s(received, [(1.0, 2.0), (4.0, 7.0)], topology)
    assert found == pytest.approx((4 * 1000 + 1 * 3000) / 4 / 4)
    assert others_bytes_per_s({}, [(1.0, 2.0)], TOPOLOGY) is None


@pytest.mark.parametrize(
    "samples",
    [
        [],
        [(1.5, 10.0), (3.0, 20.0)],
        [(0.0, 10.0), (1.9, 20.0)],
        [(0.0, 0.0), (1.0, 0.0), (3.0, 9)],
    ],
    ids=["none", "late", "ended", "nothing yet"],
)
def test_cross_traffic_that_was_not_under_way_is_an_error(
    samples: list[tuple[float, float]],
) -> None:
    received = {SITES[0]: [(0.0, 1.0), (9.0, 2.0)], SITES[1]: samples}
    with pytest.raises(MeasurementError, match=f"to {SITES[1]} was not under way"):
        others_bytes_per_s(received, [(1.0, 2.0)], beside(CrossTraffic(flows=1)))


def beside(traffic: CrossTraffic) -> Topology:
    return dataclasses.replace(TOPOLOGY, emulation=Emulation(cross_traffic=traffic))


def test_the_fair_bound_is_the_bound_on_links_that_are_shared() -> None:
    topology = beside(CrossTraffic(flows=3))
    asked = dataclasses.replace(ASKED, topology=topology)
    received = {site: [(0.0, 1.0), (1000.0, 1e9)] for site in SITES}
    found = figures_of(records(), asked, received)
    # The model adds headers of frames, whose chunks are smaller on slower links.
    bytes_per_s = PAYLOAD_SHARE * LINK.bytes_per_s / 4
    assert found.bound_s == figures().bound_s
    assert found.fair_bound_s == pytest.approx(SIZE_BYTES / bytes_per_s + LINK.rtt_s / 2, rel=2e-3)
    assert found.fair_bound_s is not None
    assert found.over_fair_bound == pytest.approx(3.0 / found.fair_bound_s)
    assert found.others_bytes_per_s == pytest.approx(1e6 / 3, rel=1e-6)


def test_bounds_are_those_of_the_bandwidth_that_there_is() -> None:
    told = dataclasses.replace(
        TOPOLOGY,
        links=tuple(
            dataclasses.replace(each, bytes_per_s=2 * each.bytes_per_s) for each in TOPOLOGY.links
        ),
        emulation=Emulation(described=2.0),
    )
    found = figures(dataclasses.replace(ASKED, topology=told))
    assert found.bound_s == pytest.approx(figures().bound_s, rel=1e-3)
    assert [each.share for each in found.links] == [each.share for each in figures().links]


def test_conditions_become_overrides_of_every_link() -> None:
    conditions = Conditions(
        cross_traffic=CrossTraffic(flows=2, congestion="cubic"),
        loss=0.001,
        jitter_s=0.005,
        queue="0.5BDP",
        described=2.0,
        congestion="bbr",
    )
    assert conditions.overrides([{}, {"measured": {"loss": "1%"}}]) == [
        "links.0.loss=0.001",
        "links.0.jitter=5000000ns",
        "links.0.congestion=bbr",
        "links.1.measured.loss=0.001",
        "links.1.jitter=5000000ns",
        "links.1.congestion=bbr",
        "emulation.queue=0.5BDP",
        "emulation.described=2.0",
        "emulation.congestion=bbr",
        "emulation.cross_traffic={flows: 2, congestion: cubic}",
    ]
    assert Conditions().overrides([{}]) == []


def test_links_that_vary_have_half_their_rate_every_other_five_seconds() -> None:
    changes = expand(load_faults(varying_script(TOPOLOGY, 20.0), "x", TOPOLOGY), None)
    halves = [
        (each.at_s, each.change.figures()["bytes_per_s"])
        for each in changes
        if isinstance(each.change, Change)
        and each.change.kind == "shape"
        and each.change.source == LINK.source
    ]
    assert [at_s for at_s, rate in halves if rate == pytest.approx(LINK.bytes_per_s / 2)] == [5, 15]
    with pytest.raises(ConfigError, match="choose a shorter --timeout"):
        varying_script(TOPOLOGY, 1e6)


def fast(topology: Topology) -> Topology:
    links = (dataclasses.replace(each, bytes_per_s=1e8, rtt_s=0.002) for each in topology.links)
    return dataclasses.replace(topology, links=tuple(links))


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.usefixtures("needs_root_netns")
@pytest.mark.exhaustive
def test_gloo_over_emulated_packets() -> None:
    found = measure_baseline(
        "gloo", fast(TOPOLOGY), 1 << 20, warmup=1, repeats=2, is_emulated=True, timeout_s=60.0
    )
    assert len(found.times.all_s) == 2
    assert found.times.min_s > 0.01  # 1 MiB at 100 MB/s: it did cross the link
    assert found.cpu_s_per_gb > 0


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.multiprocess
def test_two_gloo_processes_a_site_reduce_their_own_parts(tmp_path: Path) -> None:
    command = [
        *("isthmus.sites.bench.gloo", "--size-bytes", "4096", "--count", "2", "--timeout", "60"),
        *("--world-size", "4", "--lanes", "2"),
        *("--store", str(tmp_path / "store"), "--device", LOOPBACK),
    ]
    east, east2, west, west2 = outputs_of(
        "gloo", command, dict.fromkeys(["east0", "east1", "west0", "west1"]), tmp_path, 60.0
    )
    assert [len(each["repeats"]) for each in (east, east2, west, west2)] == [2, 2, 2, 2]
    assert east["digest"] == west["digest"] != east2["digest"] == west2["digest"]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.multiprocess
@pytest.mark.usefixtures("needs_root_netns")
def test_plain_tcp_over_emulated_packets_beside_others() -> None:
    topology = dataclasses.replace(
        fast(TOPOLOGY),
        emulation=Emulation(congestion="reno", cross_traffic=CrossTraffic(flows=1)),
    )
    found = measure_baseline(
        "tcp", topology, 1 << 20, warmup=1, repeats=2, is_emulated=True, timeout_s=60.0
    )
    assert len(found.times.all_s) == 2
    assert found.times.min_s > 0.01  # 1 MiB at 100 MB/s: it did cross the link
    assert found.others_bytes_per_s is not None
    assert found.others_bytes_per_s > 0


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_gloo_process_that_fails_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(
        "isthmus.orchestrator.evidence.bench.allreduce_baselines.LOOPBACK", "no-such-device"
    )
    with pytest.raises(MeasurementError, match=rf"Gloo at ({'|'.join(SITES)}) failed: .*"):
        measure_baseline(
            "gloo", TOPOLOGY, 4096, warmup=0, repeats=1, is_emulated=False, timeout_s=60.0
        )
    assert not list(tmp_path.iterdir())


TOPOLOGY_YAML = """\
version: 1
name: two
sites:
  - {name: east, nodes: 1, accelerators_per_node: 1, accelerator: cpu}
  - {name: west, like: east}
links:
  - {between: [east, west], bandwidth: 200Mbit/s, rtt: 80ms}
security: {mode: insecure}
"""


def told(folder: Path, *overrides: str, emulator: str | None) -> tuple[float, float, int, int]:
    """Return the link's rate and round trip, the chunk and the bucket."""
    path = folder / "topology.yaml"
    path.write_text(TOPOLOGY_YAML)
    question = Question(
        overrides=overrides,
        warmup=1,
        repeats=1,
        is_one_rank_a_site=True,
        is_copied=False,
    )
    ((_, pair),) = combinations(
        question,
        path,
        overrides,
        sizes_bytes=(1 << 20,),
        codecs=("fp32",),
        trees=(),
        emulator=emulator,
    )
    link = pair.topology.links[0]
    exchange = pair.job.exchange
    return link.bytes_per_s, link.rtt_s, exchange.chunk_bytes, exchange.bucket_bytes


@pytest.mark.parametrize("emulator", [None, "netns"])
def test_emulated_links_are_those_of_the_topology(tmp_path: Path, emulator: str | None) -> None:
    assert told(tmp_path, emulator=emulator) == (25e6, 0.08, 2 << 20, 4 << 20)


def test_without_emulation_sites_are_told_of_this_machines_links(tmp_path: Path) -> None:
    assert told(tmp_path, emulator="none") == (12.5e9, 1e-4, 8 << 20, 64 << 20)


def test_what_the_user_says_of_links_chunks_and_buckets_stands(tmp_path: Path) -> None:
    own = ("links.0.rtt=10ms", "exchange.chunk=2MiB", "exchange.bucket=8MiB")
    assert told(tmp_path, *own, emulator="none") == (25e6, 0.01, 2 << 20, 8 << 20)
    assert told(tmp_path, *own[:1], emulator="none") == (25e6, 0.01, 8 << 20, 64 << 20)
