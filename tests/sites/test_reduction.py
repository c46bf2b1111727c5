"""Bit-identical sums at every site: any tree, any codec, any order of arrival, repeats included."""

import random
import time
import weakref
from dataclasses import replace

import numpy as np
import pytest

from isthmus.protos.errors import (
    CorruptDataError,
    IsthmusError,
    LayoutMismatchError,
    RemoteProtocolError,
)
from isthmus.protos.frame import ChunkKey, Frame, Kind
from isthmus.sites.codecs.codec import Codec, Encoded, FloatPart
from isthmus.sites.codecs.registry import BY_NAME
from isthmus.sites.gateway.reduction.chunk_reduction import (
    Bucket,
    BucketReduction,
    Own,
    OwnEncoded,
    Received,
    Send,
    roles,
)
from isthmus.sites.local.chunk_grid import grid
from isthmus.topology.spec.reduction_plan import ReductionPlan, Tree, star
from tests.fakes.reductions import RANKS, World, check_rounds, contribution

PLANS = {
    "alone": ReductionPlan(1, (), ""),
    "gather-2": ReductionPlan(2, (), ""),
    "gather-4": ReductionPlan(4, (), ""),
    "star-3": ReductionPlan(3, (star(3, 1),), ""),
    "chain-4": ReductionPlan(4, (Tree(2, {0: 1, 1: 2, 3: 2}),), ""),
    "deep-5": ReductionPlan(5, (Tree(4, {0: 3, 1: 3, 3: 2, 2: 4}),), ""),
    "weighted-3": ReductionPlan(
        3, (Tree(0, {1: 0, 2: 0}, 2), Tree(2, {0: 1, 1: 2}, 1), star(3, 1)), ""
    ),
    "other-ways-down-4": ReductionPlan(
        4, (Tree(0, {1: 0, 2: 1, 3: 1}, 2, {3: 0, 2: 3, 1: 2}), Tree(2, {0: 2, 1: 0, 3: 0})), ""
    ),
}


def test_a_tree_takes_no_other_s_codec() -> None:
    plan = ReductionPlan(2, (star(2, 0), star(2, 1)), "")
    cut = grid(20, 10, (1, 1))
    codecs = (BY_NAME["fp32"], BY_NAME["int8"])
    bucket = Bucket(1, 0, 0, 5, codecs, cut, time.thread_time)
    sender, receiver = (BucketReduction(bucket, plan, roles(plan, site), None) for site in (1, 0))
    own = Own(np.ones(10, dtype=np.float32), 1.0)
    (sent,) = (each for each in sender.chunk(0).handle(own) if isinstance(each, Send))
    receiver.check(1, sent.frame)
    assert sent.frame.codec == codecs[0].number
    with pytest.raises(LayoutMismatchError, match="came with codec number 5; here it is fp32"):
        receiver.check(1, replace(sent.frame, codec=codecs[1].number))


def test_a_leaf_keeps_nothing_of_what_its_rank_encoded_once_it_is_sent() -> None:
    """The result may be long in coming, and the link has its own copy."""
    plan = ReductionPlan(2, (star(2, 0),), "")
    bucket = Bucket(1, 0, 0, 5, (BY_NAME["bf16"],), grid(10, 10, (1, 1)), time.thread_time)
    chunk = BucketReduction(bucket, plan, roles(plan, 1), None).chunk(0)
    payload = memoryview(bytes(20))
    kept = weakref.ref(payload)
    values = np.zeros(10, dtype=np.float32)
    own = Own(values, 1.0, OwnEncoded(BY_NAME["bf16"], [Encoded(payload, FloatPart(values))].pop))
    del payload
    (sent,) = (len(each.frame.payload) for each in chunk.handle(own) if isinstance(each, Send))
    assert sent == 20
    del own
    assert kept() is None


@pytest.mark.no_cover
@pytest.mark.parametrize(
    ("name", "codec"),
    [
        # What zstd does to a payload does not depend on trees.
        pytest.param(
            *(name, codec),
            marks=[pytest.mark.exhaustive] if "zstd" in key and name != "deep-5" else [],
            id=f"{key}-{name}",
        )
        for name in PLANS
        for key, codec in BY_NAME.items()
    ],
)
def test_all_sites_equal_the_reference_in_any_order(name: str, codec: Codec) -> None:
    plan = PLANS[name]
    weights = [[3.0, 0, 5, 1, 2], [0.0, 7, 5, 2, 2], [1.0, 1, 1, 0, 1]]
    weights = [each[: plan.num_sites] for each in weights if any(each[: plan.num_sites])]
    for seed, (numel, chunk_numel) in enumerate(((0, 8), (1, 8), (3, 8), (40, 8), (500, 300))):
        for feedback in (True, False):
            check_rounds(plan, codec, (numel, chunk_numel, RANKS), weights, seed, feedback)


def test_lossless_codecs_give_the_plain_weighted_mean() -> None:
    weights, order = [3.0, 4.0], random.Random(0)
    parts = [contribution(5, site, 100, weights[site]) for site in range(2)]
    expected = (parts[0] + parts[1]) / np.float32(7)
    World(PLANS["gather-2"], BY_NAME["split"], 100, 16).run(parts, weights, order)
    assert parts[0].tobytes() == parts[1].tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", ["gather-2", "star-3"])
def test_no_tokens_anywhere_give_zeros(name: str) -> None:
    plan = PLANS[name]
    world = World(plan, BY_NAME["fp32"], 10, 16)
    parts = [np.zeros(10, dtype=np.float32) for _ in range(plan.num_sites)]
    world.run(parts, [0.0] * plan.num_sites, random.Random(0))
    assert not any(each.any() for each in parts)


def good_frame(world: World, sender: int, kind: Kind = Kind.CONTRIBUTION) -> Frame:
    count = world.cut.span(0)[1]
    payload = world.bucket.codecs[0].encode(np.ones(count, dtype=np.float32))
    key = ChunkKey(7, 2, 0, sender, kind)
    return Frame(key, 3, world.bucket.codecs[0].number, 0, 99, world.cut.numel, 1.0, payload)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"epoch": 2}, RemoteProtocolError, "epoch 2; this is 3"),
        ({"numel": 41}, LayoutMismatchError, "41 elements there and 40 here"),
        ({"layout": 98}, LayoutMismatchError, "other parameters"),
        ({"codec": 4}, LayoutMismatchError, "codec number 4; here it is fp32"),
        ({"tree": 1}, RemoteProtocolError, "not its to send"),
        ({"weight": float("nan")}, RemoteProtocolError, "weight of nan"),
        ({"weight": -1.0}, RemoteProtocolError, "weight of -1"),
        ({"weight": 1e300}, RemoteProtocolError, "weight of 1e"),
        ({"payload": bytes(1000)}, RemoteProtocolError, "1000 bytes, at most 32"),
        ({"key": ChunkKey(7, 2, 99, 0, Kind.CONTRIBUTION)}, RemoteProtocolError, "number 99 came"),
        ({"key": ChunkKey(7, 2, 0, 2, Kind.CONTRIBUTION)}, RemoteProtocolError, "not its to send"),
        ({"key": ChunkKey(7, 2, 0, 0, Kind.RESULT)}, RemoteProtocolError, "not its to send"),
    ],
)
def test_foreign_frames_are_refused(
    changes: dict[str, object], error: type[IsthmusError], message: str
) -> None:
    world = World(PLANS["star-3"], BY_NAME["fp32"], 40, 8)
    hub = world.sites[1]
    frame = good_frame(world, 0)
    hub.check(0, frame)
    with pytest.raises(error, match=message):
        hub.check(0, replace(frame, **changes))  # type: ignore[arg-type]


def test_leaves_take_results_from_the_hub_only() -> None:
    world = World(PLANS["star-3"], BY_NAME["fp32"], 40, 8)
    leaf = world.sites[0]
    result = good_frame(world, 1, Kind.RESULT)
    leaf.check(1, result)
    with pytest.raises(RemoteProtocolError, match="not its to send"):
        leaf.check(2, replace(result, key=replace(result.key, site=2)))
    with pytest.raises(RemoteProtocolError, match="without this site's part"):
        list(leaf.chunk(0).handle(Received(1, result)))


def test_results_come_from_where_the_tree_says() -> None:
    plan = ReductionPlan(4, PLANS["other-ways-down-4"].trees[:1], "")
    world = World(plan, BY_NAME["fp32"], 40, 8)
    middle = world.sites[2]
    result = good_frame(world, 0, Kind.RESULT)
    middle.check(3, result)
    for other in (0, 1):
        with pytest.raises(RemoteProtocolError, match="not its to send"):
            middle.check(other, result)
    assert [site.peers(0) for site in world.sites] == [(), (0, 2), (1, 3), (1, 0)]


def test_a_payload_that_does_not_hold_the_chunk_is_corrupt() -> None:
    world = World(PLANS["gather-2"], BY_NAME["split"], 40, 8)
    list(world.handle(0, 0, Own(np.ones(8, dtype=np.float32), 1.0)))
    with pytest.raises(CorruptDataError, match="round 7 bucket 2 chunk 0"):
        list(world.handle(0, 0, Received(1, replace(good_frame(world, 1), payload=b"short"))))
