"""Figures of runs and settings, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from orchestrator.evidence.bench.scaling import predict, result_of
from orchestrator.evidence.record.bench_record import Failed, Run, interval, t_95
from orchestrator.evidence.record.measured_steps import MeasurementError, measure
from tests.fakes import benches
from tests.fakes.measured_runs import link_record, step_record
from topology.cost.compute import layer_times, num_parameters, step_compute_s
from topology.model.step_model import exchange_time_s
from topology.world import Topology

TOPOLOGY = benches.a_topology()
SITES = benches.SITES


def test_an_interval_is_students() -> None:
    # Mean 3, s = sqrt(2.5), n = 5: 2.776 * 1.5811 / 2.2361.
    found = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.mean == 3.0
    assert found.half_width == pytest.approx(1.963, abs=1e-3)
    assert found.values == (1.0, 2.0, 3.0, 4.0, 5.0)


def test_a_single_value_has_no_interval() -> None:
    assert interval([0.9]).half_width is None


def test_quantiles_between_rows_are_the_wider_ones() -> None:
    assert t_95(1) == 12.706
    assert t_95(30) == t_95(35) == 2.042
    assert t_95(45) == 2.021
    assert t_95(1000) == 1.980


def records(slow_step: int = 1) -> list[dict[str, object]]:
    """Two sites, steps 1 to 4 of 0.5 s but for one that took 9 s; 1000 and 3000 tokens."""
    return [
        step_record(
            site, step, step_s=9.0 if step == slow_step else 0.5, tokens=tokens, wire_bytes=600.0
        )
        for step in range(1, 5)
        for site, tokens in zip(SITES, (1000.0, 3000.0), strict=True)
    ]


def test_warm_up_does_not_count() -> None:
    found = measure(records(slow_step=1), TOPOLOGY, warmup_steps=1, steps=3)
    assert found.step_s == 0.5
    assert found.tokens_per_step == 4000
    assert found.tokens_per_s == 8000
    assert found.split.compute_s == pytest.approx(0.4)
    assert found.split.exposed_inter_s == pytest.approx(0.1)


def test_what_counts_does() -> None:
    found = measure(records(slow_step=4), TOPOLOGY, warmup_steps=1, steps=3)
    assert found.step_s == pytest.approx(10 / 3)
    assert found.tokens_per_s == pytest.approx(4000 / (10 / 3))


def test_sites_that_do_not_wait_have_a_pace_each() -> None:
    lines = [
        step_record(site, 1, step_s=step_s, tokens=1000.0)
        for site, step_s in zip(SITES, (0.5, 1.0), strict=True)
    ]
    assert measure(lines, TOPOLOGY, warmup_steps=0, steps=1).tokens_per_s == 3000


def test_links_totals_are_spread_over_steps_as_the_first_rank_sent() -> None:
    # Two nodes; their gateways together sent 4000 bytes, the first rank 600 in each of four steps.
    lines = [
        *records(),
        link_record(*SITES, sent_bytes=1.0),
        link_record(*SITES, sent_bytes=3000.0),
        link_record(*SITES, sent_bytes=1000.0, node="1"),
    ]
    found = measure(lines, TOPOLOGY, warmup_steps=1, steps=3)
    assert [(each.source, each.bytes_per_step) for each in found.links] == [
        (SITES[0], 1000.0),
        (SITES[1], 0.0),  # no totals came from there
    ]
    assert found.wire_ratio == 0.5
    nothing = measure(records(), TOPOLOGY, warmup_steps=1, steps=3)
    assert nothing.wire_ratio is None


def test_missing_steps_and_figures_are_told() -> None:
    with pytest.raises(MeasurementError, match=r"oregon has no record of step 5, of 6"):
        measure(records(), TOPOLOGY, warmup_steps=1, steps=5)
    lines = records()
    del lines[-1]["values"]["wait_s"]  # type: ignore[attr-defined]
    with pytest.raises(MeasurementError, match="no wait_s"):
        measure(lines, TOPOLOGY, warmup_steps=1, steps=3)


def a_repeat(repeat: int, together_s: float, alone_s: float) -> list[Run]:
    return [
        benches.a_run(
            repeat, None, benches.measured(step_s=together_s, wire_bytes=benches.WIRE_BYTES)
        ),
        *(benches.a_run(repeat, site, benches.measured(sites=1, step_s=alone_s)) for site in SITES),
    ]


def test_each_repeat_is_divided_by_its_own_solo_runs() -> None:
    # The machine was half as fast in the second repeat: the efficiency is the same.
    runs = [*a_repeat(0, 0.5, 0.4), *a_repeat(1, 1.0, 0.8)]
    found = result_of(benches.a_job(), TOPOLOGY, runs)
    assert found is not None
    assert found.efficiency.values == pytest.approx((0.8, 0.8))
    assert found.efficiency.half_width == pytest.approx(0.0, abs=1e-12)
    assert found.step_s.mean == 0.75
    assert [each.site for each in found.solo] == list(SITES)


def test_the_shares_of_a_step_add_up_to_it() -> None:
    found = result_of(benches.a_job(), TOPOLOGY, a_repeat(0, 0.5, 0.4))
    assert found is not None
    assert found.shares == pytest.approx(
        {"compute": 0.8, "intra": 0.0, "exposed_inter": 0.2, "wait": 0.0}
    )


def test_links_in_a_setting() -> None:
    found = result_of(benches.a_job(), TOPOLOGY, a_repeat(0, 0.5, 0.4))
    assert found is not None
    link = found.links[0]
    # 2 MB of the 12.5 MB that 200 Mbit/s carry in half a second.
    assert link.utilisation == pytest.approx(0.16)
    assert link.egress_usd_per_step == pytest.approx(2e6 * 0.05e-9)
    assert link.egress_usd_per_1e9_tokens == pytest.approx(1e-4 / 16384 * 1e9)
    assert (link.bytes_per_s, link.rtt_s) == (25e6, 0.02)


def test_only_complete_repeats_count() -> None:
    complete, half = a_repeat(0, 0.5, 0.4), a_repeat(1, 0.5, 0.1)[:2]
    failed = dataclasses.replace(
        benches.a_run(1, SITES[1]), measured=None, failed=Failed(code="RANK_EXITED", message="x")
    )
    job = benches.a_job()
    assert result_of(job, TOPOLOGY, [*half, failed]) is None
    found = result_of(job, TOPOLOGY, [*complete, *half, failed])
    assert found is not None
    assert found.efficiency.values == pytest.approx((0.8,))


def test_what_is_predicted() -> None:
    serial, overlap = benches.a_job("serial"), benches.a_job("overlap")
    compute_s = step_compute_s(serial, TOPOLOGY, TOPOLOGY.sites[0])
    gradient_bytes = 4 * num_parameters(serial.trainer.model)
    exchange_s = exchange_time_s(serial, TOPOLOGY, gradient_bytes)

    found = predict(serial, TOPOLOGY, "relay", 0.9, 2 * (compute_s + exchange_s))
    assert found is not None
    assert found.step_s == pytest.approx(compute_s + exchange_s)
    assert found.efficiency == pytest.approx(compute_s / (compute_s + exchange_s))
    assert found.deviation == pytest.approx(1.0)

    # One bucket holds the whole gradient: there is nothing that backward could hide.
    assert gradient_bytes < overlap.exchange.bucket_bytes
    alike = predict(overlap, TOPOLOGY, "relay", 0.9, 1.0)
    assert alike is not None
    assert alike.step_s == pytest.approx(found.step_s)

    off = predict(benches.a_job("off"), TOPOLOGY, "relay", None, compute_s)
    assert off is not None
    assert (off.exchange_s, off.efficiency) == (0.0, 1.0)
    assert off.deviation == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("rate", "micro_batch"), [("2Mbit/s", 32), ("2Gbit/s", 32), ("2Mbit/s", 8)]
)
def test_overlap_is_predicted_by_whatever_is_slower(rate: str, micro_batch: int) -> None:
    topology, job = a_swift_link(rate), benches.a_job("overlap")
    job = dataclasses.replace(
        job,
        exchange=dataclasses.replace(job.exchange, bucket_bytes=1 << 18),
        trainer=dataclasses.replace(job.trainer, micro_batch=micro_batch),
    )
    site = topology.sites[0]
    compute_s = step_compute_s(job, topology, site)
    embedding, first_block, *_ = layer_times(job, site, micro_batch)
    found = predict(job, topology, "relay", None, 1.0)
    assert found is not None
    if rate == "2Mbit/s":
        # The WAN decides, which begins when the last block and the head are done.
        later_s = embedding.backward_s + first_block.backward_s
        assert found.step_s == pytest.approx(compute_s - later_s + found.exchange_s)
    else:
        # The accelerator does: what is left is the first block, 384 rows of the embeddings, and a
        # norm of the second block, whose bucket was full before it.
        num_left = 12 * 128 * 128 + 4 * 128 + 384 * 128 + 2 * 128
        last_s = exchange_time_s(job, topology, 4 * num_left)
        assert found.step_s == pytest.approx(compute_s + last_s)


def a_swift_link(rate: str) -> Topology:
    return benches.a_topology(rtt="1ms", bandwidth=rate)


def test_packets_have_headers_and_compression_is_what_was_measured() -> None:
    job = benches.a_job()
    relay, netns = (predict(job, TOPOLOGY, name, None, 1.0) for name in ("relay", "netns"))
    assert relay is not None
    assert netns is not None
    assert netns.exchange_s > relay.exchange_s
    split = predict(benches.a_job(codec="split"), TOPOLOGY, "relay", 0.5, 1.0)
    assert split is not None
    half_rtt_s = TOPOLOGY.links[0].rtt_s / 2
    assert split.exchange_s - half_rtt_s == pytest.approx(
        (relay.exchange_s - half_rtt_s) / 2, rel=1e-3
    )


def test_nothing_is_predicted_of_real_compute() -> None:
    job = benches.a_job()
    job = dataclasses.replace(job, trainer=dataclasses.replace(job.trainer, compute="real"))
    assert predict(job, TOPOLOGY, "relay", None, 1.0) is None
