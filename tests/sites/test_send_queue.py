"""The frames of one link: in order, under a window, whatever breaks."""

import random

import pytest

from isthmus.protos.frame import ChunkKey, Kind
from isthmus.sites.gateway.links.send_queue import SendQueue, outgoing


def key(chunk: int, bucket: int = 0) -> ChunkKey:
    return ChunkKey(0, bucket, chunk, 0, Kind.CONTRIBUTION)


@pytest.mark.parametrize("seed", range(20))
def test_everything_is_delivered_once_in_order_whatever_breaks(seed: int) -> None:
    """Streams take, lose and acknowledge at random.

    The window is kept, and nothing is forgotten.
    """
    chance = random.Random(seed)
    queue = SendQueue(300, 0.1)
    keys = [key(chunk, bucket) for bucket in range(3) for chunk in range(10)]
    for each in chance.sample(keys, len(keys)):
        queue.push(outgoing(each, 0, bytes(chance.randrange(1, 150)), 600))
    on_the_way: dict[int, list[ChunkKey]] = {0: [], 1: []}
    acknowledged: set[ChunkKey] = set()
    for tick in range(10_000):
        if queue.is_empty:
            break
        stream = chance.randrange(2)
        move = chance.random()
        if move < 0.5:
            item = queue.take(stream, float(tick))
            if item is not None:
                assert item.key not in acknowledged
                on_the_way[stream].append(item.key)
        elif move < 0.9 and on_the_way[stream]:
            done = on_the_way[stream].pop(0)
            acknowledged.add(done)
            queue.acknowledge((done, 0), float(tick))
            queue.acknowledge((done, 0), float(tick))
        elif move > 0.97:
            assert queue.requeue(stream, float(tick)) == len(on_the_way[stream])
            on_the_way[stream].clear()
        assert queue.unacknowledged_bytes <= 300
    assert acknowledged == set(keys), f"{seed=}"
    totals = queue.totals(10_000.0)
    assert (totals.sent_frames, totals.raw_bytes) == (30, 18_000)
    assert queue.unsent_bytes == queue.unacknowledged_bytes == 0


def test_frames_leave_in_order_and_one_larger_than_the_window_alone() -> None:
    queue = SendQueue(100, 0.1)
    for chunk in (3, 1, 2):
        queue.push(outgoing(key(chunk), 0, bytes(1000), 1000))
    first = queue.take(0, 1.0)
    assert first is not None
    assert first.key == key(1)
    assert queue.take(1, 1.0) is None
    queue.acknowledge((key(1), 0), 1.5)
    assert queue.totals(9.0).busy_s == 0.5
    assert queue.totals(9.0).rtt_s == 0.5
    assert queue.take(0, 2.0) is not None
    assert queue.totals(3.0).busy_s == 1.5
    queue.clear(4.0)
    assert queue.is_empty
    assert queue.totals(9.0).busy_s == 2.5, "what is reported never shrinks"


def test_padding_leaves_only_while_nothing_else_does_and_counts_for_nothing() -> None:
    queue = SendQueue(100, 0.1)
    queue.warm_up(outgoing(ChunkKey(0, 0, n, 0, Kind.PADDING), 0, bytes(40), 0) for n in range(9))
    padding = [queue.take(0, 1.0) for _ in range(3)]
    assert all(each is not None and each.key.kind is Kind.PADDING for each in padding)
    assert queue.take(0, 1.0) is None, "the window is full"
    assert not queue.is_empty
    queue.push(outgoing(key(0), 0, bytes(30), 600))
    assert queue.take(1, 1.0) is None, "what is on the way is on the way"
    for each in padding[:2]:
        assert each is not None
        queue.acknowledge(each.name, 2.0)
    item = queue.take(1, 2.0)
    assert item is not None
    assert item.key == key(0)
    assert queue.take(1, 2.0) is None, "frames have come, so no more padding is needed"
    assert queue.requeue(0, 3.0) == 0, "padding that is lost stays lost"
    assert queue.unacknowledged_bytes == 30
    queue.acknowledge((key(0), 0), 4.0)
    assert queue.is_empty
    totals = queue.totals(9.0)
    assert (totals.sent_bytes, totals.sent_frames, totals.busy_s) == (30, 1, 2.0)


def test_what_an_epoch_that_is_over_had_to_say_is_not_sent() -> None:
    queue = SendQueue(1000, 0.1)
    for chunk in range(4):
        queue.push(outgoing(key(chunk), 0, bytes(100), 600))
    assert queue.take(0, 1.0) is not None
    assert queue.take(1, 1.0) is not None
    queue.drop_before(1)
    assert (queue.take(0, 2.0), queue.unsent_bytes) == (None, 0)
    queue.push(outgoing(key(0), 1, bytes(70), 600))
    again = queue.take(0, 2.0)
    assert again is not None
    assert again.name == (key(0), 1)
    queue.acknowledge((key(0), 0), 3.0)
    assert queue.requeue(0, 3.0) == 1, "the newer one; both have the same key"
    assert queue.requeue(1, 3.0) == 1, "and the other is forgotten"
    assert queue.unsent_bytes == 70
