"""Error feedback: nothing is lost for good, nothing not finite stays, and memory has a bound."""

import random
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from isthmus.protos.frame import Kind, pack, unpack
from isthmus.sites.codecs.codec import Codec, Floats
from isthmus.sites.codecs.quantising_codecs import BlockCodec
from isthmus.sites.codecs.registry import BY_NAME
from isthmus.sites.gateway.reduction.chunk_reduction import (
    Bucket,
    BucketReduction,
    Finish,
    Own,
    Received,
    Send,
    roles,
)
from isthmus.sites.gateway.reduction.residuals import BucketResiduals, Residuals
from isthmus.sites.local.chunk_grid import grid
from isthmus.topology.spec.reduction_plan import ReductionPlan, star
from tests.fakes.gateway_rank import GatewayRank
from tests.fakes.gateway_sites import gateway_config, gateways

LOSSY = [codec for codec in BY_NAME.values() if not codec.lossless]
EACH = pytest.mark.parametrize("codec", LOSSY, ids=[codec.name for codec in LOSSY])


def gradient(seed: int, numel: int) -> Floats:
    generator = np.random.default_rng(seed)
    return (generator.standard_t(4, numel) * 1e-3 + 1e-5).astype(np.float32)


def step_max(codec: Codec, values: Floats) -> float:
    """Return the largest distance between two neighbouring numbers that the codec has for them."""
    peak = float(np.abs(values).max())
    if not isinstance(codec, BlockCodec):  # bf16: 8 bits
        return peak * 2.0**-7
    return peak * (2.0**-3 if codec.name.startswith("fp8") else 1.01 / codec.level_max)


def send(residuals: BucketResiduals, codec: Codec, values: Floats) -> Floats:
    """Return what all decode, who sends it among them."""
    encoded = residuals.encode(0, Kind.CONTRIBUTION, codec, values)
    decoded = codec.decode(encoded.payload, len(values))
    own = np.empty_like(values)
    encoded.part.write(own)
    assert own.tobytes() == decoded.tobytes()
    return decoded


@EACH
def test_what_arrives_adds_up_to_what_was_meant(codec: Codec) -> None:
    """Within one step, or for topk within what one element can wait for: never growing."""
    residuals, numel = BucketResiduals(0, 3000), 3000
    meant, arrived, alone = np.zeros(numel), np.zeros(numel), np.zeros(numel)
    gaps = []
    for round_ in range(120):
        values = gradient(round_, numel)
        meant += values
        alone += codec.quantize(values)
        decoded = send(residuals, codec, values)
        arrived += decoded
        gaps.append(float(np.abs(meant - arrived).max()))
    if not codec.name.startswith("topk"):
        peak = 2 * np.abs(np.concatenate([gradient(round_, numel) for round_ in range(120)]))
        assert max(gaps) <= step_max(codec, peak)
    assert np.linalg.norm(meant - arrived) < 0.5 * np.linalg.norm(meant - alone)


@EACH
def test_a_decay_is_of_the_residual_before_each_round(codec: Codec) -> None:
    """As if what is sent were the values plus the decayed residual, and nothing were kept."""
    numel, decay = 3000, np.float32(0.9)
    residuals, kept = Residuals(0.9).bucket(0, 5, numel), np.zeros(numel, dtype=np.float32)
    for round_ in range(5):
        values = gradient(round_, numel)
        kept *= decay
        expected = codec.encode_with_residual(values, kept)
        found = residuals.encode(0, Kind.CONTRIBUTION, codec, values)
        assert bytes(found.payload) == bytes(expected.payload)
        lost = residuals.of(0, Kind.CONTRIBUTION)
        assert lost is not None
        assert lost.tobytes() == kept.tobytes()


def test_a_lossless_codec_sends_what_a_lossy_one_has_left() -> None:
    """A run goes over to it as its links widen; later rounds have nothing to make up for."""
    residuals, numel = BucketResiduals(0, 300), 300
    sent = sum(
        (send(residuals, BY_NAME["int8"], gradient(each, numel)) for each in range(3)),
        np.zeros(numel, dtype=np.float32),
    )
    sent += send(residuals, BY_NAME["fp32"], gradient(3, numel))
    meant = sum((gradient(each, numel) for each in range(4)), np.zeros(numel, dtype=np.float32))
    np.testing.assert_allclose(sent, meant, rtol=0.0, atol=1e-5 * float(np.abs(meant).max()))
    assert residuals.of(0, Kind.CONTRIBUTION) is None
    again = send(residuals, BY_NAME["fp32"], gradient(4, numel))
    assert again.tobytes() == gradient(4, numel).tobytes()


def test_residuals_last_as_long_as_the_buckets() -> None:
    residuals = Residuals()
    first = residuals.bucket(0, 11, 100)
    other = residuals.bucket(1, 12, 100)
    assert residuals.bucket(0, 11, 100) is first
    assert residuals.bucket(1, 12, 100) is other
    again = residuals.bucket(0, 13, 100)
    assert again is not first
    assert residuals.bucket(1, 12, 100) is not other, "the model was cut anew: nothing fits"
    assert residuals.bucket(0, 13, 101) is not again


def reduce_round(
    plan: ReductionPlan,
    codec: Codec,
    residuals: list[Residuals],
    parts: list[Floats],
    weights: list[float],
    order: random.Random,
) -> None:
    """Reduce one bucket of one chunk in place."""
    cut = grid(len(parts[0]), len(parts[0]), (1,) * len(parts))
    bucket = Bucket(1, 0, 0, 5, (codec,), cut, time.thread_time)
    sites = [
        BucketReduction(bucket, plan, roles(plan, site), residuals[site].bucket(0, 5, cut.numel))
        for site in range(plan.num_sites)
    ]
    pending: list[tuple[int, Own | Received]] = [
        (site, Own(parts[site], weights[site])) for site in range(plan.num_sites)
    ]
    finished = 0
    while pending:
        site, event = pending.pop(order.randrange(len(pending)))
        for action in sites[site].chunk(0).handle(event):
            if isinstance(action, Send):
                frame = unpack(pack(action.frame))
                pending.append((action.site, Received(site, frame)))
            else:
                assert isinstance(action, Finish)
                finished += 1
    assert finished == plan.num_sites


@EACH
@pytest.mark.parametrize("rounds", [0, 3])
def test_a_chunk_that_is_done_again_owes_what_it_owed(codec: Codec, rounds: int) -> None:
    """Bit for bit: a rounding would make another code of some element, many rounds later."""
    plan, numel = ReductionPlan(2, (star(2, 0),), ""), 3000
    residual = Residuals().bucket(0, 5, numel)
    cut = grid(numel, numel, (1, 1))
    for round_ in range(rounds):
        send(residual, codec, gradient(round_, numel))
    before = residual.of(0, Kind.CONTRIBUTION)
    wanted = bytes(4 * numel) if before is None else before.tobytes()
    bucket = Bucket(1, rounds, 0, 5, (codec,), cut, time.thread_time)
    leaf = BucketReduction(bucket, plan, roles(plan, 1), residual).chunk(0)
    assert list(leaf.handle(Own(gradient(rounds, numel), 1.0)))
    after = residual.of(0, Kind.CONTRIBUTION)
    assert after is not None
    assert after.tobytes() != wanted
    leaf.put_back()
    found = residual.of(0, Kind.CONTRIBUTION)
    assert found is not None
    assert found.tobytes() == wanted


@pytest.mark.parametrize("name", ["int8", "int4", "fp8", "bf16"])
@pytest.mark.parametrize(
    "plan", [ReductionPlan(3, (), ""), ReductionPlan(3, (star(3, 1),), "")], ids=["gather", "star"]
)
def test_the_updates_add_up_over_many_rounds(plan: ReductionPlan, name: str) -> None:
    """All sites apply the same, and the sum stays within a step of each encoder on the way."""
    codec, numel, weights = BY_NAME[name], 500, [5.0, 1.0, 3.0]
    residuals = [Residuals() for _ in range(3)]
    order, meant, applied = random.Random(4), np.zeros(numel), np.zeros(numel)
    peak = np.zeros(1, dtype=np.float32)
    for round_ in range(60):
        parts = [
            gradient(100 * round_ + site, numel) * np.float32(weights[site]) for site in range(3)
        ]
        peak = np.maximum(peak, max(np.abs(part).max() for part in parts))
        meant += np.sum(parts, axis=0, dtype=np.float64) / 9
        reduce_round(plan, codec, residuals, parts, weights, order)
        assert parts[0].tobytes() == parts[1].tobytes() == parts[2].tobytes()
        applied += parts[0]
    # Three encoders of parts, whose steps are divided by 9; at a star's root, one of their mean.
    bound = (3 / 9 + 1 / 3) * step_max(codec, 2 * peak)
    assert np.abs(meant - applied).max() <= bound


@pytest.mark.slow
@pytest.mark.parametrize("feedback", [True, False])
def test_gateways_keep_what_they_owe_unless_told_not_to(feedback: bool, tmp_path: Path) -> None:
    """Over real connections: a tenth of a step each round arrives in the end, or never."""
    plan = ReductionPlan(2, (), "")
    configs = [
        gateway_config(tmp_path, plan, site, codec="int4", error_feedback=feedback)
        for site in range(2)
    ]
    applied = np.zeros(200)
    with gateways(configs) as members, ExitStack() as stack:
        ranks = [
            stack.enter_context(GatewayRank(member.config.socket_path, 0)) for member in members
        ]
        for rank, member in zip(ranks, members, strict=True):
            assert rank.receive()["op"] == "welcome"
            member.wait("connected")
            rank.share(0, 200)
        for round_ in range(31):
            for rank in ranks:
                rank.regions[0][:] = 0.1
                rank.regions[0][::50] = 7
                # In between, an exact bucket of the same number: it neither gets nor spoils
                # anything.
                rank.reduce(round_, 0, 200, 1.0, exact=round_ == 10)
            replies = [rank.receive() for rank in ranks]
            assert [reply["op"] for reply in replies] == ["reduced", "reduced"]
            first, second = (rank.regions[0] for rank in ranks)
            assert first.tobytes() == second.tobytes()
            if round_ == 10:
                assert first[1] == np.float32(0.1)
            else:
                applied += first
        for rank, member in zip(ranks, members, strict=True):
            rank.leave()
            member.gateway.stop()
    others = np.delete(applied, range(0, 200, 50))
    assert np.allclose(others, 3 if feedback else 0, atol=1.01 if feedback else 0)
