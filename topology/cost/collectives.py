"""The time of collectives inside a site, and how much of it hides behind compute. Pure.

Collectives follow Hockney's model, with a bandwidth that grows with the message. A message of M
bytes takes

    alpha + M / B(M),  B(M) = B M / (M + M_half)   that is   alpha + (M + M_half) / B

B is what large messages reach, M_half the size that reaches half of it. n ranks that have M bytes
each need (Thakur et al. 2005; bandwidths as nccl-tests' `busbw` counts them):

    reduce-scatter, all-gather, all-to-all    (n-1) (alpha + M/n / B)
    ring all-reduce                           both of the first: twice that

M_half is paid once a phase, for the ring's steps follow each other through one pipeline. With
several levels, each level works on the share that the levels inside it leave (Cho et al.,
"BlueConnect"): level i pays for M / (n_1 ... n_(i-1)). All ranks of a level's group run their own
collective of the next level at the same time, so a level's bandwidth is one rank's share of it.

What hides: with m micro-batches a step, gradients are complete only in the backward pass of the
**last** one. So one m-th of the step's backward time can hide an exchange, not all of it. Bucket i
becomes ready at r_i and takes t_i on a resource that serves buckets in order:

    e_i = max(r_i, e_(i-1)) + t_i,    exposed = max(0, e_n - end of the backward pass)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Channel:
    """The connection between the ranks of a group."""

    bytes_per_s: float
    """Bytes per second that a rank sends in large messages while it receives as many; may be
    infinite."""
    latency_s: float = 0.0
    """Seconds of latency of one step of a collective: alpha."""
    half_bytes: float = 0.0
    """Bytes of the message that reaches half the bandwidth: M_half."""

    def send_s(self, message_bytes: float) -> float:
        """Return the seconds of a transfer from one rank to another; 0 for an empty message."""
        if message_bytes <= 0:
            return 0.0
        return self.latency_s + (message_bytes + self.half_bytes) / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Level:
    """One level of a hierarchy: the number of parts that it joins, and their channel."""

    ranks: int
    channel: Channel


def reduce_scatter_s(levels: Sequence[Level], message_bytes: float, num_splits: int = 1) -> float:
    """Return the seconds of a reduce-scatter; an all-gather takes as long, the other way round.

    Steps: sum of (n_i - 1). Bytes sent per rank: M (P-1)/P over all levels together.

    Levels are innermost first; their ranks multiply to the group's size P. The message is the whole
    array. Each of `num_splits` parts is reduced after the one before, and pays the latency again.
    """
    total_s, share_bytes = 0.0, message_bytes
    for level in levels:
        if level.ranks > 1 and message_bytes > 0:
            total_s += _phase_s(level, share_bytes, num_splits)
        share_bytes /= level.ranks
    return total_s


def _phase_s(level: Level, message_bytes: float, num_splits: int) -> float:
    channel, steps = level.channel, level.ranks - 1
    sent_bytes = message_bytes * steps / level.ranks + num_splits * channel.half_bytes
    return num_splits * steps * channel.latency_s + sent_bytes / channel.bytes_per_s


def all_reduce_s(levels: Sequence[Level], message_bytes: float, num_splits: int = 1) -> float:
    """Return the seconds of a ring all-reduce, nested where there are several levels.

    Steps: sum of 2 (n_i - 1). Bytes sent per rank: 2 M (P-1)/P over all levels together.
    """
    return 2 * reduce_scatter_s(levels, message_bytes, num_splits)


def ring_s(levels: Sequence[Level], message_bytes: float) -> float:
    """Return the seconds of a reduce-scatter, or of an all-gather, round one ring of all ranks.

    As NCCL does it: the ring goes through a level's ranks before it leaves for the next part, and
    there are as many rings side by side as ranks that send out of a part, so that

        sum of (steps of level i) alpha_i + max of M (P-1)/P / (B_i n_1 ... n_(i-1))

    with P/(n_1 ... n_(i-1)) - P/(n_1 ... n_i) steps of level i. What nested collectives pay one
    after another goes on at the same time here, but latency is paid P-1 times.
    """
    size = math.prod(level.ranks for level in levels)
    if size == 1 or message_bytes <= 0:
        return 0.0
    latency_s, transfer_s, inside = 0.0, 0.0, 1
    sent_bytes = message_bytes * (size - 1) / size
    for level in levels:
        channel, outside = level.channel, inside * level.ranks
        if level.ranks > 1:
            latency_s += (size // inside - size // outside) * channel.latency_s
            part_bytes = sent_bytes / inside + channel.half_bytes
            transfer_s = max(transfer_s, part_bytes / channel.bytes_per_s)
        inside = outside
    return latency_s + transfer_s


def all_to_all_s(levels: Sequence[Level], message_bytes: float) -> float:
    """Return the seconds of an all-to-all in which a rank sends `message_bytes` in all.

    Messages do not shrink on the way: M (P - P_inner) / P bytes leave the inner level, at the outer
    level's rate.
    """
    total_s, inside = 0.0, 1
    size = math.prod(level.ranks for level in levels)
    for level in levels:
        if level.ranks > 1 and message_bytes > 0:
            leaving_bytes = message_bytes * inside * (level.ranks - 1) / size
            channel = level.channel
            total_s += (level.ranks - 1) * channel.latency_s
            total_s += (leaving_bytes + channel.half_bytes) / channel.bytes_per_s
        inside *= level.ranks
    return total_s


def levels_of(
    ranks: int, stride: int, node_ranks: int, node: Channel, cluster: Channel
) -> list[Level]:
    """Return the levels of a group whose members are `stride` ranks apart.

    Ranks are numbered node by node, so members within `node_ranks` ranks share a node. The
    bandwidth of `cluster`, which joins nodes, is one rank's share.
    """
    inside = math.gcd(ranks, max(1, node_ranks // stride))
    return [Level(inside, node), Level(ranks // inside, cluster)]


@dataclass(frozen=True, slots=True)
class Overlap:
    """The time of an exchange: how much of it is busy, exposed and hidden."""

    busy_s: float
    """Seconds of all buckets: the exchange's time if nothing hid it."""
    exposed_s: float
    """Seconds from the end of the backward pass to the end of the exchange."""

    @property
    def hidden_s(self) -> float:
        """The seconds of `busy_s` that the backward pass covered."""
        return max(0.0, self.busy_s - self.exposed_s)


def overlap(ready_s: Sequence[float], bucket_s: float) -> Overlap:
    """Return the exposed and hidden time of an exchange.

    Buckets are ready at `ready_s`, the last one when the backward pass ends. They are sent in this
    order, and take `bucket_s` each.
    """
    free_s = 0.0
    for each_s in ready_s:
        free_s = max(each_s, free_s) + bucket_s
    return Overlap(len(ready_s) * bucket_s, free_s - ready_s[-1])
